"""Block tables of one layer kind: slots, widths, rows, windows. Copy-on-write is counted in test_copy_on_write.py."""

from __future__ import annotations

import numpy as np
import pytest

from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.tables import BlockTables
from branchkv.paged_cache.views import Writes


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


def opened(*lengths: int, block_size: int = 4, window: int | None = None) -> BlockTables:
    """Sequences 0, 1, ... of the given lengths, each with blocks of its own."""
    tables = BlockTables(block_size, window, None, "full")
    seqs = np.arange(len(lengths))
    tables.open(seqs)
    append(tables, seqs, ids(*lengths))
    return tables


def append(tables: BlockTables, seqs: Ids, tokens: Ids) -> Writes:
    writes = tables.append(seqs, tokens)
    tables.release_copies(writes.copies)
    return writes


def blocks(tables: BlockTables, *seqs: int) -> list[list[int]]:
    listed: list[list[int]] = tables.view(ids(*seqs)).blocks.tolist()
    return listed


# -- append -----------------------------------------------------------------------------------------------------------


def test_prompts_of_several_lengths() -> None:
    tables = BlockTables(4, None, None, "full")
    tables.open(ids(0, 1, 2))
    assert tables.need(ids(0, 1, 2), ids(9, 0, 4)) == 4
    writes = append(tables, ids(0, 1, 2), ids(9, 0, 4))
    assert writes.slots.tolist() == [*range(9), *range(12, 16)]
    assert writes.tables.blocks.tolist() == [[0, 1, 2], [-1, -1, -1], [3, -1, -1]]
    assert writes.tables.lengths.tolist() == [9, 0, 4]
    assert (writes.tables.block_size, writes.tables.window) == (4, None)
    assert (writes.copies.source.tolist(), writes.copies.target.tolist()) == ([], [])


def test_the_order_of_the_slots_is_that_of_the_call() -> None:
    tables = opened(3, 4)
    writes = append(tables, ids(1, 0), ids(1, 2))
    assert writes.slots.tolist() == [8, 3, 12]
    assert writes.tables.blocks.tolist() == [[1, 2], [0, 3]]


def test_a_block_is_taken_only_by_the_write_that_needs_it() -> None:
    tables = opened(3)
    held = []
    for _ in range(6):
        append(tables, ids(0), ids(1))
        held.append(tables.pool.held)
    assert held == [1, 2, 2, 2, 2, 3]


def test_append_of_nothing() -> None:
    tables = opened(3, 4)
    writes = append(tables, ids(0, 1), ids(0, 0))
    assert writes.slots.tolist() == []
    assert tables.lengths(ids(0, 1)).tolist() == [3, 4]
    nobody = append(tables, ids(), ids())
    assert nobody.slots.tolist() == []
    assert nobody.tables.blocks.shape == (0, 0)


def test_block_size_one_and_blocks_longer_than_everything() -> None:
    assert append(opened(2, 3, block_size=1), ids(0, 1), ids(1, 1)).slots.tolist() == [5, 6]
    assert append(opened(2, 3, block_size=512), ids(0, 1), ids(1, 1)).slots.tolist() == [2, 515]


def test_growth_in_rows_and_columns_keeps_every_table() -> None:
    tables = opened(*[5] * 8)
    before = blocks(tables, *range(8))
    tables.open(np.arange(8, 100))
    append(tables, ids(99), ids(4 * 50))
    assert blocks(tables, *range(8)) == before
    assert blocks(tables, 8, 98) == [[], []]
    assert len(blocks(tables, 99)[0]) == 50
    assert tables.lengths(ids(0, 7, 8, 99)).tolist() == [5, 5, 0, 200]


def test_a_prompt_gets_a_physical_run() -> None:
    tables = opened(4, 4, 4, 4)
    tables.free(ids(1))
    tables.open(ids(1, 4))
    assert append(tables, ids(1), ids(8)).tables.blocks.tolist() == [[4, 5]]
    assert append(tables, ids(4), ids(4)).tables.blocks.tolist() == [[1]]


def test_a_view_is_a_copy() -> None:
    tables = opened(4, 8)
    view = tables.view(ids(0, 1))
    append(tables, ids(0), ids(1))
    tables.free(ids(1))
    assert view.blocks.tolist() == [[0, -1], [1, 2]]
    assert view.lengths.tolist() == [4, 8]


