"""Batches of runs: every run in one of them, read where it lies, and cut so that threads have equally much to do."""

from __future__ import annotations

import pytest
import torch

from branchkv.kernels.cpu_batches import CPUBatch, make_batches, pieces_of
from branchkv.kernels.cpu_layout import CPURun

POOL = torch.arange(3 * 4000 * 2, dtype=torch.float32).view(4000, 3, 2).transpose(0, 1)


def run(rows: int, count: int, slots: slice | torch.Tensor) -> CPURun:
    tokens = len(slots) if isinstance(slots, torch.Tensor) else slots.stop - slots.start
    return CPURun(slice(rows, rows + count), slots, start=0, tokens=tokens, column=0, whole=True)


def place(batch: CPUBatch) -> list[int]:
    return list(range(batch.rows.start, batch.rows.stop)) if isinstance(batch.rows, slice) else batch.rows.tolist()


@pytest.mark.parametrize(
    ("runs", "sizes"),
    [
        ([run(0, 2, slice(0, 32))], [1]),
        ([run(0, 2, slice(0, 32)), run(2, 2, slice(64, 96)), run(4, 2, slice(128, 160))], [3]),
        ([run(0, 2, slice(64, 96)), run(2, 2, slice(0, 32))], [2]),
        ([run(0, 2, slice(0, 32)), run(2, 2, slice(64, 96)), run(4, 2, slice(100, 132))], [2, 1]),
        ([run(0, 2, slice(0, 32)), run(2, 3, slice(64, 96)), run(5, 2, slice(100, 116))], [1, 1, 1]),
        ([run(0, 2, slice(0, 32)), run(4, 2, slice(64, 96))], [2]),
        ([run(0, 2, torch.tensor([5, 9, 1])), run(2, 2, slice(64, 96))], [1, 1]),
    ],
    ids=["one", "even", "in another order", "uneven", "other shapes", "rows in between", "scattered"],
)
def test_every_run_is_in_one_batch(runs: list[CPURun], sizes: list[int]) -> None:
    batches = make_batches(runs, None)
    assert sorted((batch.runs for batch in batches), reverse=True) == sizes
    by_rows = {tuple(range(part.rows.start, part.rows.stop)): part for part in runs}
    for batch in batches:
        view, rows = batch.view(POOL, 1), place(batch)
        assert view.shape == (batch.runs, 3, batch.tokens, 2)
        for number in range(batch.runs):
            part = by_rows.pop(tuple(rows[number * batch.count : (number + 1) * batch.count]))
            assert torch.equal(view[number], POOL[:, part.slots])
    assert not by_rows


def test_what_lies_in_one_piece_is_not_copied() -> None:
    (batch,) = make_batches([run(0, 2, slice(0, 32)), run(2, 2, slice(64, 96))], None)
    assert batch.view(POOL, 1).untyped_storage().data_ptr() == POOL.untyped_storage().data_ptr()


def test_pieces_are_the_tokens_one_after_another() -> None:
    (batch,) = make_batches([run(0, 2, slice(8, 40))], None)
    assert torch.equal(batch.view(POOL, 4).transpose(0, 1).flatten(1, 2), POOL[:, 8:40])


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "packed", "threads", "pieces"),
    [
        (4096, 3, 24, 2, 2),  # 3 tasks: 2 threads need as long as for 4
        (4096, 4, 24, 2, 1),
        (1024, 3, 24, 2, 1),  # too short
        (4098, 3, 24, 4, 1),  # two pieces would be 6 tasks, no better for 4 threads; and 4,098 is odd in halves
        (4096, 3, 48, 2, 1),  # 48 packed rows are two tasks each
        (65536, 1, 8, 16, 16),
    ],
)
def test_pieces(tokens: int, kv_heads: int, packed: int, threads: int, pieces: int) -> None:
    assert pieces_of(tokens, kv_heads, packed, threads) == pieces
