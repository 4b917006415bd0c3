"""The event log tells the whole life of every block."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.budget import BlockBudget
from branchkv.paged_cache.events import BlockEvent, EventLog
from branchkv.paged_cache.manager import CacheManager

KINDS: Mapping[str, int | None] = {"full": None, "window-5": 5}


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


def step(cache: CacheManager, seqs: Ids, tokens: int) -> None:
    cache.append(seqs, np.full(len(seqs), tokens))
    cache.copies_done()
    cache.observe(np.ones(len(seqs), dtype=np.int64))


def replayed(events: Iterable[BlockEvent]) -> dict[tuple[str, int], int]:
    """Counts that the log describes, by (kind, block); blocks that are free are left out."""
    counts: dict[tuple[str, int], int] = {}
    for event in events:
        key = event.kind, event.block
        if event.event in ("allocate", "copy"):
            assert key not in counts, f"{event}: taken while held"
            counts[key] = 1
            if event.event == "copy":
                counts[event.kind, event.ref_count] -= 1
            else:
                assert event.ref_count == 1
        elif event.event in ("retain", "release"):
            # Of several changes in one call, each carries the count that the call left.
            assert key in counts, f"{event}: not held"
            counts[key] = event.ref_count
        else:
            assert event.event == "free"
            assert counts.pop(key) == 0, f"{event}: freed while held"
    assert 0 not in counts.values(), "a block reached 0 without being freed"
    return counts


def held(cache: CacheManager) -> dict[tuple[str, int], int]:
    return {
        (kind, block): int(tables.pool.counts[block])
        for kind, tables in cache.tables.items()
        for block in np.flatnonzero(tables.pool.counts).tolist()
    }


def test_the_life_of_two_blocks() -> None:
    log = EventLog()
    cache = CacheManager(4, {"full": None}, BlockBudget(None), log)
    seqs = cache.open(1)
    step(cache, seqs, 3)
    children = cache.reorder(seqs, ids(0, 0))
    step(cache, children, 1)
    cache.free(children)
    (parent,) = seqs.tolist()
    # Which of the two sharers gets the copy is free; the other one keeps block 0. The copy's `ref_count` is its source.
    (copier,) = (event.sequence for event in log.events() if event.event == "copy")
    (keeper,) = set(children.tolist()) - {copier}
    assert [event for event in log.events() if event.step < 2] == [
        (0, "full", "allocate", 0, parent, 1),
        (1, "full", "retain", 0, parent, 2),
        (1, "full", "copy", 1, copier, 0),
    ]
    assert sorted(event for event in log.events() if event.step == 2) == [
        (2, "full", "free", 0, -1, 0),
        (2, "full", "free", 1, -1, 0),
        (2, "full", "release", 0, keeper, 0),
        (2, "full", "release", 1, copier, 0),
    ]


def test_step_is_counted_by_observe() -> None:
    log = EventLog()
    cache = CacheManager(4, KINDS, BlockBudget(None), log)
    seqs = cache.open(1)
    for _ in range(3):
        step(cache, seqs, 4)
    assert [(e.step, e.kind) for e in log.events()] == [(i, kind) for i in range(3) for kind in KINDS]


def test_a_refused_append_logs_nothing() -> None:
    log = EventLog()
    cache = CacheManager(4, KINDS, BlockBudget(3), log)
    with pytest.raises(Exception, match="out of KV blocks"):
        cache.append(cache.open(1), ids(9))
    assert log.events() == []


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_replay_gives_the_counts(block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    log = EventLog()
    cache = CacheManager(block_size, KINDS, BlockBudget(None), log)
    beams = cache.open(2)
    step(cache, beams, 7)
    for turn in range(60):
        beams = cache.reorder(beams, np.sort(rng.integers(0, len(beams), size=5)))
        cache.trim(beams)
        step(cache, beams, 1 + turn % 3)
        if turn % 7 == 0:
            cache.free(beams[:2])
            beams = np.append(beams[2:], cache.open(1))
        assert replayed(log.events()) == held(cache)
    cache.close()
    assert replayed(log.events()) == held(cache) == {}


def test_the_log_changes_nothing_else() -> None:
    """With a log the counts are kept by another path of the code."""
    results = []
    for log in (None, EventLog()):
        rng = np.random.default_rng(0)
        cache = CacheManager(3, KINDS, BlockBudget(None), log)
        beams = cache.open(1)
        step(cache, beams, 8)
        for _ in range(30):
            beams = cache.reorder(beams, rng.integers(0, len(beams), size=4))
            cache.trim(beams)
            step(cache, beams, 1)
            cache.check_integrity()
        results.append((held(cache), cache.stats.result()))
    assert results[0] == results[1]


def test_blocks_freed_between_append_and_copies_done_are_logged() -> None:
    log = EventLog()
    cache = CacheManager(4, {"full": None}, BlockBudget(None), log)
    seqs = cache.open(1)
    step(cache, seqs, 6)
    children = cache.reorder(seqs, ids(0, 0, 0))
    cache.append(children, ids(1, 1, 1))
    cache.free(children)
    cache.copies_done()
    freed = [event.block for event in log.events() if event.event == "free"]
    assert held(cache) == {}
    assert sorted(freed) == [0, 1, 2, 3]


def test_events_without_sequences_and_counts() -> None:
    log = EventLog()
    log.add("full", "free", ids(3, 5), ids(), ids())
    log.add("full", "free", ids(), ids(), ids())
    assert log.events() == [BlockEvent(0, "full", "free", 3, -1, 0), BlockEvent(0, "full", "free", 5, -1, 0)]


def test_the_log_keeps_its_own_copy() -> None:
    log, blocks = EventLog(), ids(1)
    log.add("full", "allocate", blocks, blocks, blocks)
    blocks[0] = 99
    assert log.events() == [BlockEvent(0, "full", "allocate", 1, 1, 1)]


def test_written_as_json_lines(tmp_path: Path) -> None:
    log = EventLog()
    cache = CacheManager(4, KINDS, BlockBudget(None), log)
    step(cache, cache.open(2), 9)
    cache.close()
    path = tmp_path / "events.jsonl"
    log.write(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [BlockEvent(**json.loads(line)) for line in lines] == log.events()
    assert set(json.loads(lines[0])) == set(BlockEvent._fields)
