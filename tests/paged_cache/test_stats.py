"""KVStats against values worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.budget import BlockBudget
from branchkv.paged_cache.events import BlockEvent
from branchkv.paged_cache.manager import CacheManager
from branchkv.paged_cache.stats import KindSample, KindStats, KVStats, StatsCollector


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


def step(cache: CacheManager, seqs: Ids, tokens: int, weight: int = 1) -> None:
    cache.trim(seqs)
    cache.append(seqs, np.full(len(seqs), tokens))
    cache.copies_done()
    cache.observe(np.full(len(seqs), weight))


def three_beams(cache: CacheManager) -> None:
    """Make a prompt of 9 tokens, then 4 steps of 3 beams. With block size 4 and full attention that gives this table.

    step  parents     length  held           unshared   slots written
    0     prefill     9       3              3 * 3      9
    1     [0, 0, 0]   10      2 + 3          3 * 3      8 + 3 * 2 = 14   2 copies
    2     [0, 0, 2]   11      2 + 3          3 * 3      8 + 3 * 3 = 17   1 copy
    3     [1, 0, 2]   12      2 + 3          3 * 3      8 + 3 * 4 = 20
    4     [0, 1, 2]   13      2 + 3 + 3      3 * 4      23
    """
    seqs = cache.open(1)
    step(cache, seqs, 9, weight=3)
    for parents in ([0, 0, 0], [0, 0, 2], [1, 0, 2], [0, 1, 2]):
        seqs = cache.reorder(seqs, np.array(parents))
        step(cache, seqs, 1)


def test_three_beams_full_attention() -> None:
    cache = CacheManager(4, {"full": None}, BlockBudget(None))
    three_beams(cache)
    cache.set_block_bytes("full", 1000)
    stats = cache.stats.result()
    assert (stats.peak_blocks, stats.peak_blocks_unshared, stats.steps) == (8, 12, 5)
    assert (stats.forks, stats.blocks_copied) == (2 + 1, 2 + 1)
    assert stats.saved == pytest.approx(1 - 8 / 12)
    assert stats.saved_mean == pytest.approx((6 / 9 + 4 / 9 + 4 / 9 + 4 / 9 + 4 / 12) / 5)
    assert stats.utilisation == pytest.approx((9 / 12 + 14 / 20 + 17 / 20 + 20 / 20 + 23 / 32) / 5)
    assert (stats.block_size, stats.bytes_per_block) == (4, 1000)
    assert stats.by_kind["full"] == KindStats(
        bytes_per_block=1000,
        peak_blocks=8,
        peak_blocks_unshared=12,
        saved=stats.saved,
        saved_mean=stats.saved_mean,
        utilisation=stats.utilisation,
        blocks_copied=3,
        peak_bytes=8000,
    )


def test_three_beams_over_two_kinds() -> None:
    """A window of 5 tokens and block size 4 give this table.

        step  length  touched      held     unshared  slots written
        0     9       1, 2         2        3 * 2     5
        1     10      1, 2         1 + 3    3 * 2     4 + 3 * 2 = 10   2 copies
        2     11      1, 2         1 + 3    3 * 2     4 + 3 * 3 = 13   1 copy
        3     12      1, 2         1 + 3    3 * 2     4 + 3 * 4 = 16
        4     13      2, 3         3 + 3    3 * 2     12 + 3 = 15      block 1 has left the window

    Totals add the table of ``three_beams``.
    """
    cache = CacheManager(4, {"full": None, "window-5": 5}, BlockBudget(None))
    cache.set_block_bytes("full", 100)
    cache.set_block_bytes("window-5", 10)
    three_beams(cache)
    stats = cache.stats.result()
    window = stats.by_kind["window-5"]
    assert (window.peak_blocks, window.peak_blocks_unshared, window.blocks_copied) == (6, 6, 3)
    assert (window.saved, window.peak_bytes, window.bytes_per_block) == (0, 60, 10)
    assert window.saved_mean == pytest.approx((4 / 6 + 2 / 6 + 2 / 6 + 2 / 6 + 0) / 5)
    assert window.utilisation == pytest.approx((5 / 8 + 10 / 16 + 13 / 16 + 16 / 16 + 15 / 24) / 5)
    assert (stats.peak_blocks, stats.peak_blocks_unshared, stats.blocks_copied) == (8 + 6, 12 + 6, 6)
    assert (stats.forks, stats.bytes_per_block, stats.peak_bytes) == (3, 110, 860)
    assert stats.saved == pytest.approx(1 - 14 / 18)
    assert stats.saved_mean == pytest.approx((10 / 15 + 6 / 15 + 6 / 15 + 6 / 15 + 4 / 18) / 5)
    assert stats.utilisation == pytest.approx((14 / 20 + 24 / 36 + 30 / 36 + 36 / 36 + 38 / 56) / 5)


def test_peaks_of_held_and_unshared_may_lie_in_different_steps() -> None:
    cache = CacheManager(4, {"full": None}, BlockBudget(None))
    seqs = cache.open(1)
    step(cache, seqs, 4, weight=10)  # 1 held, 10 unshared
    step(cache, seqs, 9)  # 4 held, 4 unshared
    stats = cache.stats.result()
    assert (stats.peak_blocks, stats.peak_blocks_unshared) == (4, 10)
    assert stats.saved == pytest.approx(0.6)
    assert stats.saved_mean == pytest.approx((0.9 + 0) / 2)


def test_peak_bytes_is_that_of_one_step_not_the_sum_of_the_peaks() -> None:
    collector = StatsCollector(4, ("a", "b"))
    collector.block_bytes |= {"a": 100, "b": 10}
    collector.observe({"a": KindSample(5, 5, 20), "b": KindSample(1, 1, 4)})
    collector.observe({"a": KindSample(1, 1, 4), "b": KindSample(9, 9, 36)})
    stats = collector.result()
    assert (stats.peak_bytes, stats.peak_blocks) == (510, 10)
    assert [part.peak_bytes for part in stats.by_kind.values()] == [500, 90]


def test_weights_follow_the_order_of_live() -> None:
    cache = CacheManager(4, {"full": None}, BlockBudget(None))
    seqs = cache.open(3)
    cache.append(seqs, ids(1, 5, 9))
    cache.copies_done()
    cache.observe(ids(5, 2, 1))
    assert cache.stats.result().peak_blocks_unshared == 5 * 1 + 2 * 2 + 1 * 3


def test_nothing_shared_saves_nothing() -> None:
    cache = CacheManager(16, {"full": None}, BlockBudget(None))
    seqs = cache.open(2)
    step(cache, seqs, 20)
    step(cache, seqs, 1)
    stats = cache.stats.result()
    assert (stats.saved, stats.saved_mean, stats.forks, stats.blocks_copied) == (0, 0, 0, 0)


def test_steps_holding_nothing_are_left_out_of_the_means() -> None:
    cache = CacheManager(4, {"full": None}, BlockBudget(None))
    cache.observe(ids())
    seqs = cache.open(1)
    cache.observe(ids(8))
    step(cache, seqs, 4, weight=2)
    cache.free(seqs)
    cache.observe(ids())
    stats = cache.stats.result()
    assert (stats.steps, stats.saved_mean, stats.utilisation) == (1, 0.5, 1.0)


def test_before_any_step() -> None:
    stats = CacheManager(16, {"full": None}, BlockBudget(None)).stats.result()
    assert stats == KVStats(16, by_kind={"full": KindStats(0, 0, 0, 0.0, 0.0, 0.0, 0, 0)})


def test_a_child_that_replaces_its_parent_is_no_fork() -> None:
    cache = CacheManager(4, {"full": None}, BlockBudget(None))
    seqs = cache.reorder(cache.open(4), ids(3, 2, 0))
    assert cache.stats.result().forks == 0
    cache.reorder(seqs, ids(0, 0, 0, 1, 1))
    assert cache.stats.result().forks == 3


def test_several_tokens_at_once_save_nothing_rather_than_less() -> None:
    """One sequence shares nothing: without sharing it would hold the same blocks."""
    cache = CacheManager(1, {"window-5": 5}, BlockBudget(None))
    seqs = cache.open(1)
    for _ in range(3):
        step(cache, seqs, 4)
    stats = cache.stats.result()
    assert (stats.saved, stats.saved_mean) == (0, 0)


# -- KVStats ----------------------------------------------------------------------------------------------------------


def part(peak: int, unshared: int, mean: float = 0.0, bytes_per_block: int = 10) -> KindStats:
    return KindStats(bytes_per_block, peak, unshared, 1 - peak / unshared, mean, mean, 1, peak * bytes_per_block)


FIRST = KVStats(
    block_size=4,
    bytes_per_block=10,
    peak_blocks=8,
    peak_blocks_unshared=12,
    saved=1 - 8 / 12,
    saved_mean=0.2,
    utilisation=0.8,
    forks=3,
    blocks_copied=2,
    preemptions=1,
    prefill_tokens=9,
    prefill_tokens_reused=4,
    peak_bytes=80,
    cross_bytes=7,
    state_bytes=1,
    by_kind={"full": part(8, 12, 0.2)},
    steps=5,
    events=(BlockEvent(0, "full", "allocate", 0, 0, 1),),
)
SECOND = KVStats(
    block_size=4,
    bytes_per_block=20,
    peak_blocks=6,
    peak_blocks_unshared=20,
    saved=0.7,
    saved_mean=0.5,
    utilisation=0.5,
    forks=1,
    blocks_copied=1,
    prefill_tokens=8,
    peak_bytes=120,
    cross_bytes=5,
    by_kind={"full": part(5, 16, 0.5), "window-5": part(1, 4, 0.7)},
    steps=10,
)


@pytest.mark.parametrize("order", [(FIRST, SECOND), (SECOND, FIRST)], ids=["forward", "backward"])
def test_merged_sums_counters_keeps_peaks_and_weights_means(order: Sequence[KVStats]) -> None:
    both = order[0].merged(order[1])
    counters = (both.forks, both.blocks_copied, both.preemptions, both.prefill_tokens, both.prefill_tokens_reused)
    assert counters == (4, 3, 1, 17, 4)
    assert (both.peak_blocks, both.peak_blocks_unshared, both.bytes_per_block) == (8, 20, 20)
    assert (both.peak_bytes, both.cross_bytes, both.state_bytes, both.steps) == (120, 7, 1, 15)
    assert both.saved == pytest.approx(1 - 8 / 20)
    assert both.saved_mean == pytest.approx((0.2 * 5 + 0.5 * 10) / 15)
    assert both.utilisation == pytest.approx((0.8 * 5 + 0.5 * 10) / 15)
    assert both.events is None
    full = both.by_kind["full"]
    assert (full.peak_blocks, full.peak_blocks_unshared, full.blocks_copied, full.peak_bytes) == (8, 16, 2, 80)
    assert full.saved == pytest.approx(0.5)
    assert full.saved_mean == pytest.approx((0.2 * 5 + 0.5 * 10) / 15)
    assert both.by_kind["window-5"] == SECOND.by_kind["window-5"]


def test_merged_with_nothing_changes_nothing() -> None:
    empty = KVStats(block_size=4)
    for both in (SECOND.merged(empty), empty.merged(SECOND)):
        assert both == replace(SECOND, saved=both.saved)
        assert both.saved == pytest.approx(SECOND.saved)
    assert empty.merged(empty) == empty


def test_to_dict_is_plain_and_leaves_out_the_events() -> None:
    plain = FIRST.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert "events" not in plain
    assert {name: plain[name] for name in ("block_size", "peak_blocks", "steps", "state_bytes")} == {
        "block_size": 4,
        "peak_blocks": 8,
        "steps": 5,
        "state_bytes": 1,
    }
    assert plain["by_kind"]["full"]["peak_blocks"] == 8
    assert set(plain["by_kind"]["full"]) == set(KindStats.__annotations__)


def test_stats_of_a_manager_are_plain_too() -> None:
    """No numpy scalar may leave: json would refuse it."""
    cache = CacheManager(4, {"full": None, "window-5": 5}, BlockBudget(None))
    three_beams(cache)
    json.dumps(cache.stats.result().to_dict())


def test_events_do_not_flood_the_repr() -> None:
    assert "allocate" not in repr(FIRST)
