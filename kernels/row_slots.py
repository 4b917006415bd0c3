"""Where each token of each sequence lies, as one padded matrix: for code that wants dense K/V."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from branchkv.kernels.tree import Ints

__all__ = ["RowSlots", "row_slots"]


@dataclass(frozen=True)
class RowSlots:
    """Slots of the tokens of each sequence, right-aligned: the newest token is in the last column.

    Attributes:
        slots: [sequences, width] int64 slot of each token; the pool's null slot where a sequence has no token.
        starts: [sequences] int64 first valid column of each sequence.
    """

    slots: torch.Tensor
    starts: torch.Tensor

    @property
    def width(self) -> int:
        """Most tokens of any sequence."""
        return self.slots.shape[1]


def row_slots(
    tables: Ints, lengths: Ints, first: Ints, *, block_size: int, null_slot: int, device: torch.device | None = None
) -> RowSlots:
    """Slots of the tokens from position ``first`` [sequences] to the end of each sequence."""
    seen = lengths - first
    width = int(seen.max(initial=0))
    position = lengths[:, None] - width + np.arange(width)[None, :]
    valid = position >= first[:, None]
    block = np.take_along_axis(tables, np.where(valid, position, 0) // block_size, axis=1)
    slots = np.where(valid, block * block_size + position % block_size, null_slot)
    return RowSlots(torch.from_numpy(slots).to(device), torch.from_numpy(width - seen).to(device))
