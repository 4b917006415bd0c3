"""What the CPU implementation reads: runs of many rows, chunks of single rows where they lie, and the rest gathered."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from branchkv.kernels.cpu_chunks import CPUChunks, find_chunks
from branchkv.kernels.tree import Ints, Nodes, Sequences, Table

__all__ = ["CPULayout", "CPURun", "cpu_layout", "low_score"]

Bools = npt.NDArray[np.bool_]

# A node is read on its own when that spares gathering this many (row, token) pairs: a run costs about 60 microseconds
# of operator calls, a gathered pair 0.3 (3 heads of 64, fp32; benchmarks/cpu_generate.py).
MIN_RUN = 256


def low_score(dtype: torch.dtype) -> float:
    """A score whose weight is 0 beside any real one. It is not -inf, which in all columns of a row would make NaN."""
    return torch.finfo(dtype).min / 2


@dataclass(frozen=True)
class CPURun:
    """Tokens that several query rows read together.

    Attributes:
        rows: query rows, as places in the sorted order.
        slots: a slice of the pool where the blocks are one physical run; else [tokens] int64 slots.
        start: position of the first token.
        tokens: number of tokens.
        column: first column of the scores that the run fills.
        whole: whether all its rows see all its tokens.
    """

    rows: slice
    slots: slice | torch.Tensor
    start: int
    tokens: int
    column: int
    whole: bool


@dataclass(frozen=True)
class CPULayout:
    """Columns of the score matrix: first those of the runs, then each row's own tokens, in chunks and gathered.

    Attributes:
        runs: nodes of the tree that are read once.
        shared: columns of the runs; a row may be in runs that fill only some of them.
        chunks: what rows read alone and where it lies; None if that does not pay.
        tail: [rows, width] int64 slots of the other tokens, rows sorted; the pool's null slot where there is no token.
        order: [rows] int64 sorted place -> query row; None where both are the same.
        lengths: [rows] tokens up to each row's own, rows sorted.
        ends: [rows] tokens of each row's sequence, rows sorted.
        window: how many of the newest tokens a row sees; None for all.
        tail_positions: [rows, width] positions of ``tail``; -1 where there is no token.
        device: where tensors go.
    """

    runs: tuple[CPURun, ...]
    shared: int
    chunks: CPUChunks | None
    tail: torch.Tensor
    order: torch.Tensor | None
    lengths: Ints
    ends: Ints
    window: int | None
    tail_positions: Ints
    device: torch.device | None
    _masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def own(self) -> int:
        """Columns of what a row reads alone."""
        return self.tail.shape[1] + (0 if self.chunks is None else self.chunks.columns)

    @cached_property
    def _positions(self) -> Ints:
        rows = len(self.lengths)
        own = [self.tail_positions] if self.chunks is None else [self.chunks.positions, self.tail_positions]
        every = np.concatenate([np.full((rows, self.shared), -1, dtype=np.int64), *own], axis=1)
        for run in self.runs:
            every[run.rows, run.column : run.column + run.tokens] = np.arange(run.start, run.start + run.tokens)
        return every

    @cached_property
    def _seen(self) -> Bools:
        return self._sees(self._positions)

    def _sees(self, positions: Ints) -> Bools:
        """[rows, columns] whether each row sees its tokens at ``positions``; -1 for none."""
        seen: Bools = (positions >= 0) & (positions < self.lengths[:, None])
        return seen if self.window is None else seen & (positions >= (self.lengths - self.window)[:, None])

    @cached_property
    def unread(self) -> torch.Tensor | None:
        """[rows, columns] bool, True where a row reads nothing; None where every row reads everything."""
        return None if self._seen.all() else torch.from_numpy(~self._seen).to(self.device)

    @cached_property
    def place(self) -> torch.Tensor | None:
        """[rows] int64 query row -> sorted place; None where both are the same."""
        return None if self.order is None else self.order.argsort()

    @cached_property
    def whole(self) -> bool:
        """Whether the rows of every run see all of it."""
        return all(run.whole for run in self.runs)

    @cached_property
    def tail_slots(self) -> torch.Tensor:
        """[rows * width] int64 the slots of ``tail`` in one row."""
        return self.tail.flatten()

    def tail_mask(self, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """[kv_heads * rows, 1, width] or [1, 1, 1], added to scores: ``low_score`` where nothing is read, else 0."""
        key = kv_heads, dtype
        if key not in self._masks:
            unread = ~self._sees(self.tail_positions)[:, None]
            mask = np.tile(unread, (kv_heads, 1, 1)) if unread.any() else np.zeros((1, 1, 1), dtype=bool)
            self._masks[key] = torch.from_numpy(mask).to(self.device).to(dtype).mul_(low_score(dtype))
        return self._masks[key]

    @cached_property
    def from_end(self) -> torch.Tensor:
        """[rows, columns] int64 distance of each column's token from the end of its sequence, at least 1."""
        return torch.from_numpy(np.where(self._seen, self.ends[:, None] - self._positions, 1)).to(self.device)

    @cached_property
    def distance(self) -> torch.Tensor:
        """[rows, columns] int64 position of each column's token minus that of the row: 0 or less."""
        distance = np.where(self._seen, self._positions - self.lengths[:, None] + 1, 0)
        return torch.from_numpy(distance).to(self.device)


