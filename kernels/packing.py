"""How query rows x heads fill the tiles of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from branchkv.kernels.tree import Ints

__all__ = ["Packing"]


@dataclass(frozen=True)
class Packing:
    """How a kernel packs query rows x heads of a KV group into the rows of its tile.

    Attributes:
        kv_heads: K/V heads.
        group: query heads per K/V head.
        narrow: tile rows for items with at most that many packed rows.
        wide: tile rows for all others.
        kv_tile: tokens that a tile loads at once.
        token_bytes: bytes of one token's K and V of one head.
    """

    kv_heads: int
    group: int
    narrow: int
    wide: int
    kv_tile: int
    token_bytes: int = 512

    def tile_rows(self, count: Ints) -> Ints:
        """Rows of the tiles that ``count`` query rows go into."""
        return np.where(count * self.group <= self.narrow, self.narrow, self.wide)

    def tiles(self, count: Ints) -> Ints:
        """Tiles that ``count`` query rows fill: how often their K/V are loaded."""
        return -(-count * self.group // self.tile_rows(count))
