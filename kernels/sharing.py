"""Which nodes of the tree are worth reading once, and which are cheaper as part of what their rows read alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from branchkv.kernels.cost import CostModel
from branchkv.kernels.packing import Packing
from branchkv.kernels.tree import Ints, Nodes, Sequences, find_parents

__all__ = ["Runs", "plain_runs", "shared_runs"]


@dataclass(frozen=True)
class Runs:
    """Tokens that the query rows of some sequences read together. All arrays are [runs].

    Attributes:
        first: first query row, as a place in the sorted order of rows.
        count: query rows.
        start: first token.
        stop: one past the last token, a block end.
        tokens: tokens that at least one of the rows sees today: ``stop`` may lie in the unwritten part of a block.
    """

    first: Ints
    count: Ints
    start: Ints
    stop: Ints
    tokens: Ints

    def __len__(self) -> int:
        return len(self.first)


def plain_runs(sequences: Sequences, order: Ints) -> Runs:
    """Nothing shared: every sequence reads all that it sees.

    Args:
        sequences: see ``Sequences``.
        order: [sequences] sorted place -> sequence.
    """
    size = sequences.block_size
    firsts, ends = sequences.firsts[order], sequences.ends[order]
    place = np.arange(len(order))
    nodes = Nodes(place, place + 1, firsts // size, -(-ends // size))
    return _runs(sequences, order, nodes)


def shared_runs(sequences: Sequences, order: Ints, nodes: Nodes, packing: Packing, cost: CostModel) -> Runs:
    """The nodes, each shared by its rows if that is cheaper than to let its children read its tokens again.

    A node shared costs a program per tile and one more partial result per row. Not shared, its tokens are read by each
    child in addition to the child's own, and alone by the rows that have no child. Nodes are decided from the root
    down, all of one depth at once: what was not shared above makes the children longer.
    """
    parents = find_parents(nodes)
    queries = np.concatenate([[0], np.cumsum(sequences.queries[order])])
    count = queries[nodes.row_stop] - queries[nodes.row_start]
    tiles = packing.tiles(count)
    rate = tiles * cost.token(packing.tile_rows(count), packing.token_bytes)
    alone = nodes.rows - _sum_of_children(nodes.rows, parents)
    one_row = cost.token(packing.narrow, packing.token_bytes)
    saved = (_sum_of_children(rate, parents) + alone * one_row - rate) * cost.reread
    price = (tiles - alone) * cost.fixed + count * packing.group * cost.merge
    limits = _longest(sequences.ends[order], nodes)
    starts, kept = nodes.block_start.copy(), np.ones(len(nodes), dtype=bool)
    for level in _levels(parents):
        above = parents[level]
        pushed = (above >= 0) & ~kept[above]
        starts[level[pushed]] = starts[above[pushed]]
        tokens = np.minimum(nodes.block_stop[level] * sequences.block_size, limits[level])
        tokens = tokens - starts[level] * sequences.block_size
        kept[level] = (nodes.rows[level] == 1) | (tokens * saved[level] > price[level])
    return _runs(sequences, order, _with_single_rows(nodes, parents, starts, kept))


def _with_single_rows(nodes: Nodes, parents: Ints, starts: Ints, kept: np.ndarray) -> Nodes:
    """The kept nodes from ``starts`` on, and one node for each row of another node that no child of it has."""
    lost = np.flatnonzero(~kept)
    covered = np.flatnonzero((parents >= 0) & ~kept[parents])
    # Row by row over the rows of all lost nodes, laid end to end: +1 and -1 mark where a child begins and ends.
    widths = nodes.rows[lost]
    base = np.zeros(len(nodes), dtype=np.int64)
    base[lost] = np.concatenate([[0], np.cumsum(widths)[:-1]]) if len(lost) else 0
    shift = base[parents[covered]] - nodes.row_start[parents[covered]]
    marks = np.zeros(int(widths.sum()) + 1, dtype=np.int64)
    np.add.at(marks, nodes.row_start[covered] + shift, 1)
    np.add.at(marks, nodes.row_stop[covered] + shift, -1)
    owner = np.repeat(lost, widths)
    row = np.arange(len(owner)) - base[owner] + nodes.row_start[owner]
    bare = np.cumsum(marks)[:-1] == 0
    owner, row = owner[bare], row[bare]
    return Nodes(
        np.concatenate([nodes.row_start[kept], row]),
        np.concatenate([nodes.row_stop[kept], row + 1]),
        np.concatenate([starts[kept], starts[owner]]),
        np.concatenate([nodes.block_stop[kept], nodes.block_stop[owner]]),
    )


def _runs(sequences: Sequences, order: Ints, nodes: Nodes) -> Runs:
    """Nodes in units of query rows and tokens."""
    size = sequences.block_size
    queries = np.concatenate([[0], np.cumsum(sequences.queries[order])])
    first = queries[nodes.row_start]
    start, stop = nodes.block_start * size, nodes.block_stop * size
    seen = np.minimum(stop, _longest(sequences.ends[order], nodes))
    # A window may begin within the first block: not cut off here, so that the items hold for other lengths as well.
    return Runs(first, queries[nodes.row_stop] - first, start, stop, seen - start)


def _sum_of_children(values: np.ndarray, parents: Ints) -> np.ndarray:
    """[nodes] sum of ``values`` over each node's children."""
    inner = parents >= 0
    return np.bincount(parents[inner], weights=values[inner], minlength=len(parents))


def _longest(values: Ints, nodes: Nodes) -> Ints:
    return _reduce(np.maximum, values, nodes)


def _reduce(function: np.ufunc, values: Ints, nodes: Nodes) -> Ints:
    """[nodes] reduction of ``values`` [rows] over each node's rows."""
    if len(nodes) == 0:
        return np.empty(0, dtype=np.int64)
    # reduceat takes pairs (start, stop) and reduces every second range; a stop at the very end needs one more value.
    bounds = np.stack([nodes.row_start, nodes.row_stop], axis=1).ravel()
    reduced: Ints = function.reduceat(np.append(values, values[-1:]), bounds)[::2]
    return reduced


def _levels(parents: Ints) -> list[Ints]:
    """The nodes of each depth, the roots first."""
    if len(parents) == 0:
        return []
    depth = np.zeros(len(parents), dtype=np.int64)
    above = parents
    while bool((above >= 0).any()):
        depth += above >= 0
        above = np.where(above >= 0, parents[above], -1)
    by_depth = np.argsort(depth, kind="stable")
    return np.split(by_depth, np.flatnonzero(np.diff(depth[by_depth])) + 1)
