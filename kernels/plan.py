"""What one step reads, as tensors: the plan of the attention operator for the layers of one kind.

The plan is made once a step from block tables and lengths alone, and serves every layer of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["AttentionPlan", "make_plan"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionPlan:
    """Slots that each row reads, right-aligned: the newest token is in the last column.

    Attributes:
        slots: [rows, width] int64 slot of each token; the pool's null slot where a row has no token.
        starts: [rows] int64 first valid column of each row (width - tokens read).
        ragged: whether any row has fewer tokens than ``width``.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    ragged: bool

    @property
    def rows(self) -> int:
        """Number of query rows."""
        return self.slots.shape[0]

    @property
    def width(self) -> int:
        """Most tokens that any row reads."""
        return self.slots.shape[1]

    def padding(self) -> torch.Tensor:
        """[rows, width] bool, True where a row has no token."""
        return torch.arange(self.width, device=self.slots.device) < self.starts[:, None]


def make_plan(
    tables: Ints,
    lengths: Ints,
    *,
    block_size: int,
    null_slot: int,
    window: int | None = None,
    device: torch.device | None = None,
) -> AttentionPlan:
    """Plan for one query token per row, the row's newest.

    Args:
        tables: [rows, blocks] physical block ids in logical order; -1 where nothing is held.
        lengths: [rows] tokens of each row, the newest included.
        block_size: slots per block.
        null_slot: slot that reads as zero.
        window: how many of the newest tokens a row sees; None for all.
        device: where the plan's tensors go.
    """
    seen = lengths if window is None else np.minimum(lengths, window)
    width = int(seen.max(initial=0))
    position = lengths[:, None] - width + np.arange(width)[None, :]
    valid = position >= (lengths - seen)[:, None]
    logical = np.where(valid, position, 0) // block_size
    block = np.take_along_axis(tables, logical, axis=1) if width else np.empty((len(lengths), 0), dtype=np.int64)
    slots = np.where(valid, block * block_size + position % block_size, null_slot)
    starts = width - seen
    return AttentionPlan(
        torch.from_numpy(slots).to(device), torch.from_numpy(starts).to(device), bool((starts > 0).any())
    )
