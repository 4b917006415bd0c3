"""Sequences over all layer kinds: handles, all or nothing, the integrity check."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from branchkv.errors import OutOfBlocksError
from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.budget import BlockBudget, ByteBudget
from branchkv.paged_cache.manager import CacheManager
from branchkv.paged_cache.views import Writes

BOTH: Mapping[str, int | None] = {"full": None, "window-5": 5}


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


def manager(limit: int | None = None, block_size: int = 4, kinds: Mapping[str, int | None] = BOTH) -> CacheManager:
    return CacheManager(block_size, kinds, BlockBudget(limit))


def append(cache: CacheManager, seqs: Ids, tokens: Ids) -> dict[str, Writes]:
    writes = cache.append(seqs, tokens)
    cache.copies_done()
    cache.check_integrity()
    return writes


def state(cache: CacheManager) -> object:
    """Everything that a refused call must leave alone."""
    tables = {
        kind: (t.view(cache.live).blocks.tolist(), t.pool.counts.tolist(), t.pool.high)
        for kind, t in cache.tables.items()
    }
    return cache.live.tolist(), cache.lengths(cache.live).tolist(), cache.held, tables, cache.stats.result()


# -- handles ----------------------------------------------------------------------------------------------------------


def test_open_hands_out_distinct_handles_and_holds_nothing() -> None:
    cache = manager()
    handles = [*cache.open(3).tolist(), *cache.open(0).tolist(), *cache.open(40).tolist()]
    assert len(set(handles)) == 43
    assert cache.live.tolist() == sorted(handles)
    assert cache.lengths(cache.live).tolist() == [0] * 43
    assert cache.held == {"full": 0, "window-5": 0}


def test_an_empty_manager() -> None:
    cache = manager()
    assert cache.live.tolist() == []
    cache.check_integrity()
    cache.close()
    cache.check_integrity()


def test_all_kinds_have_the_same_length_and_their_own_blocks() -> None:
    cache = manager()
    seqs = cache.open(2)
    writes = append(cache, seqs, ids(13, 2))
    assert cache.lengths(seqs).tolist() == [13, 2]
    assert [write.tables.lengths.tolist() for write in writes.values()] == [[13, 2], [13, 2]]
    assert writes["full"].tables.blocks.tolist() == [[0, 1, 2, 3], [4, -1, -1, -1]]
    assert writes["window-5"].tables.blocks.tolist() == [[-1, -1, 0, 1], [2, -1, -1, -1]]
    assert cache.held == {"full": 5, "window-5": 3}


def test_reorder_returns_the_children_in_the_order_of_the_parents() -> None:
    cache = manager(kinds={"full": None})
    seqs = cache.open(3)
    append(cache, seqs, ids(1, 2, 3))
    children = cache.reorder(seqs, ids(2, 0, 2, 2))
    assert cache.lengths(children).tolist() == [3, 1, 3, 3]
    assert sorted(cache.live.tolist()) == sorted(children.tolist())
    assert len(set(children.tolist())) == 4
    # The first child of each parent goes on under the parent's handle.
    assert (children[0], children[1]) == (seqs[2], seqs[0])
    assert cache.held == {"full": 2}
    cache.check_integrity()


def test_reorder_to_nobody_frees_all() -> None:
    cache = manager()
    seqs = cache.open(3)
    append(cache, seqs, ids(9, 9, 9))
    assert cache.reorder(seqs, ids()).tolist() == []
    assert cache.held == {"full": 0, "window-5": 0}
    assert cache.live.tolist() == []
    cache.check_integrity()


def test_reorder_of_empty_sequences() -> None:
    cache = manager()
    children = cache.reorder(cache.open(1), ids(0, 0, 0))
    append(cache, children, ids(1, 1, 1))
    assert cache.held == {"full": 3, "window-5": 3}


def test_a_wide_fork_needs_no_blocks() -> None:
    cache = manager(limit=4, kinds={"full": None})
    seqs = cache.open(1)
    append(cache, seqs, ids(16))
    children = cache.reorder(seqs, np.zeros(1000, dtype=np.int64))
    assert cache.held == {"full": 4}
    assert cache.tables["full"].pool.counts.tolist() == [1000] * 4
    cache.free(children[1:])
    assert cache.tables["full"].pool.counts.tolist() == [1] * 4
    cache.check_integrity()


def test_handles_are_used_again() -> None:
    cache = manager()
    for _ in range(50):
        seqs = cache.open(7)
        append(cache, seqs, np.full(7, 5))
        cache.free(seqs)
    assert int(seqs.max()) < 16
    assert cache.tables["full"].pool.high == 14


# -- free -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pick", [[1, 1], [0, 2], [2], [99], [0, 99]])
def test_a_wrong_free_raises_and_changes_nothing(pick: list[int]) -> None:
    cache = manager()
    seqs = cache.open(3)
    append(cache, seqs, ids(6, 6, 6))
    cache.free(seqs[2:])
    before = state(cache)
    with pytest.raises(RuntimeError, match="distinct open sequences"):
        cache.free(np.array(pick))
    assert state(cache) == before
    cache.check_integrity()


def test_free_of_a_negative_handle_is_refused() -> None:
    cache = manager()
    append(cache, cache.open(8), np.full(8, 6))
    before = state(cache)
    with pytest.raises(RuntimeError):
        cache.free(ids(-1))
    assert state(cache) == before


CLOSED: dict[str, Callable[[CacheManager, Ids], object]] = {
    "append": lambda cache, seqs: cache.append(seqs, np.ones_like(seqs)),
    "reorder": lambda cache, seqs: cache.reorder(seqs, ids(0, 0)),
}


@pytest.mark.parametrize("call", CLOSED.values(), ids=CLOSED)
@pytest.mark.parametrize("pick", [[1], [0, 0], [0, 1]], ids=["closed", "repeated", "one of two closed"])
def test_handles_that_are_not_open_or_not_distinct_are_refused(
    call: Callable[[CacheManager, Ids], object], pick: list[int]
) -> None:
    cache = manager()
    seqs = cache.open(2)
    append(cache, seqs, ids(6, 6))
    cache.free(seqs[1:])
    before = state(cache)
    with pytest.raises(RuntimeError):
        call(cache, seqs[pick])
    assert state(cache) == before


@pytest.mark.parametrize("parent", [-1, 2])
def test_reorder_refuses_parents_out_of_range_and_changes_nothing(parent: int) -> None:
    cache = manager()
    seqs = cache.open(2)
    append(cache, seqs, ids(6, 6))
    before = state(cache)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        cache.reorder(seqs, ids(parent))
    assert state(cache) == before


# -- budget -----------------------------------------------------------------------------------------------------------


def test_append_is_all_or_nothing_over_kinds_and_sequences() -> None:
    """Each kind alone and each sequence alone would fit; together they do not."""
    cache = manager(limit=9)
    seqs = cache.open(2)
    append(cache, seqs, ids(6, 3))
    assert cache.held == {"full": 3, "window-5": 3}
    beams = cache.reorder(seqs, ids(0, 0, 1, 1))
    tokens = ids(1, 1, 2, 2)  # per kind: one copy for the pair of 6, one copy and two blocks for the pair of 3
    assert cache.need(beams, tokens) == {"full": 4, "window-5": 4}
    before = state(cache)
    with pytest.raises(OutOfBlocksError) as error:
        cache.append(beams, tokens)
    assert (error.value.needed, error.value.free, error.value.total) == (8, 3, 9)
    assert state(cache) == before
    cache.check_integrity()
    # The refused call left no copies to wait for, and a smaller one fits.
    append(cache, beams[:2], ids(1, 1))
    assert cache.held == {"full": 4, "window-5": 4}


def test_the_last_block_of_the_budget_can_be_used() -> None:
    cache = manager(limit=3, kinds={"full": None})
    seqs = cache.open(1)
    append(cache, seqs, ids(12))
    with pytest.raises(OutOfBlocksError, match="needed 1, free 0, total 3"):
        cache.append(seqs, ids(1))
    cache.free(seqs)
    append(cache, cache.open(3), ids(4, 4, 4))


def test_a_window_kind_runs_for_ever_in_a_small_budget() -> None:
    cache = manager(limit=3, kinds={"window-5": 5})
    seqs = cache.open(1)
    for _ in range(200):
        cache.trim(seqs)
        append(cache, seqs, ids(1))
    assert cache.tables["window-5"].pool.high <= 3


def test_ids_stay_below_the_capacity() -> None:
    """An id at or above it lies outside the tensors."""
    cache = manager(limit=4, kinds={"full": None}, block_size=1)
    cache.set_capacity("full", 4)
    seqs = cache.open(4)
    append(cache, seqs, ids(1, 1, 1, 1))
    cache.free(seqs[[0, 2]])
    writes = append(cache, seqs[[1]], ids(2))  # no run is left, but two holes
    assert writes["full"].slots.tolist() == [0, 2]


def test_append_beyond_the_capacity_changes_nothing() -> None:
    cache = manager(kinds={"full": None})
    cache.set_capacity("full", 3)
    seqs = cache.open(1)
    append(cache, seqs, ids(6))
    seqs = cache.reorder(seqs, ids(0, 0))
    before = state(cache)
    with pytest.raises((OutOfBlocksError, RuntimeError)):
        cache.append(seqs, ids(5, 5))  # one copy and two blocks, of which the copy alone would fit
    assert state(cache) == before


def test_bytes_of_blocks_are_checked_as_soon_as_they_are_known() -> None:
    cache = CacheManager(4, BOTH, ByteBudget(1000))
    seqs = cache.open(1)
    append(cache, seqs, ids(12))
    assert cache.held == {"full": 3, "window-5": 2}
    cache.set_block_bytes("full", 250)
    with pytest.raises(OutOfBlocksError) as error:
        cache.set_block_bytes("window-5", 150)  # 3 * 250 + 2 * 150 = 1050
    assert (error.value.needed, error.value.free, error.value.total) == (5, 4, 4)
    cache.close()
    cache.check_integrity()


# -- check_integrity --------------------------------------------------------------------------------------------------


def test_integrity_finds_a_count_that_no_table_explains() -> None:
    cache = manager(kinds={"full": None})
    append(cache, cache.open(1), ids(9))
    cache.tables["full"].pool.add(ids(1), 1)
    with pytest.raises(RuntimeError, match=r"kind full: block 1 has count 2 != 1 tables \+ 0 pending"):
        cache.check_integrity()


def test_integrity_finds_a_leak_of_a_closed_sequence() -> None:
    cache = manager()
    seqs = cache.open(1)
    append(cache, seqs, ids(9))
    cache.tables["window-5"].free(seqs)
    cache.tables["window-5"].open(seqs)
    cache.check_integrity()  # empty, but consistent
    cache.tables["window-5"].append(seqs, ids(3))
    cache.tables["window-5"].pool.add(ids(0), -1)
    with pytest.raises(RuntimeError, match=r"kind window-5: block 0 has count 0 != 1 tables \+ 0 pending"):
        cache.check_integrity()
