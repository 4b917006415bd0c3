"""Runs that the CPU implementation attends to in one call: of one shape, evenly spaced in memory, or cut evenly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from branchkv.kernels.cpu_layout import CPURun

__all__ = ["CPUBatch", "make_batches", "pieces_of"]

# torch's kernel computes 32 query rows of a head at a time (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
_QUERIES = 32
# A run is cut into so many pieces at most, and into none of fewer tokens: every piece is one more result to be
# added up. Balance within 5 % of the best is enough.
_PIECES = (1, 2, 4, 8, 16)
_SHORTEST = 1024
_ENOUGH = 1.05


@dataclass(frozen=True)
class CPUBatch:
    """Runs of ``count`` query rows and ``tokens`` tokens each; run i begins at slot ``start + i * step``.

    Attributes:
        rows: query rows of all runs, as places in the sorted order: a slice, or [runs * count] int64.
        runs: how many there are.
        count: query rows of each.
        start: first slot of the first run; its slots, [tokens] int64, where they are not one piece of memory.
        step: slots from one run to the next.
        tokens: tokens of each.
    """

    rows: slice | torch.Tensor
    runs: int
    count: int
    start: int | torch.Tensor
    step: int
    tokens: int

    def view(self, pool: torch.Tensor, pieces: int) -> torch.Tensor:
        """[runs * pieces, kv_heads, tokens / pieces, dim] of a pool [kv_heads, slots, dim]; ``pieces`` of a single run.

        A view unless the run's slots are scattered.
        """
        if isinstance(self.start, torch.Tensor):
            run = pool.index_select(1, self.start)
        elif self.runs == 1:
            run = pool[:, self.start : self.start + self.tokens]
        else:
            head, slot, last = pool.stride()
            shape = (self.runs, pool.shape[0], self.tokens, pool.shape[2])
            offset = pool.storage_offset() + self.start * slot
            return pool.as_strided(shape, (self.step * slot, head, slot, last), offset)
        if pieces == 1:
            return run[None]
        evenly: torch.Tensor = run.unflatten(1, (pieces, self.tokens // pieces))
        return evenly.transpose(0, 1)


def make_batches(runs: Iterable[CPURun], device: torch.device | None) -> tuple[CPUBatch, ...]:
    """Batches of all runs.

    Runs of one shape go together while they are evenly spaced in memory. Any two are, so that even without a pattern
    there are half as many calls as runs.
    """
    alike: dict[tuple[int, int], list[CPURun]] = defaultdict(list)
    batches = []
    for run in runs:
        count = run.rows.stop - run.rows.start
        if isinstance(run.slots, slice):
            alike[count, run.tokens].append(run)
        else:
            batches.append(CPUBatch(run.rows, 1, count, run.slots, 0, run.tokens))
    for (count, tokens), some in alike.items():
        some.sort(key=_start)
        starts = np.array([_start(run) for run in some])
        for first, after in _progressions(starts):
            chosen = some[first:after]
            step = int(starts[first + 1] - starts[first]) if after - first > 1 else 0
            rows = _rows(chosen, device)
            batches.append(CPUBatch(rows, after - first, count, int(starts[first]), step, tokens))
    return tuple(batches)


@lru_cache(maxsize=256)
def pieces_of(tokens: int, kv_heads: int, packed: int, threads: int) -> int:
    """How many pieces a run of ``tokens`` is cut into so that the threads have equally much to do.

    Args:
        tokens: of the run; the pieces are equally long.
        kv_heads: K/V heads.
        packed: query rows x heads of a group.
        threads: that compute.
    """
    tasks = kv_heads * -(-packed // _QUERIES)
    fitting = [pieces for pieces in _PIECES if pieces * _SHORTEST <= tokens and tokens % pieces == 0] or [1]
    idle = {pieces: -(-tasks * pieces // threads) * threads / (tasks * pieces) for pieces in fitting}
    return next(pieces for pieces in fitting if idle[pieces] <= _ENOUGH * min(idle.values()))


def _start(run: CPURun) -> int:
    assert isinstance(run.slots, slice)
    return int(run.slots.start)


def _progressions(starts: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of ascending numbers that are evenly spaced, each as long as it goes."""
    found, first = [], 0
    while first < len(starts):
        steps = np.diff(starts[first:])
        after = first + 1
        if len(steps):
            other = np.flatnonzero(steps != steps[0])
            after = first + 1 + (int(other[0]) if len(other) else len(steps))
        found.append((first, after))
        first = after
    return found


def _rows(runs: list[CPURun], device: torch.device | None) -> slice | torch.Tensor:
    if all(run.rows.stop == following.rows.start for run, following in pairwise(runs)):
        return slice(runs[0].rows.start, runs[-1].rows.stop)
    every = np.concatenate([np.arange(run.rows.start, run.rows.stop) for run in runs])
    return torch.from_numpy(every).to(device)
