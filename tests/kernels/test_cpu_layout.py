"""The CPU layout against the tables: every token a row sees in one column, at the right slot."""

from __future__ import annotations

import numpy as np
import pytest

from branchkv.kernels import cpu_chunks, cpu_layout
from branchkv.kernels.cpu_chunks import CPUChunks, find_chunks
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


def chunk_slots(chunks: CPUChunks, number: int) -> list[int]:
    (start,) = (
        part.start + (number - part.first) * part.step
        for part in chunks.segments
        if part.first <= number < part.first + part.count
    )
    return list(range(start, start + chunks.tokens))


def read(layout: CPULayout, place: int) -> list[tuple[int, int]]:
    """(position, slot) of every column that a row reads."""
    slots = np.full(layout.shared + layout.own, -2)
    for run in layout.runs:
        if run.rows.start <= place < run.rows.stop:
            columns = slice(run.column, run.column + run.tokens)
            assert (slots[columns] == -2).all(), "two runs in one column"
            slots[columns] = run_slots(run)
    chunks = layout.chunks
    if chunks is not None:
        most = chunks.columns // chunks.tokens
        for number in range(most):
            columns = slice(layout.shared + number * chunks.tokens, layout.shared + (number + 1) * chunks.tokens)
            slots[columns] = chunk_slots(chunks, int(chunks.select[place * most + number]))
    slots[layout.shared + layout.own - layout.tail.shape[1] :] = layout.tail[place].tolist()
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
@pytest.mark.parametrize("chunked", [1, 10**9], ids=["chunks", "gathered"])
def test_every_token_is_read_once(
    chunked: int, min_run: int, queries: int, window: int | None, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_layout, "MIN_RUN", min_run)
    monkeypatch.setattr(cpu_chunks, "MIN_TOKENS", chunked)
    monkeypatch.setattr(cpu_chunks, "MIN_BLOCK", 1)
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


def chunks_of(tables: list[list[int]], tokens: list[list[int]] | None = None, size: int = 256) -> CPUChunks | None:
    every = np.array(tables, dtype=np.int32)
    found = find_chunks(every, np.full(every.shape, size) if tokens is None else np.array(tokens), size, None)
    return None if found is None else found[0]


def test_evenly_spaced_runs_are_one_chunk_each() -> None:
    chunks = chunks_of([[4, 5, 6, 7], [14, 15, 16, 17], [24, 25, 26, 27]])
    assert chunks is not None
    assert (chunks.tokens, chunks.number, len(chunks.segments)) == (4 * 256, 3, 1)
    assert chunks.in_order
    turned = chunks_of([[14, 15, 16, 17], [4, 5, 6, 7], [24, 25, 26, 27]])
    assert turned is not None
    assert (turned.tokens, turned.whole_rows, turned.in_order) == (4 * 256, True, False)


def test_a_part_filled_last_block_belongs_to_the_run_if_all_rows_fill_it_alike() -> None:
    tables = [[4, 5, 6, 7], [14, 15, 16, 17]]
    chunks = chunks_of(tables, [[256, 256, 256, 7], [256, 256, 256, 7]])
    assert chunks is not None
    assert (chunks.tokens, chunks.whole_rows) == (3 * 256 + 7, True)
    other = chunks_of(tables, [[256, 256, 256, 7], [256, 256, 256, 8]])
    assert other is not None
    assert (other.tokens, other.columns) == (256, 3 * 256)


@pytest.mark.parametrize(
    "tables", [[[4, 5, 6, 7], [14, 15, 16, 17], [25, 26, 27, 28]], [[4, 5, 7, 6], [14, 15, 16, 17], [24, 25, 26, 27]]]
)
def test_other_blocks_are_chunks_one_by_one(tables: list[list[int]]) -> None:
    chunks = chunks_of(tables)
    assert chunks is not None
    assert (chunks.tokens, chunks.columns, chunks.padding) == (256, 4 * 256, None)


def test_a_gap_of_many_blocks_is_left_out() -> None:
    chunks = chunks_of([[0, 1, 500, 3], [501, 502, 5, 6]])
    assert chunks is not None
    assert [(part.start // 256, part.count, part.first) for part in chunks.segments] == [(0, 7, 0), (500, 3, 7)]
    assert chunks_of([[0, 100, 200, 300, 400, 500, 600, 700, 800]]) is None, "too scattered to be read in place"


def test_few_tokens_and_small_blocks_are_gathered() -> None:
    assert chunks_of([[0, 1], [2, 3]], [[256, 256], [0, 256]]) is None
    assert chunks_of([list(range(600))], size=4) is None
