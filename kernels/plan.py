"""What one step reads: which runs of blocks several rows share, and what each row reads for itself.

The plan is made once a step from block tables and lengths alone, and serves every layer of that kind. Sharing has one
level: for adjacent rows of equal length, the prefix that all of them have in common, prompt and generated tokens alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["AttentionPlan", "RowSlots", "SharedRun", "make_plan", "row_slots"]

Ints = npt.NDArray[np.int64]

# A run is read on its own when that spares gathering this many (row, token) pairs: a run costs about 60 microseconds of
# operator calls, a gathered pair 0.3 (3 heads of 64, fp32; benchmarks/cpu_generate.py).
MIN_RUN = 256


@dataclass(frozen=True)
class RowSlots:
    """Slots that each row reads for itself, right-aligned: the newest token is in the last column.

    Attributes:
        slots: [rows, width] int64 slot of each token; the pool's null slot where a row has no token.
        starts: [rows] int64 first valid column of each row.
        ragged: whether any row has fewer tokens than ``width``.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    ragged: bool

    @property
    def width(self) -> int:
        """Most tokens that any row reads."""
        return self.slots.shape[1]

    def padding(self) -> torch.Tensor:
        """[rows, width] bool, True where a row has no token."""
        return torch.arange(self.width, device=self.slots.device) < self.starts[:, None]


@dataclass(frozen=True)
class SharedRun:
    """Consecutive tokens that all of some adjacent rows read.

    Attributes:
        rows: the rows.
        slots: [tokens] int64 slots, or a slice of the pool where the blocks lie in one physical run.
        tokens: number of tokens.
        from_end: distance of the run's first token from the end of its rows, which are equally long.
    """

    rows: slice
    slots: torch.Tensor | slice
    tokens: int
    from_end: int


@dataclass(frozen=True)
class AttentionPlan:
    """One query token per row, the row's newest. Every token a row sees is in exactly one run or in its own slots.

    Attributes:
        runs: runs read once for several rows.
        own: the rest, row by row; never empty, since the newest token is there.
        most: most tokens that any row sees, runs included.
    """

    runs: tuple[SharedRun, ...]
    own: RowSlots
    most: int

    @property
    def rows(self) -> int:
        """Number of query rows."""
        return self.own.slots.shape[0]


def make_plan(
    tables: Ints,
    lengths: Ints,
    *,
    block_size: int,
    null_slot: int,
    window: int | None = None,
    device: torch.device | None = None,
) -> AttentionPlan:
    """Plan for one query token per row, the row's newest.

    Args:
        tables: [rows, blocks] physical block ids in logical order; -1 where nothing is held.
        lengths: [rows] tokens of each row, the newest included, at least 1.
        block_size: slots per block.
        null_slot: slot that reads as zero.
        window: how many of the newest tokens a row sees; None for all.
        device: where the plan's tensors go.
    """
    first = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    runs, own_from = _shared_runs(tables, lengths, first, block_size, device)
    own = row_slots(tables, lengths, own_from, block_size=block_size, null_slot=null_slot, device=device)
    return AttentionPlan(runs, own, int((lengths - first).max(initial=0)))


def row_slots(
    tables: Ints, lengths: Ints, first: Ints, *, block_size: int, null_slot: int, device: torch.device | None = None
) -> RowSlots:
    """Slots of the tokens from position ``first`` [rows] to the end of each row."""
    seen = lengths - first
    width = int(seen.max(initial=0))
    position = lengths[:, None] - width + np.arange(width)[None, :]
    valid = position >= first[:, None]
    block = np.take_along_axis(tables, np.where(valid, position, 0) // block_size, axis=1)
    slots = np.where(valid, block * block_size + position % block_size, null_slot)
    starts = width - seen
    return RowSlots(torch.from_numpy(slots).to(device), torch.from_numpy(starts).to(device), bool((starts > 0).any()))


def _shared_runs(
    tables: Ints, lengths: Ints, first: Ints, block_size: int, device: torch.device | None
) -> tuple[tuple[SharedRun, ...], Ints]:
    """The runs worth reading on their own, and [rows] where each row's own part begins."""
    own_from = first.copy()
    runs = []
    for start, stop in _groups(tables, lengths, first // block_size):
        block = int(first[start]) // block_size
        same = (tables[start:stop, block:] == tables[start, block:]).all(axis=0) & (tables[start, block:] >= 0)
        shared = int(np.argmin(np.append(same, False)))
        # The newest token stays with its row, also where a row is alone.
        end = min((block + shared) * block_size, int(lengths[start]) - 1)
        tokens = end - int(first[start])
        if tokens * (stop - start) < MIN_RUN:
            continue
        position = np.arange(int(first[start]), end)
        slots = tables[start, position // block_size] * block_size + position % block_size
        physical = slots[-1] - slots[0] == tokens - 1 and bool((np.diff(slots) == 1).all())
        where = slice(int(slots[0]), int(slots[-1]) + 1) if physical else torch.from_numpy(slots).to(device)
        runs.append(SharedRun(slice(start, stop), where, tokens, int(lengths[start] - first[start])))
        own_from[start:stop] = end
    return tuple(runs), own_from


def _groups(tables: Ints, lengths: Ints, block: Ints) -> list[tuple[int, int]]:
    """Ranges of adjacent rows of equal length whose first visible block is the same."""
    if len(lengths) == 0:
        return []
    head = np.take_along_axis(tables, block[:, None], axis=1)[:, 0]
    edge = np.flatnonzero((np.diff(head) != 0) | (np.diff(lengths) != 0)) + 1
    bounds = [0, *edge.tolist(), len(lengths)]
    return list(pairwise(bounds))