# -- fork, free -------------------------------------------------------------------------------------------------------


def test_reorder_shares_blocks_and_counts_tables() -> None:
    tables = opened(6, 6, 6)
    tables.reorder(ids(0, 1, 2), parents=ids(0, 0, 2), children=ids(0, 1, 2))
    assert blocks(tables, 0, 1, 2) == [[0, 1], [0, 1], [4, 5]]
    assert tables.pool.counts.tolist() == [2, 2, 0, 0, 1, 1]
    assert tables.references(ids(0, 1, 2)).tolist() == [2, 2, 0, 0, 1, 1]
    assert tables.references(ids(2)).tolist() == [0, 0, 0, 0, 1, 1]


def test_reorder_into_rows_that_were_not_in_use() -> None:
    tables = opened(5, 9)
    tables.reorder(ids(0, 1), parents=ids(1, 1, 1), children=ids(1, 20, 0))
    assert blocks(tables, 0, 1, 20) == [[2, 3, 4]] * 3
    assert tables.lengths(ids(0, 1, 20)).tolist() == [9, 9, 9]
    assert tables.pool.counts.tolist() == [0, 0, 3, 3, 3]


def test_reorder_leaves_other_sequences_alone() -> None:
    tables = opened(4, 12, 4)
    tables.reorder(ids(0, 2), parents=ids(1, 1), children=ids(2, 0))
    assert blocks(tables, 1) == [[1, 2, 3]]
    assert tables.pool.counts.tolist() == [0, 1, 1, 1, 2]


def test_a_row_used_again_shows_nothing_of_its_last_owner() -> None:
    tables = opened(16, 4)
    tables.reorder(ids(0, 1), parents=ids(1, 1), children=ids(1, 0))
    append(tables, ids(0), ids(12))
    tables.free(ids(0))
    tables.open(ids(0))
    assert (blocks(tables, 0), tables.lengths(ids(0)).tolist()) == ([[]], [0])
    append(tables, ids(0), ids(1))
    assert blocks(tables, 0, 1)[1] == [4]


def test_a_dead_row_is_wiped_though_no_survivor_is_as_long() -> None:
    tables = opened(4, 40)
    tables.reorder(ids(0, 1), parents=ids(0), children=ids(0))
    assert tables.pool.held == 1
    tables.reorder(ids(0), parents=ids(0, 0), children=ids(0, 1))
    append(tables, ids(0), ids(40))
    assert blocks(tables, 0, 1)[1] == [0] + [-1] * 10
    tables.free(ids(0, 1))
    assert tables.pool.held == 0


def test_free_gives_back_what_nobody_else_names() -> None:
    tables = opened(8, 4)
    tables.reorder(ids(0), parents=ids(0, 0), children=ids(0, 2))
    tables.free(ids(0, 1))
    assert tables.pool.counts.tolist() == [1, 1, 0]
    tables.free(ids(2))
    assert tables.pool.held == 0


def test_free_of_empty_sequences_and_of_nobody() -> None:
    tables = opened(0, 4)
    tables.free(ids(0))
    tables.free(ids())
    assert tables.pool.held == 1


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "table"),
    [
        (4, [0, 1]),
        (5, [0, 1, 2]),  # positions 0 to 4 are seen by the newest token
        (6, [0, 1, 2]),  # 1 to 5: block 0 still holds position 1
        (7, [-1, 0, 1, 2]),  # 2 to 6
        (8, [-1, 0, 1, 2]),
        (100, [-1] * 47 + [0, 1, 2]),
        (101, [-1] * 48 + [0, 1, 2]),
    ],
)
def test_a_prompt_takes_only_the_blocks_its_window_touches(prompt: int, table: list[int]) -> None:
    tables = BlockTables(2, 5, None, "window-5")
    tables.open(ids(0))
    held = len([b for b in table if b >= 0])
    assert tables.need(ids(0), ids(prompt)) == held
    writes = append(tables, ids(0), ids(prompt))
    assert (writes.tables.blocks.tolist(), tables.pool.held) == ([table], held)
    assert tables.unshared(ids(0)).tolist() == [held]
    dropped = 2 * table.count(-1)
    assert writes.slots.tolist() == [-1] * dropped + list(range(prompt - dropped))
    assert writes.tables.window == 5


