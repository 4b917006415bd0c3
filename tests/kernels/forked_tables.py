"""Random block tables of trees: rows fork from rows anywhere, end anywhere, and come in any order."""

from __future__ import annotations

from typing import Any

import numpy as np

from branchkv.kernels.tree import Ints

__all__ = ["forked_tables"]


def forked_tables(
    rng: np.random.Generator, *, rows: int, columns: int, block_size: int, queries: int = 1, roots: int = 2
) -> dict[str, Any]:
    """Arguments of ``make_plan`` without the slots: tables, lengths, queries and block_size.

    Args:
        rows: sequences.
        columns: most blocks of a sequence.
        queries: most new tokens of a sequence.
        roots: most sequences that share nothing with those before.
    """
    tables = np.full((rows, columns), -1, dtype=np.int64)
    counts = rng.integers(1, columns + 1, rows)
    used = 0
    for row in range(rows):
        parent = int(rng.integers(0, row)) if row >= roots else None
        shared = 0 if parent is None else int(rng.integers(0, min(counts[row], counts[parent]) + 1))
        if parent is not None:
            tables[row, :shared] = tables[parent, :shared]
        fresh = int(counts[row]) - shared
        tables[row, shared : shared + fresh] = np.arange(used, used + fresh)
        used += fresh
    names = rng.permutation(2 * used + 1)
    tables = np.where(tables >= 0, names[tables], -1)[rng.permutation(rows)]
    held: Ints = (tables >= 0).sum(axis=1)
    lengths = held * block_size - rng.integers(0, block_size, rows)
    counts = np.minimum(rng.integers(1, queries + 1, rows), lengths)
    return {"tables": tables, "lengths": lengths, "queries": counts, "block_size": block_size}
