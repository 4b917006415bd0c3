"""Work items: which rows read which tokens together, cut and ordered for the processors of a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from branchkv.kernels.cost import CostModel, Floats
from branchkv.kernels.packing import Packing
from branchkv.kernels.sharing import Runs
from branchkv.kernels.tree import Ints

__all__ = ["Cut", "Packing", "WorkItems", "alignment", "best_cut", "durations", "make_work", "shortest_time"]

Bools = npt.NDArray[np.bool_]

# Cuts that are tried: so many programs per processor, from a grid of lengths. With more there is little to balance.
_ROUNDS = (1, 2, 3, 4, 6, 8)
_GRID = 48
# Matrix instructions take tokens by 16. A cut keeps them together unless the common multiple with a block is longer.
_MATRIX = 16
_MOST_ALIGNED = 512


@dataclass(frozen=True)
class Cut:
    """Where runs are cut into items.

    Attributes:
        several: most tokens of an item that several rows read, roughly: the items of a run are equally long.
        single: the same for items of one row.
        align: items end at its multiples.
    """

    several: int
    single: int
    align: int

    def lengths(self, runs: Runs) -> Ints:
        """[runs] the limit that holds for each run."""
        return np.where(runs.count > 1, self.several, self.single)


@dataclass(frozen=True)
class WorkItems:
    """The work of one launch, longest item first, and how partial results add up.

    Attributes:
        items: [items, 6] int32 (first, count, m_start, start, stop, partial). The query rows
            ``order[first : first + count]`` of the plan read the tokens [start, stop) from the same blocks. The item's
            tile holds the packed rows from ``m_start`` on: packed row m is query row ``m // group`` of the range and
            head ``m % group`` of the group. Row r of the range writes its partial result to ``partial + r``, or the
            final one if ``partial`` is -1. ``count`` 0 is padding.
        offsets: [rows + 1] int32 range of each query row in ``slots``; empty where an item writes the final result.
        slots: [partials] int32 partial results of each query row, in the order in which they are merged.
        partials: number of partial results.
    """

    items: torch.Tensor
    offsets: torch.Tensor
    slots: torch.Tensor
    partials: int

    def to(self, device: torch.device | None) -> WorkItems:
        """The same work with its tensors on ``device``."""
        return WorkItems(self.items.to(device), self.offsets.to(device), self.slots.to(device), self.partials)


def make_work(runs: Runs, order: Ints, packing: Packing, cost: CostModel, cut: Cut) -> WorkItems:
    """Cut runs into items.

    Args:
        runs: what is read together.
        order: [rows] sorted place -> query row.
        packing: the kernel's tiles.
        cost: puts the longest items first.
        cut: from ``best_cut``.
    """
    run, start, stop, tokens = _pieces(runs, cut)
    first, count = runs.first[run], runs.count[run]
    partial, offsets, slots = _reduction(first, count, order)
    tiles = packing.tiles(count)
    piece = np.repeat(np.arange(len(run)), tiles)
    tile = np.arange(len(piece)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    m_start = tile * packing.tile_rows(count)[piece]
    columns = (first[piece], count[piece], m_start, start[piece], stop[piece], partial[piece])
    longest_first = np.argsort(-durations(count, tokens, packing, cost)[piece], kind="stable")
    items = np.stack(columns, axis=1).astype(np.int32)[longest_first]
    return WorkItems(torch.from_numpy(items), torch.from_numpy(offsets), torch.from_numpy(slots), len(slots))


def durations(count: Ints, tokens: Ints, packing: Packing, cost: CostModel) -> Floats:
    """Microseconds of one program that reads ``tokens`` for ``count`` query rows."""
    time: Floats = cost.fixed + tokens * cost.token(packing.tile_rows(count), packing.token_bytes)
    return time


def alignment(block_size: int) -> int:
    """Tokens that a cut keeps together: whole blocks, and whole rows of a matrix instruction."""
    together = int(np.lcm(block_size, _MATRIX))
    return together if together <= _MOST_ALIGNED else block_size


def best_cut(runs: Runs, packing: Packing, cost: CostModel, align: int) -> tuple[Cut, float]:
    """The cut with which the launch is over first, and its estimated time in microseconds."""
    longest = (int(runs.tokens.max(initial=0)) // align + 1) * align
    whole = Cut(longest, longest, align)
    alone = ~_has_several(runs.first, runs.count)
    cuts = {whole}
    for single in (False, True):
        # Either all runs are cut alike, or those of one row stay whole.
        cuttable = (runs.count > 1) | ~np.full(len(runs), single)
        for length in _lengths(runs, cuttable, packing, cost, whole):
            cuts.add(Cut(length, longest if single else length, align))
    times = {cut: _estimate(runs, alone, cut, packing, cost) for cut in cuts}
    best = min(times, key=lambda cut: (times[cut], -cut.several, -cut.single))
    return best, times[best]


def shortest_time(runs: Runs, packing: Packing, cost: CostModel) -> float:
    """Microseconds that no cut of the runs can beat: all processors busy with uncut runs from beginning to end."""
    programs = packing.tiles(runs.count) * packing.kv_heads
    return float((durations(runs.count, runs.tokens, packing, cost) * programs).sum()) / cost.processors


def _lengths(runs: Runs, cuttable: Bools, packing: Packing, cost: CostModel, whole: Cut) -> set[int]:
    """Lengths worth a look: the shortest ones whose programs fit the processors in so many rounds."""
    if not cuttable.any():
        return set()
    grid = _grid(whole.several // whole.align) * whole.align
    tiles = packing.tiles(runs.count) * packing.kv_heads
    pieces = np.maximum(1, -(-runs.tokens[cuttable] // grid[:, None]))  # [grid, runs]
    programs = pieces @ tiles[cuttable] + tiles[~cuttable].sum()  # falls from left to right
    fits = (int(np.argmax(programs <= rounds * cost.processors)) for rounds in _ROUNDS)
    return {int(grid[place]) for place in fits if place}


@lru_cache(maxsize=1024)
def _grid(most: int) -> Ints:
    """Lengths from 1 to ``most``, evenly spaced by ratio."""
    return np.unique(np.ceil(np.geomspace(1, most, _GRID)).astype(np.int64))


def _estimate(runs: Runs, alone: Bools, cut: Cut, packing: Packing, cost: CostModel) -> float:
    """Microseconds until the last processor is done, merging included.

    Items, longest first, are dealt to the processors forwards and backwards in turn. That is close to starting each one
    on the processor that is free first, and takes no loop.
    """
    if len(runs) == 0:
        return 0.0
    pieces = np.maximum(1, -(-runs.tokens // cut.lengths(runs)))
    programs = pieces * packing.tiles(runs.count) * packing.kv_heads
    time = durations(runs.count, -(-runs.tokens // pieces), packing, cost)
    by_time = np.argsort(-time)
    each = np.repeat(time[by_time], programs[by_time])
    rounds = -(-len(each) // cost.processors)
    dealt = np.zeros((rounds, cost.processors))
    dealt.ravel()[: len(each)] = each
    dealt[1::2] = dealt[1::2, ::-1].copy()
    partials = int((pieces * runs.count)[~alone | (pieces > 1)].sum()) * packing.group * packing.kv_heads
    return float(dealt.sum(axis=0).max()) + partials * cost.merge / cost.processors


def _pieces(runs: Runs, cut: Cut) -> tuple[Ints, Ints, Ints, Ints]:
    """Pieces of the runs, (run, start, stop, tokens), each [pieces]; those of one run differ by at most ``align``."""
    align = cut.align
    low, high = runs.start // align, -(-(runs.start + runs.tokens) // align)
    pieces = np.maximum(1, np.minimum(-(-runs.tokens // cut.lengths(runs)), high - low))
    run = np.repeat(np.arange(len(runs)), pieces)
    number = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    units = (high - low)[run]
    start = np.maximum(runs.start[run], (low[run] + number * units // pieces[run]) * align)
    last = number == pieces[run] - 1
    stop = np.where(last, runs.stop[run], (low[run] + (number + 1) * units // pieces[run]) * align)
    return run, start, stop, np.minimum(stop, (runs.start + runs.tokens)[run]) - start


def _has_several(first: Ints, count: Ints) -> Bools:
    """[pieces] whether any row of a piece has another piece as well."""
    rows = int((first + count).max(initial=0))
    change = np.bincount(first, minlength=rows + 1) - np.bincount(first + count, minlength=rows + 1)
    several = np.concatenate([[0], np.cumsum(np.cumsum(change)[:rows] > 1)])
    found: Bools = several[first + count] > several[first]
    return found


def _reduction(first: Ints, count: Ints, order: Ints) -> tuple[Ints, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Where pieces write, [pieces]; and the partial results of each query row: offsets [rows + 1], slots [partials]."""
    several = _has_several(first, count)
    width = np.where(several, count, 0)
    base = np.cumsum(width) - width
    row = np.repeat(first - base, width) + np.arange(int(width.sum()))
    query_row = order[row]
    slots = np.argsort(query_row, kind="stable").astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(query_row, minlength=len(order)))]).astype(np.int32)
    return np.where(several, base, -1), offsets, slots
