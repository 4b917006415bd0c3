"""The CPU layout against the tables: every token a row sees in one column, at the right slot."""

from __future__ import annotations

import numpy as np
import pytest

from branchkv.kernels import cpu_layout
from branchkv.kernels.cpu_layout import CPULayout, CPURun
from branchkv.kernels.plan import AttentionPlan, make_plan
from branchkv.kernels.tree import Ints
from branchkv.tests.kernels.forked_tables import forked_tables

NULL = 9999


def run_slots(run: CPURun) -> list[int]:
    if isinstance(run.slots, slice):
        return list(range(run.slots.start, run.slots.stop))
    slots: list[int] = run.slots.tolist()
    return slots


def read(layout: CPULayout, place: int) -> list[tuple[int, int]]:
    """(position, slot) of every column that a row reads."""
    slots = np.full(layout.shared + layout.tail.shape[1], -2)
    for run in layout.runs:
        if run.rows.start <= place < run.rows.stop:
            columns = slice(run.column, run.column + run.tokens)
            assert (slots[columns] == -2).all(), "two runs in one column"
            slots[columns] = run_slots(run)
    slots[layout.shared :] = layout.tail[place].tolist()
    unread = np.zeros(len(slots), dtype=bool) if layout.unread is None else layout.unread[place].numpy()
    position = layout.distance[place].numpy() + layout.lengths[place] - 1
    assert (layout.from_end[place].numpy() + position == layout.ends[place])[~unread].all()
    return [(int(p), int(s)) for p, s, skip in zip(position, slots, unread, strict=True) if not skip]


def assert_covers(plan: AttentionPlan, tables: Ints) -> None:
    layout = plan.cpu_layout
    order = range(plan.rows) if layout.order is None else layout.order.tolist()
    size = plan.block_size
    for place, row in enumerate(order):
        length, table = int(plan.lengths[row]), tables[int(plan.sequence[row])]
        first = 0 if plan.window is None else max(0, length - plan.window)
        want = [(at, int(table[at // size]) * size + at % size) for at in range(first, length)]
        assert sorted(read(layout, place)) == want
    for place in range(plan.rows):
        slots, positions = layout.tail[place].numpy(), layout.tail_positions[place]
        assert (slots[positions < 0] == NULL).all(), "what is no token reads as zero"


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("window", [None, 1, 7, 20])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("min_run", [1, 30, 256])
def test_every_token_is_read_once(
    min_run: int, queries: int, window: int | None, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_layout, "MIN_RUN", min_run)
    rng = np.random.default_rng([min_run, queries, window or 0, block_size])
    for rows in (1, 2, 5, 12):
        made = forked_tables(rng, rows=rows, columns=9, block_size=block_size, queries=queries)
        assert_covers(make_plan(**made, null_slot=NULL, window=window), made["tables"])


def test_a_run_in_one_piece_is_a_slice_and_levels_stand_side_by_side() -> None:
    prompt, branch = list(range(10, 30)), [40, 42, 41]
    own = [[50], [51], [52], [53]]
    rows = [
        prompt + branch + own[0],
        prompt + branch + own[1],
        prompt + [60, 61, 62] + own[2],
        prompt + [70, 71, 72] + own[3],
    ]
    plan = make_plan(np.array(rows), np.full(4, 24 * 100 - 1), block_size=100, null_slot=9999)
    first, second = plan.cpu_layout.runs
    assert (first.rows, first.slots, first.start, first.column) == (slice(0, 4), slice(1000, 3000), 0, 0)
    assert (second.rows, second.start, second.tokens, second.column) == (slice(0, 2), 2000, 300, 2000)
    assert run_slots(second) == [*range(4000, 4100), *range(4200, 4300), *range(4100, 4200)]
    assert plan.cpu_layout.shared == 2300
    assert plan.cpu_layout.tail.shape == (4, 399), "rows that fork off alone gather what only they read"
