"""Which sequences hold the same blocks: the sorted block tables as rectangles of (sequences, columns).

Sorting the rows of a block table puts sequences with a common prefix side by side, so whatever several of them share
is a range of rows times a range of columns. Everything here works on whole arrays; the cost is a few passes over the
table and does not depend on how the sequences forked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Ints", "Nodes", "Sequences", "Table", "find_nodes", "find_parents", "join_nodes", "sort_rows", "visible"]

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Sequences:
    """What a plan is made from, on the host.

    Attributes:
        tables: [sequences, columns] int32 physical block ids in logical order; -1 where no query row sees anything.
        ends: [sequences] tokens of each sequence, this step's included.
        queries: [sequences] new tokens of each sequence in this step, each a query row; at least 1.
        block_size: slots per block.
        window: how many of the newest tokens a query row sees, itself included; None for all.
    """

    tables: Table
    ends: Ints
    queries: Ints
    block_size: int
    window: int | None

    @property
    def firsts(self) -> Ints:
        """[sequences] first position that any query row of the sequence sees."""
        if self.window is None:
            return np.zeros_like(self.ends)
        firsts: Ints = np.maximum(self.ends - self.queries + 1 - self.window, 0)
        return firsts


@dataclass(frozen=True)
class Nodes:
    """Rectangles that tile what the sequences see, by first row and then by first column. All arrays are [nodes].

    Attributes:
        row_start: first sequence, as a place in the sorted order.
        row_stop: one past the last one; all of them hold the same blocks in the node's columns.
        block_start: first column of the tables.
        block_stop: one past the last one.
    """

    row_start: Ints
    row_stop: Ints
    block_start: Ints
    block_stop: Ints

    def __len__(self) -> int:
        return len(self.row_start)

    @property
    def rows(self) -> Ints:
        """[nodes] number of sequences."""
        rows: Ints = self.row_stop - self.row_start
        return rows


def visible(sequences: Sequences) -> Table:
    """The tables with -1 wherever no query row looks: after the end, before every window."""
    size = sequences.block_size
    column = np.arange(sequences.tables.shape[1], dtype=np.int64)
    seen = column < -(-sequences.ends // size)[:, None]
    if sequences.window is not None:
        seen &= column >= (sequences.firsts // size)[:, None]
    tables: Table = np.where(seen, sequences.tables, np.int32(-1))
    return tables


def sort_rows(tables: Table) -> Ints:
    """[rows] the order in which rows with equal beginnings are neighbours, stable.

    The rows are compared as byte strings, most significant byte first, which is several times faster than a sort with
    one key per column.
    """
    rows, columns = tables.shape
    if rows < 2 or columns == 0:
        return np.arange(rows)
    differs = (tables[1:] != tables[0]).any(axis=0)  # a prompt that all rows share would be compared again and again
    if not differs.any():
        return np.arange(rows)
    keys = np.ascontiguousarray(tables[:, differs].astype(">i4")).view(f"S{4 * np.count_nonzero(differs)}")[:, 0]
    if bool((keys[1:] >= keys[:-1]).all()):
        return np.arange(rows)
    return np.argsort(keys, kind="stable")


def find_nodes(tables: Table) -> Nodes:
    """The rectangles of tables [rows, columns] whose rows are sorted.

    In each column, neighbouring rows that hold the same block form a segment. A segment that spans the same rows in
    consecutive columns is a node. -1 belongs to no node.
    """
    alike = ((tables[1:] == tables[:-1]) & (tables[1:] >= 0)).any(axis=0)
    column = tables.shape[1] - int(np.argmax(alike[::-1])) if alike.any() else 0
    # Behind the last column in which any two rows are alike, every row is on its own.
    alone = _single_rows(tables[:, column:])
    return join_nodes(_segments(tables[:, :column]), alone, column) if column else alone


def _single_rows(tables: Table) -> Nodes:
    held = tables >= 0
    rows = np.flatnonzero(held.any(axis=1))
    first = held[rows].argmax(axis=1) if held.shape[1] else rows
    return Nodes(rows, rows + 1, first, first + held[rows].sum(axis=1))


def _segments(tables: Table) -> Nodes:
    """``find_nodes`` for columns in which rows are alike."""
    rows, columns = tables.shape
    by_column = np.ascontiguousarray(tables.T)  # [columns, rows]
    parts = np.ones((columns, rows), dtype=bool)
    np.not_equal(by_column[:, 1:], by_column[:, :-1], out=parts[:, 1:])
    heads = np.flatnonzero(parts)  # first row of each segment, as column * rows + row; row 0 always begins one
    sizes = np.diff(heads, append=rows * columns)
    held = by_column.ravel()[heads] >= 0
    heads, sizes = heads[held], sizes[held]
    # Sizes by place, with an empty column before and after, so that a segment can look at its neighbours.
    place = np.zeros((columns + 2) * rows, dtype=np.int32)
    place[heads + rows] = sizes
    begins = place[heads] != sizes
    ends = place[heads + 2 * rows] != sizes
    starts, stops = _by_row(heads[begins], rows), _by_row(heads[ends], rows)
    row, column = starts % rows, starts // rows
    return Nodes(row, row + place[starts + rows], column, stops // rows + 1)


def join_nodes(left: Nodes, right: Nodes, column: int) -> Nodes:
    """Nodes of the columns before ``column``, and those of the columns from there on, which count from 0."""
    kept = left.block_start < column
    parts = [
        np.stack([left.row_start, left.row_stop, left.block_start, np.minimum(left.block_stop, column)], axis=1)[kept],
        np.stack([right.row_start, right.row_stop, right.block_start + column, right.block_stop + column], axis=1),
    ]
    every = np.concatenate(parts)
    every = every[np.lexsort((every[:, 2], every[:, 0]))]
    same = (every[1:, :2] == every[:-1, :2]).all(axis=1) & (every[:-1, 3] == column) & (every[1:, 2] == column)
    stops = every[:, 3].copy()
    stops[:-1][same] = every[1:, 3][same]
    keep = np.append(True, ~same)
    rows, after, start = (np.ascontiguousarray(every[keep, part]) for part in range(3))
    return Nodes(rows, after, start, stops[keep])


def find_parents(nodes: Nodes) -> Ints:
    """[nodes] the node that holds all rows of a node in the column before it; -1 for none.

    Args:
        nodes: sorted as ``find_nodes`` returns them, so that a parent stands before its children.
    """
    if len(nodes) == 0:
        return np.empty(0, dtype=np.int64)
    # A parent ends where the child begins, and its rows include the child's: the last node in the order
    # (column where it ends, first row) that is not after (column where the child begins, first row).
    columns_first = np.lexsort((nodes.row_start, nodes.block_stop))
    span = int(nodes.row_stop.max()) + 1
    keys = (nodes.block_stop * span + nodes.row_start)[columns_first]
    wanted = nodes.block_start * span + nodes.row_start
    place = np.searchsorted(keys, wanted, side="right") - 1
    found = columns_first[np.maximum(place, 0)]
    inside = (place >= 0) & (nodes.block_stop[found] == nodes.block_start) & (nodes.row_stop[found] >= nodes.row_stop)
    return np.where(inside, found, -1)


def _by_row(places: Ints, rows: int) -> Ints:
    """Places column * rows + row in the order of (row, column); within a row, beginnings and ends alternate."""
    row, column = places % rows, places // rows
    columns = int(column.max(initial=0)) + 1
    return places[np.argsort(row * columns + column)]