def cpu_layout(
    sequences: Sequences, order: Ints, nodes: Nodes, *, null_slot: int, device: torch.device | None
) -> CPULayout:
    """The layout of one step.

    Args:
        sequences: what is read.
        order: [sequences] sorted place -> sequence.
        nodes: the tree of the sorted tables.
        null_slot: slot that reads as zero.
        device: where tensors go.
    """
    tables, queries, ends = sequences.tables[order], sequences.queries[order], sequences.ends[order]
    firsts = sequences.firsts[order]
    bounds = np.concatenate([[0], np.cumsum(queries)])
    size = sequences.block_size
    runs, covered, shared = _runs(tables, (firsts, ends, queries), nodes, sequences.window, size, device)
    chunks = None
    if (queries == 1).all():
        alone = _alone(nodes, tables.shape) & ~covered
        found = find_chunks(
            tables, np.where(alone, _from_first_slot(tables.shape, firsts, ends, size), 0), size, device
        )
        if found is not None:
            chunks, taken = found
            covered |= taken
    tail, positions = _tails(tables, covered, (firsts, ends), size, null_slot)
    row = np.repeat(np.arange(len(order)), queries)
    number = np.arange(len(row)) - bounds[row]
    if len(row) > len(order):
        tail, positions = tail[row], positions[row]
    query_order = (np.cumsum(sequences.queries) - sequences.queries)[order][row] + number
    same = bool((query_order == np.arange(len(row))).all())
    return CPULayout(
        runs=runs,
        shared=shared,
        chunks=chunks,
        tail=torch.from_numpy(tail).to(device),
        order=None if same else torch.from_numpy(query_order).to(device),
        lengths=ends[row] - queries[row] + number + 1,
        ends=ends[row],
        window=sequences.window,
        tail_positions=positions,
        device=device,
    )


