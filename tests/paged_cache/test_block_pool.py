"""Block ids and reference counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from branchkv.paged_cache.block_pool import BlockPool, Ids


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


def pool_with_free(total: int, *free: int) -> BlockPool:
    """A pool of ``total`` blocks of which those in ``free`` were given back."""
    pool = BlockPool()
    pool.allocate(total)
    pool.add(ids(*free), -1)
    return pool


def test_new_pool_is_empty() -> None:
    pool = BlockPool()
    assert (pool.held, pool.high, pool.counts.tolist()) == (0, 0, [])


def test_allocate_counts_from_zero_with_a_count_of_one() -> None:
    pool = BlockPool()
    assert pool.allocate(3).tolist() == [0, 1, 2]
    assert pool.allocate(2).tolist() == [3, 4]
    assert pool.counts.tolist() == [1] * 5
    assert (pool.held, pool.high) == (5, 5)


def test_allocate_nothing() -> None:
    pool = BlockPool()
    none = pool.allocate(0)
    assert (none.tolist(), pool.high) == ([], 0)
    assert none.dtype == np.int64


def test_growth_keeps_the_counts() -> None:
    pool = BlockPool()
    pool.add(pool.allocate(64), 4)
    assert pool.allocate(1000).tolist() == list(range(64, 1064))
    assert pool.counts.tolist() == [5] * 64 + [1] * 1000


def test_freed_blocks_are_reused_lowest_first() -> None:
    pool = pool_with_free(6, 4, 1)
    assert pool.allocate(1).tolist() == [1]
    assert pool.allocate(1).tolist() == [4]
    assert pool.allocate(1).tolist() == [6]


def test_everything_freed_is_reused_as_it_was() -> None:
    pool = pool_with_free(5, 0, 1, 2, 3, 4)
    assert (pool.held, pool.high) == (0, 5)
    assert pool.allocate(5).tolist() == [0, 1, 2, 3, 4]


def test_single_blocks_fill_the_holes_first() -> None:
    assert pool_with_free(10, 1, 3, 5, 6, 7).allocate(3).tolist() == [1, 3, 5]
    assert pool_with_free(10, 1, 8).allocate(4).tolist() == [1, 8, 10, 11]


@pytest.mark.parametrize(
    ("free", "count", "run"),
    [
        ([], 3, [60, 61, 62]),
        ([1, 3, 5, 6, 7], 3, [5, 6, 7]),
        ([1, 3, 5, 6, 7, 20, 21, 22], 3, [5, 6, 7]),
        ([1, 58, 59], 4, [58, 59, 60, 61]),  # begins in a hole and goes on in blocks never used
        ([*range(1, 30, 2), *range(40, 50)], 3, [40, 41, 42]),  # behind many holes
        (list(range(0, 60, 2)), 2, [60, 61]),
        ([1, 3], 1, [1]),
        ([1, 3], 0, []),
    ],
)
def test_a_run_is_the_first_that_is_long_enough(free: list[int], count: int, run: list[int]) -> None:
    pool = pool_with_free(60, *free)
    assert pool.allocate_run(count).tolist() == run
    assert pool.held == 60 - len(free) + count
    assert pool.counts[run].tolist() == [1] * count


def test_within_a_capacity_a_run_gives_way_to_the_holes() -> None:
    pool = pool_with_free(10, 1, 4, 5, 8)
    pool.capacity = 11
    assert pool.allocate_run(3).tolist() == [1, 4, 5]
    assert pool.allocate_run(2).tolist() == [8, 10]
    assert (pool.held, pool.high) == (11, 11)


@pytest.mark.parametrize("take", [BlockPool.allocate, BlockPool.allocate_run])
def test_beyond_the_capacity_nothing_is_given_out(take: Callable[[BlockPool, int], Ids]) -> None:
    pool = pool_with_free(4, 2)
    pool.capacity = 5
    with pytest.raises(RuntimeError, match="3 blocks were asked for, 2 ids of 5 are free"):
        take(pool, 3)
    assert (pool.counts.tolist(), pool.high) == ([1, 1, 0, 1], 4)
    assert take(pool, 2).tolist() == [2, 4]


def test_add_takes_repeated_ids_and_mixed_amounts() -> None:
    pool = BlockPool()
    pool.allocate(3)
    pool.add(ids(0, 2, 0), 1)
    assert pool.counts.tolist() == [3, 1, 2]
    pool.add(ids(0, 1, 2, 0), ids(-1, 4, -2, -2))
    assert pool.counts.tolist() == [0, 5, 0]
    assert pool.held == 1


def test_add_nothing() -> None:
    pool = pool_with_free(2, 1)
    pool.add(ids(), 1)
    pool.add(ids(), ids())
    assert pool.counts.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("blocks", "amounts"),
    [
        ([1], -1),  # free already
        ([1], 1),  # free: nobody can hand it on
        ([0, 0], -1),  # twice in one call
        ([0, 2, 1], -1),  # two good ones beside it
        ([2], -3),
    ],
)
def test_a_wrong_count_raises_and_changes_nothing(blocks: list[int], amounts: int) -> None:
    pool = pool_with_free(3, 1)
    pool.add(ids(2), 1)
    with pytest.raises(RuntimeError, match="reference counts"):
        pool.add(ids(*blocks), amounts)
    assert pool.counts.tolist() == [1, 0, 2]


def test_the_message_names_the_blocks() -> None:
    with pytest.raises(RuntimeError, match=r"freed twice: \[1, 3\]"):
        pool_with_free(5, 1, 3).add(ids(0, 1, 3), -1)


def test_a_block_that_was_never_given_out_is_refused() -> None:
    pool = pool_with_free(3)
    with pytest.raises(RuntimeError, match="block 3 was never given out"):
        pool.add(ids(3), 1)
    assert pool.counts.tolist() == [1, 1, 1]


def test_random_use_never_gives_out_a_held_block() -> None:
    rng = np.random.default_rng(0)
    pool, counts = BlockPool(), dict[int, int]()
    for _ in range(2000):
        if rng.random() < 0.5:
            take = pool.allocate_run if rng.random() < 0.5 else pool.allocate
            taken = take(int(rng.integers(0, 6))).tolist()
            assert len(set(taken)) == len(taken)
            assert not counts.keys() & taken
            counts |= dict.fromkeys(taken, 1)
        elif counts:
            block = int(rng.choice(list(counts)))
            amount = int(rng.choice([-1, -1, -1, 1]))
            pool.add(ids(block), amount)
            counts[block] += amount
            if counts[block] == 0:
                del counts[block]
        assert {b: c for b, c in enumerate(pool.counts.tolist()) if c} == counts
        assert pool.held == len(counts)
