"""Plans against the tables they were made from: every token a row sees, once, at the right slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from branchkv.kernels import plan as plan_module
from branchkv.kernels.plan import MIN_RUN, AttentionPlan, SharedRun, make_plan, row_slots
from branchkv.tests.kernels.random_tables import Tables, random_tables


def plan_of(tables: Tables) -> AttentionPlan:
    return make_plan(
        tables.blocks,
        tables.lengths,
        block_size=tables.block_size,
        null_slot=tables.null_slot,
        window=tables.window,
    )


def run_slots(run: SharedRun) -> list[int]:
    if isinstance(run.slots, slice):
        return list(range(run.slots.start, run.slots.stop))
    slots: list[int] = run.slots.tolist()
    return slots


def assert_covers(plan: AttentionPlan, tables: Tables) -> None:
    """Every (row, position) is read exactly once, from the slot that the table names."""
    assert plan.rows == len(tables.lengths)
    assert plan.most == max((len(tables.slots(row)) for row in range(plan.rows)), default=0)
    for row in range(plan.rows):
        length = int(tables.lengths[row])
        read = []
        for run in plan.runs:
            if run.rows.start <= row < run.rows.stop:
                slots = run_slots(run)
                assert len(slots) == run.tokens
                read += list(zip(range(length - run.from_end, length), slots, strict=False))
        start, width = int(plan.own.starts[row]), plan.own.width
        own = list(zip(range(length - width + start, length), plan.own.slots[row, start:].tolist(), strict=True))
        assert own, "the newest token belongs to the row itself"
        read += own
        assert sorted(read) == sorted(tables.slots(row).items())
        assert (plan.own.slots[row, :start] == tables.null_slot).all()
    padding = plan.own.padding()
    assert padding.sum(1).tolist() == plan.own.starts.tolist()
    assert not padding[:, 1:].logical_and(~padding[:, :-1]).any(), "padding is on the left"
    assert plan.own.ragged == bool(padding.any())


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("window", [None, 1, 7, 20])
@pytest.mark.parametrize("min_run", [1, 30, MIN_RUN])
def test_every_token_is_read_once(
    min_run: int, window: int | None, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "MIN_RUN", min_run)
    rng = np.random.default_rng([block_size, window or 0, min_run])
    runs = 0
    for number in range(30):
        tables = random_tables(
            rng, block_size=block_size, window=window, sharing=number % 3 > 0, scattered=number % 2 > 0
        )
        plan = plan_of(tables)
        assert_covers(plan, tables)
        assert all(run.tokens * (run.rows.stop - run.rows.start) >= min_run for run in plan.runs)
        runs += len(plan.runs)
    if window is None and min_run < MIN_RUN:
        assert runs > 10


def test_one_run_of_all_full_blocks_that_rows_share() -> None:
    """8 rows: 5 shared blocks of 16, then a block each; then 3 rows of another prompt that is too short for a run."""
    blocks = np.full((11, 6), -1)
    blocks[:8, :5] = [4, 9, 2, 7, 0]
    blocks[:8, 5] = range(20, 28)
    blocks[8:, :2] = [[30, 31], [30, 32], [30, 33]]
    plan = plan_of(Tables(blocks, np.array([85] * 8 + [20] * 3), 16, None, 999))
    (run,) = plan.runs
    assert (run.rows, run.tokens, run.from_end) == (slice(0, 8), 80, 85)
    assert isinstance(run.slots, torch.Tensor)
    assert run.slots.tolist() == [block * 16 + slot for block in (4, 9, 2, 7, 0) for slot in range(16)]
    assert plan.own.width == 20
    assert plan.own.starts.tolist() == [15] * 8 + [0] * 3
    assert plan.most == 85


def test_one_physical_run_is_a_slice_of_the_pool() -> None:
    blocks = np.array([[3, 4, 5, 6, 9], [3, 4, 5, 6, 7]])
    (run,) = plan_of(Tables(blocks, np.array([300, 300]), 64, None, 999)).runs
    assert run.slots == slice(3 * 64, 7 * 64)


@pytest.mark.parametrize("blocks", [[3, 5, 6, 7, 9], [3, 4, 6, 5, 9], [6, 5, 4, 3, 9], [3, 4, 4, 6, 9]])
def test_blocks_out_of_order_are_not_a_slice(blocks: list[int]) -> None:
    tables = Tables(np.array([blocks, [*blocks[:4], 8]]), np.array([300, 300]), 64, None, 999)
    plan = plan_of(tables)
    assert isinstance(plan.runs[0].slots, torch.Tensor)
    assert_covers(plan, tables)


def test_a_long_row_alone_is_a_run_up_to_its_newest_token() -> None:
    """A slice is read in place where its own slots would be gathered."""
    blocks = np.arange(20)[None]
    plan = plan_of(Tables(blocks, np.array([320]), 16, None, 999))
    (run,) = plan.runs
    assert (run.slots, run.tokens) == (slice(0, 319), 319)
    assert plan.own.slots.tolist() == [[319]]


@pytest.mark.parametrize(("rows", "runs"), [(2, 0), (3, 0), (4, 1)])
def test_a_run_must_spare_enough(rows: int, runs: int) -> None:
    """64 tokens shared by 4 rows spare MIN_RUN = 256 gathered ones; by 3 rows they do not."""
    assert MIN_RUN == 256
    blocks = np.array([[0, row + 1] for row in range(rows)])
    assert len(plan_of(Tables(blocks, np.full(rows, 65), 64, None, 999)).runs) == runs


def test_rows_of_other_lengths_are_no_group() -> None:
    """Equal blocks, but the distance from the end differs; bias and windows count from there."""
    blocks = np.array([[0, 1, 2, 3, 4], [0, 1, 2, 3, 5]])
    tables = Tables(blocks, np.array([300, 301]), 64, None, 999)
    plan = plan_of(tables)
    assert [run.rows for run in plan.runs] == [slice(0, 1), slice(1, 2)]
    assert_covers(plan, tables)


def test_a_window_cuts_a_run_inside_a_block() -> None:
    blocks = np.array([[-1, 5, 6, 7, 20], [-1, 5, 6, 7, 21]])
    tables = Tables(blocks, np.array([260, 260]), 60, 150, 999)
    (run,) = (plan := plan_of(tables)).runs
    assert (run.tokens, run.from_end, plan.most) == (130, 150, 150)
    assert run.slots == slice(5 * 60 + 50, 8 * 60)
    assert_covers(plan, tables)


def test_rows_with_the_same_table_keep_their_newest_token() -> None:
    tables = Tables(np.array([[3, 4, 5, 6]] * 2), np.array([256, 256]), 64, None, 999)
    plan = plan_of(tables)
    assert plan.runs[0].tokens == 255
    assert plan.own.slots.tolist() == [[6 * 64 + 63]] * 2
    assert_covers(plan, tables)


def test_one_token_and_no_rows() -> None:
    one = Tables(np.array([[7]]), np.array([1]), 4, None, 999)
    assert_covers(plan_of(one), one)
    none = Tables(np.empty((0, 0), dtype=np.int64), np.empty(0, dtype=np.int64), 4, None, 999)
    plan = plan_of(none)
    assert (plan.rows, plan.runs, plan.most) == (0, (), 0)


def test_row_slots_from_any_position() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        tables = random_tables(rng, block_size=3)
        first = rng.integers(0, tables.lengths)
        got = row_slots(tables.blocks, tables.lengths, first, block_size=3, null_slot=tables.null_slot)
        assert got.width == (tables.lengths - first).max()
        for row in range(len(first)):
            want = [slot for position, slot in tables.slots(row).items() if position >= first[row]]
            start = int(got.starts[row])
            assert got.slots[row].tolist() == [tables.null_slot] * start + want


def test_the_tables_stay_as_they_are() -> None:
    tables = random_tables(np.random.default_rng(0), block_size=2, window=9)
    before = tables.blocks.copy(), tables.lengths.copy()
    plan_of(tables)
    assert (tables.blocks == before[0]).all()
    assert (tables.lengths == before[1]).all()
