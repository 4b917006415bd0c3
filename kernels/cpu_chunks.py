"""Tokens that one row reads alone, read where they lie: equally long chunks of the pool, in physical order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from branchkv.kernels.tree import Ints, Table

__all__ = ["CPUChunks", "Segment", "find_chunks"]

Bools = npt.NDArray[np.bool_]

# Below this many tokens in all, gathering them is faster (0.3 microseconds a token at 3 heads of 64, against some 200
# for the operator calls of the chunks and 0.1 a token); and products with fewer tokens than these are no faster.
MIN_TOKENS = 1024
MIN_BLOCK = 8
# Physical blocks of others in between are read as well where there are few; more of them end a segment.
_GAP = 16
_MOST_SEGMENTS = 8


@dataclass(frozen=True)
class Segment:
    """Chunks at even distances: chunk i begins at slot ``start + i * step``; their numbers begin at ``first``."""

    start: int
    step: int
    count: int
    first: int

    def view(self, pool: torch.Tensor, tokens: int) -> torch.Tensor:
        """[count, tokens, dim] of one head's pool [slots, dim]."""
        slot, last = pool.stride()
        shape = (self.count, tokens, pool.shape[1])
        return pool.as_strided(shape, (self.step * slot, slot, last), pool.storage_offset() + self.start * slot)


@dataclass(frozen=True)
class CPUChunks:
    """Which chunks there are, and which row reads which.

    Attributes:
        segments: the chunks; some may be read by no row.
        tokens: tokens of a chunk.
        number: how many chunks there are.
        owner: [number] int64 the row that reads a chunk, rows sorted; 0 for none.
        select: [rows * most] int64 the chunks of each row, by position; 0 where it has fewer.
        place: [number] int64 the entry of ``select`` that a chunk is; 0 for none.
        listed, offsets: the chunks of all rows one after another, int64, and where each row's begin, [rows].
        padding: [rows, 1, most * tokens] bool, True where a row has fewer chunks; None if all have the same number.
        positions: [rows, most * tokens] position of each token; -1 where there is none.
    """

    segments: tuple[Segment, ...]
    tokens: int
    number: int
    owner: torch.Tensor
    select: torch.Tensor
    place: torch.Tensor
    listed: torch.Tensor
    offsets: torch.Tensor
    padding: torch.Tensor | None
    positions: Ints

    @property
    def columns(self) -> int:
        """Columns of scores that a row has."""
        return int(self.positions.shape[1])

    @property
    def whole_rows(self) -> bool:
        """Whether every row is one chunk, and every chunk a row."""
        return self.number == len(self.positions) and self.columns == self.tokens and self.padding is None

    @cached_property
    def in_order(self) -> bool:
        """Whether, besides, chunk i is row i."""
        return self.whole_rows and bool((self.owner == torch.arange(self.number, device=self.owner.device)).all())


def find_chunks(tables: Table, tokens: Ints, size: int, device: torch.device | None) -> tuple[CPUChunks, Bools] | None:
    """Chunks, and the blocks [rows, columns] that are in them; None if reading them in place does not pay.

    Args:
        tables: [rows, columns] block ids, rows sorted.
        tokens: [rows, columns] tokens from a block's first slot on that its row reads alone; 0 for other blocks.
        size: slots per block.
        device: where tensors go.
    """
    tokens = tokens * _once(tables)
    if tokens.sum() < MIN_TOKENS or size < MIN_BLOCK:
        return None
    even = _even_runs(tables, tokens, size)
    taken = tokens > 0 if even is not None else tokens == size
    row, column = np.nonzero(taken)
    block = tables[row, column].astype(np.int64)
    if even is not None:
        segments: tuple[Segment, ...] = (even,)
        first = np.flatnonzero(np.diff(row, prepend=-1))
        each, row, column = int(tokens[0].sum()), row[first], column[first]
        number = np.argsort(np.argsort(block[first]))
    else:
        order = np.sort(block)
        cuts = np.flatnonzero(np.diff(order) > _GAP)
        if len(order) == 0 or len(cuts) >= _MOST_SEGMENTS:
            return None
        segments, each = _segments(order, cuts, size), size
        number = block - order[0]
        for segment in segments:  # leave the gaps out
            inside = block * size >= segment.start
            number = np.where(inside, block - segment.start // size + segment.first, number)
    return _chunks(segments, each, (row, column, number), len(tables), size, device), taken


def _once(tables: Table) -> Bools:
    """[rows, columns] whether no other cell has the same block: windows can sort rows apart that share one."""
    times = np.bincount(tables[tables >= 0], minlength=1)
    once: Bools = (times[np.maximum(tables, 0)] == 1) & (tables >= 0)
    return once


def _even_runs(tables: Table, tokens: Ints, size: int) -> Segment | None:
    """One chunk per row, if all rows have one physical run of equally many tokens, at even distances."""
    row, column = np.nonzero(tokens)
    rows, each = len(tables), tokens.sum(axis=1)
    if len(row) == 0 or (each != each[0]).any() or len(row) % rows:
        return None
    columns, ids = column.reshape(rows, -1), tables[row, column].astype(np.int64).reshape(rows, -1)
    if (np.diff(ids) != 1).any() or (np.diff(columns) != 1).any():
        return None
    if (tokens[row, column].reshape(rows, -1)[:, :-1] != size).any():
        return None
    starts = np.sort(ids[:, 0])
    steps = np.diff(starts)
    if rows > 1 and (steps != steps[0]).any():
        return None
    return Segment(int(starts[0]) * size, int(steps[0]) * size if rows > 1 else 0, rows, 0)


def _segments(order: Ints, cuts: Ints, size: int) -> tuple[Segment, ...]:
    starts, ends = order[np.append(0, cuts + 1)], order[np.append(cuts, -1)] + 1
    first = np.cumsum(ends - starts) - (ends - starts)
    parts = zip(starts.tolist(), (ends - starts).tolist(), first.tolist(), strict=True)
    return tuple(Segment(start * size, size, count, before) for start, count, before in parts)


def _chunks(
    segments: tuple[Segment, ...],
    tokens: int,
    chunk: tuple[Ints, Ints, Ints],
    rows: int,
    size: int,
    device: torch.device | None,
) -> CPUChunks:
    """From the row, the first column and the number of each chunk, in the order of rows and columns."""
    row, column, number = chunk
    total = segments[-1].first + segments[-1].count
    counts = np.bincount(row, minlength=rows)
    before = np.cumsum(counts) - counts
    most = int(counts.max())
    entry = row * most + np.arange(len(row)) - before[row]
    owner, place = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    owner[number], place[number] = row, entry
    select, begins = np.zeros(rows * most, dtype=np.int64), np.full(rows * most, -1, dtype=np.int64)
    select[entry], begins[entry] = number, column * size
    positions = np.where(begins[:, None] >= 0, begins[:, None] + np.arange(tokens), -1).reshape(rows, most * tokens)

    def upload(values: Ints | Bools) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return CPUChunks(
        segments=segments,
        tokens=tokens,
        number=total,
        owner=upload(owner),
        select=upload(select),
        place=upload(place),
        listed=upload(number.astype(np.int64)),
        offsets=upload(before.astype(np.int64)),
        padding=upload(positions[:, None] < 0) if (counts < most).any() else None,
        positions=positions,
    )
