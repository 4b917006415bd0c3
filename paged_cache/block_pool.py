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
    """

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int32] = np.zeros(64, dtype=np.int32)
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
        """Take ``count`` free blocks, each with a count of 1; a physical run where the free blocks hold one.

        The caller has checked the budget: ids are unbounded here.
        """
        if count == 0:
            return np.empty(0, dtype=np.int64)
        free = np.flatnonzero(self.counts == 0)
        fresh = np.arange(self._high, self._high + count, dtype=np.int64)
        candidates = np.concatenate([free, fresh])
        blocks = candidates[:count]
        if count > 1 and blocks[-1] - blocks[0] != count - 1 and len(free) < 4 * count:
            blocks = _first_run(candidates, count, fallback=blocks)
        self._high = max(self._high, int(blocks[-1]) + 1)
        if self._high > len(self._counts):
            grown = np.zeros(2 * self._high, dtype=np.int32)
            grown[: len(self._counts)] = self._counts
            self._counts = grown
        self._counts[blocks] = 1
        return blocks

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


def _weights(blocks: Ids, amounts: Ids | int) -> npt.NDArray[np.float64]:
    return np.broadcast_to(np.asarray(amounts, dtype=np.float64), blocks.shape)


def _first_run(candidates: Ids, count: int, fallback: Ids) -> Ids:
    """The first ``count`` consecutive ids in the ascending ``candidates``, else ``fallback``."""
    runs = np.flatnonzero(candidates[count - 1 :] - candidates[: len(candidates) - count + 1] == count - 1)
    return candidates[runs[0] : runs[0] + count] if len(runs) else fallback
