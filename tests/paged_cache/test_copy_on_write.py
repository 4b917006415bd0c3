"""When blocks are copied, how often, and what is kept until the copies have run."""

from __future__ import annotations

import numpy as np
import pytest

from branchkv.errors import OutOfBlocksError
from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.budget import BlockBudget
from branchkv.paged_cache.manager import CacheManager
from branchkv.paged_cache.views import Writes


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


def manager(block_size: int = 4, limit: int | None = None) -> CacheManager:
    return CacheManager(block_size, {"full": None}, BlockBudget(limit))


def append(cache: CacheManager, seqs: Ids, tokens: int = 1) -> Writes:
    """Append to every sequence; the copies are taken as done."""
    writes = cache.append(seqs, np.full(len(seqs), tokens))["full"]
    cache.copies_done()
    cache.check_integrity()
    return writes


def forked(cache: CacheManager, prompt: int, children: int) -> Ids:
    (seq,) = cache.open(1)
    append(cache, ids(int(seq)), prompt)
    return cache.reorder(ids(int(seq)), np.zeros(children, dtype=np.int64))


@pytest.mark.parametrize(
    ("prompt", "copies", "new", "slots"),
    [
        (7, 2, 0, [7, 11, 15]),  # blocks 0 and 1; the two copies are 2 and 3
        (8, 0, 3, [8, 12, 16]),
        (9, 2, 0, [9, 13, 17]),  # blocks 0, 1 and 2; the two copies are 3 and 4
    ],
)
def test_three_children_of_one_prompt(prompt: int, copies: int, new: int, slots: list[int]) -> None:
    cache = manager()
    children = forked(cache, prompt, 3)
    held = cache.held["full"]
    assert held == -(-prompt // 4)  # the fork itself took nothing
    assert cache.need(children, ids(1, 1, 1)) == {"full": copies + new}
    writes = append(cache, children)
    assert writes.copies.source.tolist() == [held - 1] * copies
    assert writes.copies.target.tolist() == [held + i for i in range(copies)]
    assert sorted(writes.slots.tolist()) == slots
    assert cache.held["full"] == held + copies + new
    assert cache.stats.result().blocks_copied == copies
    # The second step writes to blocks that are exclusive by now.
    assert len(append(cache, children).copies.source) == 0


@pytest.mark.parametrize("children", [1, 2, 3, 8, 100])
def test_exactly_one_copy_less_than_sharers(children: int) -> None:
    cache = manager()
    assert len(append(cache, forked(cache, 5, children)).copies.source) == children - 1


def test_an_only_child_writes_in_place() -> None:
    cache = manager()
    (child,) = forked(cache, 6, 1)
    writes = append(cache, ids(int(child)))
    assert (writes.slots.tolist(), len(writes.copies.source)) == ([6], 0)


def test_survivors_that_map_one_to_one_copy_nothing() -> None:
    cache = manager()
    beams = forked(cache, 6, 4)
    append(cache, beams)
    for parents in ([1, 0, 3, 2], [3, 2, 1, 0], [0, 1, 2, 3], [2, 0]):
        beams = cache.reorder(beams, np.array(parents))
        assert len(append(cache, beams).copies.source) == 0
    assert cache.stats.result().forks == 3


def test_a_full_block_is_never_copied() -> None:
    cache = manager(block_size=1)
    rng = np.random.default_rng(0)
    beams = forked(cache, 3, 8)
    for _ in range(20):
        assert len(append(cache, beams).copies.source) == 0
        beams = cache.reorder(beams, rng.integers(0, 8, size=8))


def test_writers_beside_readers_all_get_a_copy() -> None:
    """A sharer that does not write keeps the block; nobody may write over what it has read."""
    cache = manager()
    children = forked(cache, 6, 3)
    writes = append(cache, children[:2])
    assert writes.copies.source.tolist() == [1, 1]
    assert sorted(writes.slots.tolist()) == [2 * 4 + 2, 3 * 4 + 2]
    # The last one is alone on the old block by now.
    last = append(cache, children[2:])
    assert (last.slots.tolist(), len(last.copies.source)) == ([6], 0)


def test_the_need_of_the_next_step() -> None:
    """One block per sequence whose last block is full, and r - 1 for a part-filled one shared by r."""
    cache = manager()
    full = forked(cache, 8, 3)
    shared = forked(cache, 6, 4)
    own = forked(cache, 5, 1)
    everyone = np.concatenate([full, shared, own])
    assert cache.need(everyone, np.ones(8, dtype=np.int64)) == {"full": 3 + 3 + 0}
    held = cache.held["full"]
    append(cache, everyone)
    assert cache.held["full"] == held + 6


def test_several_tails_in_one_step() -> None:
    cache = manager()
    a, b = forked(cache, 5, 2), forked(cache, 7, 3)
    mixed = np.array([b[0], a[0], b[1], a[1], b[2]])
    writes = append(cache, mixed)
    assert sorted(writes.copies.source.tolist()) == [1, 3, 3]
    assert len(set(writes.copies.target.tolist())) == 3
    blocks = writes.tables.blocks
    assert len(set(blocks[:, 1].tolist())) == 5
    assert blocks[[0, 2, 4], 0].tolist() == [blocks[0, 0]] * 3


def test_a_copy_may_be_followed_by_new_blocks_in_the_same_step() -> None:
    cache = manager()
    children = forked(cache, 6, 2)
    writes = append(cache, children, 7)
    assert len(writes.copies.source) == 1
    assert writes.tables.lengths.tolist() == [13, 13]
    assert len(np.unique(writes.slots)) == 14
    assert not set(writes.slots.tolist()) & set(range(4, 6))  # tokens 4 and 5 lie there


# -- pending copies ---------------------------------------------------------------------------------------------------


def test_both_ends_stay_until_the_copies_have_run() -> None:
    cache = manager()
    children = forked(cache, 6, 3)
    copies = cache.append(children, ids(1, 1, 1))["full"].copies
    ends = np.unique(np.concatenate([copies.source, copies.target]))
    cache.check_integrity()
    cache.free(children)
    cache.check_integrity()
    counts = cache.tables["full"].pool.counts
    assert np.flatnonzero(counts).tolist() == ends.tolist()
    with pytest.raises(RuntimeError, match="copies_done"):
        cache.append(cache.open(1), ids(4))
    cache.copies_done()
    cache.check_integrity()
    assert cache.held == {"full": 0}


def test_targets_are_not_sources_of_the_same_step() -> None:
    """Storage may run all copies of a step as one."""
    rng = np.random.default_rng(1)
    cache = manager(block_size=3)
    beams = forked(cache, 4, 8)
    for _ in range(100):
        writes = append(cache, beams)
        assert not np.isin(writes.copies.target, writes.copies.source).any()
        assert len(np.unique(writes.copies.target)) == len(writes.copies.target)
        assert len(np.unique(writes.slots)) == 8
        beams = cache.reorder(beams, rng.integers(0, 8, size=8))


def test_close_with_pending_copies_leaves_the_pool_whole() -> None:
    cache = manager()
    cache.append(forked(cache, 6, 3), ids(1, 1, 1))
    cache.close()
    cache.check_integrity()
    assert cache.held == {"full": 0}
    append(cache, cache.open(1), 9)  # and the manager can be used again


def test_copies_done_twice_is_harmless() -> None:
    cache = manager()
    append(cache, forked(cache, 6, 3))
    cache.copies_done()
    cache.check_integrity()


def test_copies_count_against_the_budget() -> None:
    cache = manager(limit=4)
    children = forked(cache, 6, 4)  # 2 blocks, and 3 copies to come
    with pytest.raises(OutOfBlocksError) as error:
        cache.append(children, ids(1, 1, 1, 1))
    assert (error.value.needed, error.value.free, error.value.total) == (3, 2, 4)
    append(cache, cache.reorder(children, ids(0, 1, 2)))  # three of them fit
    assert cache.held == {"full": 4}