def _runs(
    tables: Table,
    seen: tuple[Ints, Ints, Ints],
    nodes: Nodes,
    window: int | None,
    size: int,
    device: torch.device | None,
) -> tuple[tuple[CPURun, ...], Bools, int]:
    """Nodes that are worth a product of their own, which blocks those are, and how many columns they fill.

    ``seen``: first position, end and number of queries of each sequence.
    """
    firsts, ends, queries = seen
    bounds = np.concatenate([[0], np.cumsum(queries)])
    newest = firsts if window is None else np.maximum(ends - window, 0)
    filled, covered, runs = np.zeros(len(tables), dtype=np.int64), np.zeros(tables.shape, dtype=bool), []
    rows = bounds[nodes.row_stop] - bounds[nodes.row_start]
    worth = np.flatnonzero((rows - 1) * (nodes.block_stop - nodes.block_start) * size >= MIN_RUN)
    for node in worth[np.argsort(nodes.block_start[worth], kind="stable")].tolist():
        inside = slice(int(nodes.row_start[node]), int(nodes.row_stop[node]))
        first, last = int(nodes.block_start[node]), int(nodes.block_stop[node])
        if firsts[inside].max() > ends[inside].min():
            continue  # between the windows of two sequences may lie a token that no row sees
        start, stop = max(first * size, int(firsts[inside].min())), min(last * size, int(ends[inside].max()))
        slots = _slots(tables[inside.start, first:last], start - first * size, stop - start, size, device)
        column = int(filled[inside].max())
        filled[inside] = column + stop - start
        covered[inside, first:last] = True
        whole = stop <= (ends - queries + 1)[inside].min() and start >= newest[inside].max()
        query_rows = slice(int(bounds[inside.start]), int(bounds[inside.stop]))
        runs.append(CPURun(query_rows, slots, start, stop - start, column, bool(whole)))
    return tuple(runs), covered, int(filled.max(initial=0))


def _alone(nodes: Nodes, shape: tuple[int, ...]) -> Bools:
    """[rows, columns] blocks that are in the table of one row only."""
    one = nodes.row_stop - nodes.row_start == 1
    row = nodes.row_start[one]
    edges = np.zeros((shape[0], shape[1] + 1), dtype=np.int8)
    np.add.at(edges, (row, nodes.block_start[one]), 1)
    np.add.at(edges, (row, nodes.block_stop[one]), -1)
    alone: Bools = np.cumsum(edges, axis=1)[:, :-1] > 0
    return alone


def _from_first_slot(shape: tuple[int, ...], firsts: Ints, ends: Ints, size: int) -> Ints:
    """[rows, columns] tokens that a row sees of each block, 0 where it does not see the first one."""
    start = np.arange(shape[1]) * size
    seen: Ints = np.where(start >= firsts[:, None], np.clip(ends[:, None] - start, 0, size), 0)
    return seen


def _slots(
    blocks: npt.NDArray[np.int32], skip: int, tokens: int, size: int, device: torch.device | None
) -> slice | torch.Tensor:
    """Slots of ``tokens`` tokens in ``blocks``, the first ``skip`` left out."""
    if bool((blocks[1:] - blocks[:-1] == 1).all()):
        start = int(blocks[0]) * size + skip
        return slice(start, start + tokens)
    every = (blocks.astype(np.int64)[:, None] * size + np.arange(size)).ravel()
    return torch.from_numpy(every[skip : skip + tokens]).to(device)


def _tails(
    tables: npt.NDArray[np.int32], covered: Bools, seen: tuple[Ints, Ints], size: int, null_slot: int
) -> tuple[Ints, Ints]:
    """Slots and positions [sequences, width] of the tokens in blocks that no run covers, left-aligned."""
    firsts, ends = seen
    own = (tables >= 0) & ~covered
    blocks = own.sum(axis=1)
    most = int(blocks.max(initial=0))
    row, column = np.nonzero(own)
    place = np.arange(len(row)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    columns = np.full((len(tables), most), -1, dtype=np.int64)
    columns[row, place] = column
    offset = np.arange(size)
    positions = np.where(columns[:, :, None] >= 0, columns[:, :, None] * size + offset, -1)
    ids = tables[np.arange(len(tables))[:, None], columns].astype(np.int64)
    slots = ids[:, :, None] * size + offset
    read = (positions >= firsts[:, None, None]) & (positions < ends[:, None, None])
    positions, slots = np.where(read, positions, -1), np.where(read, slots, null_slot)
    positions, slots = (values.reshape(len(tables), most * size) for values in (positions, slots))
    width = int(np.flatnonzero((positions >= 0).any(axis=0)).max(initial=-1)) + 1
    return np.ascontiguousarray(slots[:, :width]), np.ascontiguousarray(positions[:, :width])
