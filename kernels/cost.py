"""What an item of work costs on one processor of a GPU: it decides what to share and where to cut."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["GPU_COST", "CostModel", "makespan"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """Time of one program: ``fixed + tokens * max(bytes per token / bandwidth, flops per token / rate)``.

    Attributes:
        processors: programs that run at a time.
        fixed: microseconds of a program apart from its tokens.
        bandwidth: bytes per microsecond that one processor reads from memory.
        rate: floating-point operations per microsecond of one processor's matrix units.
        merge: microseconds to write, read and add one partial result of one head on one processor.
        reread: cost of reading a token again that another program has just read, as part of reading it from memory.
    """

    processors: int
    fixed: float
    bandwidth: float
    rate: float
    merge: float
    reread: float

    def token(self, tile_rows: npt.ArrayLike, token_bytes: int) -> Floats:
        """Microseconds per token of a tile with ``tile_rows`` packed rows; ``token_bytes`` are K and V of one head.

        A product of one number costs two operations, for the scores and for the values: one per byte of bf16 K/V and
        row, twice that is what ``token_bytes * tile_rows`` counts.
        """
        flops = 2.0 * np.asarray(tile_rows, dtype=np.float64) * (token_bytes / 2)
        return np.maximum(token_bytes / self.bandwidth, flops / self.rate)


# H100 SXM: 132 processors, 3.35 TB/s and 989 Tflop/s bf16 (NVIDIA's data sheet), divided by the processors; half of the
# peak rate, as attention kernels reach (https://arxiv.org/abs/2407.08608). The rest is assumed until docs/gpu.md has a
# measured table: `fixed`, four memory accesses of 0.6 microseconds that wait for each other (item, table, K/V, result),
# half of it hidden behind a second program on the processor; `merge`, a partial result of 128 values in float32 written
# and read at `bandwidth`; `reread`, an L2 cache that delivers twice the memory's rate.
GPU_COST = CostModel(processors=132, fixed=1.2, bandwidth=25_400.0, rate=3.75e6, merge=0.04, reread=0.5)


def makespan(durations: Iterable[float], processors: int) -> float:
    """When the last of some programs ends, each started in order on the processor that is free first."""
    free = [0.0] * processors
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)
