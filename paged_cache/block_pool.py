"""Physical block ids and their reference counts.

A block id is valid in one pool only (each layer kind has its own). The pool knows neither tokens nor tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BlockPool", "Ids"]

Ids = npt.NDArray[np.int64]


class BlockPool:
    """Reference counts of physical blocks; a block is free exactly when its count is 0.

    There is no separate free list: free blocks are found by a scan below the high-water mark, lowest ids first. That
    keeps the held blocks dense in memory, gives prompts physical runs, and leaves nothing that could disagree with
    the counts. The scan reads 4 bytes a block, 0.1 ms for 100,000 blocks.

    Attributes:
        capacity: ids are below this number; None while storage has not set it.
    """

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int32] = np.zeros(64, dtype=np.int32)
        self.capacity: int | None = None
        self._high = 0  # every id at or above this one has never been used

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Reference count of every block id below the high-water mark (a view: do not write)."""
        return self._counts[: self._high]

    @property
    def held(self) -> int:
        """Number of blocks with a count above 0."""
        return int(np.count_nonzero(self.counts))

    @property
    def high(self) -> int:
        """One more than the highest id ever given out; storage needs room for this many blocks."""
        return self._high

    def allocate(self, count: int) -> Ids:
        """Take the ``count`` lowest free blocks, each with a count of 1. The caller has checked the budget."""
        return self._take(self._candidates(count)[:count], count)

    def allocate_run(self, count: int) -> Ids:
        """Take ``count`` consecutive free blocks, for a prompt; the lowest free ones where there is no such run."""
        candidates = self._candidates(count)
        starts = np.flatnonzero(candidates[count - 1 :] - candidates[: len(candidates) - count + 1] == count - 1)
        first = int(starts[0]) if len(starts) else 0
        return self._take(candidates[first : first + count], count)

    def add(self, blocks: Ids, amounts: Ids | int) -> None:
        """Add ``amounts`` to the counts of ``blocks``; ids may repeat, amounts may be negative.

        Raises:
            RuntimeError: a count would fall below 0, or a free block would be retained (nothing is changed then).
        """
        self.add_all(np.bincount(blocks, weights=_weights(blocks, amounts), minlength=self._high))

    def add_all(self, delta: npt.NDArray[Any]) -> None:
        """Add ``delta[b]`` to the count of every block b; shape [high].

        Raises:
            RuntimeError: as ``add``.
        """
        counts = self.counts
        if len(delta) > len(counts):
            raise RuntimeError(f"reference counts: block {len(delta) - 1} was never given out")
        wrong = np.flatnonzero((counts + delta < 0) | ((counts == 0) & (delta != 0)))
        if len(wrong):
            raise RuntimeError(f"reference counts: a free block was retained, or freed twice: {wrong[:8].tolist()}")
        counts += delta.astype(np.int32)

    def _candidates(self, count: int) -> Ids:
        """Free ids, ascending: all below the high-water mark and ``count`` above it, as far as there is room."""
        last = self._high + count if self.capacity is None else min(self._high + count, self.capacity)
        return np.concatenate([np.flatnonzero(self.counts == 0), np.arange(self._high, last, dtype=np.int64)])

    def _take(self, blocks: Ids, count: int) -> Ids:
        if len(blocks) < count:
            raise RuntimeError(
                f"block pool: {count} blocks were asked for, {len(blocks)} ids of {self.capacity} are free"
            )
        if count == 0:
            return blocks
        self._high = max(self._high, int(blocks[-1]) + 1)
        if self._high > len(self._counts):
            grown = np.zeros(2 * self._high, dtype=np.int32)
            grown[: len(self._counts)] = self._counts
            self._counts = grown
        self._counts[blocks] = 1
        return blocks


def _weights(blocks: Ids, amounts: Ids | int) -> npt.NDArray[np.float64]:
    return np.broadcast_to(np.asarray(amounts, dtype=np.float64), blocks.shape)
