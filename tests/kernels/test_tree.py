"""The tree of block tables against one that is built row by row."""

from __future__ import annotations

import numpy as np
import pytest

from branchkv.kernels.tree import Ints, Nodes, Sequences, find_nodes, find_parents, sort_rows, visible
from branchkv.tests.kernels.forked_tables import forked_tables


def trie(tables: Ints) -> set[tuple[frozenset[int], tuple[int, ...], int]]:
    """Every maximal chain of blocks that the same rows hold: (rows, blocks, first column), from a dictionary trie."""
    found = set()

    def walk(rows: frozenset[int], column: int) -> None:
        groups: dict[int, set[int]] = {}
        for row in rows:
            if column < tables.shape[1] and tables[row, column] >= 0:
                groups.setdefault(int(tables[row, column]), set()).add(row)
        for block, members in groups.items():
            chain, at = [block], column + 1
            while at < tables.shape[1] and len({int(tables[row, at]) for row in members} - {-1}) == 1:
                if any(tables[row, at] < 0 for row in members):
                    break
                chain.append(int(tables[next(iter(members)), at]))
                at += 1
            found.add((frozenset(members), tuple(chain), column))
            walk(frozenset(members), at)

    walk(frozenset(range(len(tables))), 0)
    return found


def as_chains(tables: Ints, order: Ints, nodes: Nodes) -> list[tuple[frozenset[int], tuple[int, ...], int]]:
    chains = []
    for start, stop, first, last in zip(
        nodes.row_start, nodes.row_stop, nodes.block_start, nodes.block_stop, strict=True
    ):
        blocks = tables[order[start], first:last]
        assert all((tables[row, first:last] == blocks).all() for row in order[start:stop])
        chains.append((frozenset(order[start:stop].tolist()), tuple(blocks.tolist()), int(first)))
    return chains


@pytest.mark.parametrize("seed", range(200))
def test_a_tree_built_row_by_row_is_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given = forked_tables(rng, rows=int(rng.integers(1, 14)), columns=int(rng.integers(1, 9)), block_size=4)
    tables = given["tables"]
    order = sort_rows(tables.astype(np.int32))
    assert sorted(order.tolist()) == list(range(len(tables)))
    nodes = find_nodes(tables[order].astype(np.int32))
    chains = as_chains(tables, order, nodes)
    assert len(set(chains)) == len(chains)
    assert set(chains) == trie(tables)
    assert_parents(chains, find_parents(nodes))


def assert_parents(chains: list[tuple[frozenset[int], tuple[int, ...], int]], parents: Ints) -> None:
    for (rows, _, first), parent in zip(chains, parents, strict=True):
        above = [
            number
            for number, (others, blocks, start) in enumerate(chains)
            if rows <= others and start + len(blocks) == first
        ]
        assert above == ([] if parent < 0 else [parent])


def test_blocks_of_any_size_sort() -> None:
    """Ids are compared as bytes: 256 comes after 1, and 2**24 after 255."""
    tables = np.array([[2**24, 1], [255, 3], [1, 2], [256, 0], [1, -1], [255, 2]], dtype=np.int32)
    assert tables[sort_rows(tables), 0].tolist() == [1, 1, 255, 255, 256, 2**24]


def test_rows_that_are_equal_keep_their_order() -> None:
    tables = np.array([[5, 6], [1, 2], [5, 6], [1, 2]], dtype=np.int32)
    assert sort_rows(tables).tolist() == [1, 3, 0, 2]
    assert sort_rows(tables[[0, 0, 0]]).tolist() == [0, 1, 2]


def test_blocks_trimmed_by_a_window_are_shared_as_rectangles() -> None:
    """The longer row has given back its first block; the rest is still shared."""
    tables = np.array([[7, 8, 9, 1], [-1, 8, 9, 2]], dtype=np.int32)
    order = sort_rows(tables)
    found = as_chains(tables.astype(np.int64), order, find_nodes(tables[order]))
    assert (frozenset({0, 1}), (8, 9), 1) in found
    assert len(found) == 4


def test_nothing_at_all() -> None:
    for shape in ((0, 0), (0, 3), (2, 0)):
        empty = np.empty(shape, dtype=np.int32)
        assert len(sort_rows(empty)) == shape[0]
        assert len(find_nodes(empty)) == 0
        assert len(find_parents(find_nodes(empty))) == 0


def test_what_no_row_sees_is_hidden() -> None:
    tables = np.array([[1, 2, 3, 9], [4, 5, 6, 7]], dtype=np.int32)
    ones = np.ones(2, dtype=np.int64)
    got = visible(Sequences(tables, np.array([5, 8]), np.array([1, 3]), 2, 3))
    # Row 0 sees positions 2 to 4; the oldest of the three queries of row 1 sees 3 to 5.
    assert got.tolist() == [[-1, 2, 3, -1], [-1, 5, 6, 7]]
    assert visible(Sequences(tables, np.array([5, 8]), ones, 2, None)).tolist() == [[1, 2, 3, -1], [4, 5, 6, 7]]