def test_blocks_leave_the_window_one_by_one() -> None:
    """Block 2, window 4: the query at position p sees p - 3 to p."""
    tables = opened(4, block_size=2, window=4)
    seen = []
    for _ in range(5):
        tables.trim(ids(0))
        append(tables, ids(0), ids(1))
        seen.append(blocks(tables, 0)[0])
    assert seen == [
        [0, 1, 2],  # the query at 4 sees 1 to 4
        [-1, 1, 2],  # 2 to 5; block 0 left before the append, and was not needed for it
        [-1, 1, 2, 0],  # 3 to 6
        [-1, -1, 2, 0],
        [-1, -1, 2, 0, 1],
    ]
    assert tables.pool.high == 3


def test_trim_frees_only_what_no_later_query_sees() -> None:
    tables = opened(7, 8, 9, block_size=4, window=5)
    tables.trim(ids(0, 1, 2))
    # The next query of a sequence of length n sees n - 4 to n.
    assert [[b >= 0 for b in row] for row in blocks(tables, 0, 1, 2)] == [
        [True, True, False],
        [False, True, False],
        [False, True, True],
    ]


def test_a_window_of_one_token_keeps_nothing_between_steps() -> None:
    tables = opened(3, block_size=1, window=1)
    assert tables.pool.held == 1
    tables.trim(ids(0))
    assert tables.pool.held == 0
    assert append(tables, ids(0), ids(1)).slots.tolist() == [0]


def test_trim_of_one_sharer_leaves_the_block_to_the_other() -> None:
    tables = opened(8, block_size=4, window=4)
    tables.reorder(ids(0), parents=ids(0, 0), children=ids(0, 1))
    append(tables, ids(1), ids(5))
    assert tables.pool.counts.tolist() == [2, 1, 1]
    tables.trim(ids(1))
    assert tables.pool.counts.tolist() == [1, 1, 1]
    tables.trim(ids(1))
    assert tables.pool.counts.tolist() == [1, 1, 1]
    append(tables, ids(0), ids(4))
    tables.trim(ids(0))
    assert tables.pool.counts.tolist()[0] == 0


def test_trim_without_a_window_does_nothing() -> None:
    tables = opened(100)
    tables.trim(ids(0))
    assert tables.pool.held == 25


def test_many_tokens_at_once_skip_the_blocks_they_leave_behind() -> None:
    tables = opened(3, block_size=2, window=4)
    writes = append(tables, ids(0), ids(9))
    # Length 12, the newest token sees 8 to 11. Positions 2 and 3 lie in the old tail, 4 to 7 are kept nowhere.
    assert writes.tables.blocks.tolist() == [[0, 1, -1, -1, 2, 3]]
    assert writes.slots.tolist() == [3, -1, -1, -1, -1, 4, 5, 6, 7]


# -- counting ---------------------------------------------------------------------------------------------------------


def test_slots_written_counts_a_shared_tail_once() -> None:
    tables = opened(6, 8, 1)
    assert tables.slots_written(ids(0, 1, 2)) == 15
    tables.reorder(ids(0, 1, 2), parents=ids(0, 0, 0, 1), children=ids(0, 3, 2, 1))
    assert tables.slots_written(ids(0, 1, 2, 3)) == 14
    append(tables, ids(0, 3), ids(1, 2))
    assert tables.slots_written(ids(0, 1, 2, 3)) == 8 + 4 + (2 + 3 + 4)


def test_slots_written_of_an_empty_cache() -> None:
    assert opened(0).slots_written(ids(0)) == 0
    assert opened().slots_written(ids()) == 0


def test_unshared_is_what_a_sequence_would_hold_alone() -> None:
    assert opened(0, 1, 4, 5, 40).unshared(ids(0, 1, 2, 3, 4)).tolist() == [0, 1, 1, 2, 10]
    assert opened(0, 1, 4, 5, 40, window=4).unshared(ids(0, 1, 2, 3, 4)).tolist() == [0, 1, 1, 2, 1]
