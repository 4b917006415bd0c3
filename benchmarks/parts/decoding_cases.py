"""Block tables that benchmarks have in common: trees of rows that share prefixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

BLOCK = 16


@dataclass(frozen=True)
class Level:
    """One level of a tree: so many nodes, each of so many tokens."""

    nodes: int
    tokens: int


@dataclass(frozen=True)
class Case:
    """The nodes of the last level are the rows.

    Attributes:
        name: as printed.
        levels: from the root on. A block that two levels meet in belongs to the lower one, as after copy-on-write.
        shortest: tokens of the last level go evenly from here up to those of the level; None: all rows alike.
        goals: heads -> how many times faster than the plain plan it should be.
    """

    name: str
    levels: tuple[Level, ...]
    shortest: int | None = None
    goals: Mapping[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.levels[-1].nodes


def lengths_of(case: Case) -> np.ndarray:
    """[rows] tokens of each row."""
    *above, last = (level.tokens for level in case.levels)
    shortest = last if case.shortest is None else case.shortest
    return sum(above) + np.linspace(shortest, last, case.rows).round().astype(np.int64)


def tables_of(case: Case) -> np.ndarray:
    """[rows, columns] block ids in no order, as in a pool after some use; -1 where nothing is held."""
    lengths = lengths_of(case)
    column, row = np.arange(-(-int(lengths.max()) // BLOCK)), np.arange(case.rows)
    nodes = np.array([level.nodes for level in case.levels])
    first_own = np.cumsum([level.tokens for level in case.levels])[:-1] // BLOCK
    width = nodes[np.searchsorted(first_own, column, side="right")]
    name = (row[:, None] * width // case.rows) + column * case.rows  # of each column's nodes, no two alike
    held = column * BLOCK < lengths[:, None]
    found, block = np.unique(name[held], return_inverse=True)
    tables = np.full(name.shape, -1)
    tables[held] = np.random.default_rng(0).permutation(len(found))[block]
    return tables


def tokens_read(tables: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[blocks] how many tokens of each block any row reads."""
    most = np.zeros(int(tables.max()) + 1, dtype=np.int64)
    seen = np.clip(lengths[:, None] - np.arange(tables.shape[1]) * BLOCK, 0, BLOCK)
    np.maximum.at(most, tables[tables >= 0], seen[tables >= 0])
    return most
