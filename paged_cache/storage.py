"""The K/V tensors of one layer kind: write slots, copy blocks. The only file of this folder that knows torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from branchkv.paged_cache.views import BlockCopies

__all__ = ["KVStorage", "LayerPool", "Moves", "TorchMoves"]


@dataclass(frozen=True)
class LayerPool:
    """K and V of one layer, slot by slot.

    In memory the heads come first, so that the tokens of one head in adjacent slots are a matrix for a product.

    Attributes:
        keys: [slots + 1, kv_heads, key_dim]; the last slot is never written and stays zero, so that a gather can point
            masked places at it.
        values: [slots + 1, kv_heads, value_dim].
    """

    keys: torch.Tensor
    values: torch.Tensor


class Moves(Protocol):
    """How K/V get into slots and from block to block. Pools are [slots, heads, dim], head by head in memory."""

    def write(
        self,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write token i to slot ``slots[i]`` of both pools, in their dtype; see ``KVStorage.write``."""
        ...

    def copy(self, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor, block_size: int) -> None:
        """Copy blocks ``source`` to ``target``, [copies] int64, as if all at once."""
        ...


class TorchMoves:
    """Moves by indexing, on any device."""

    def write(
        self,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        key_pool.index_copy_(0, slots, keys.to(key_pool.dtype))
        value_pool.index_copy_(0, slots, values.to(value_pool.dtype))

    def copy(self, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor, block_size: int) -> None:
        whole = len(pool) // block_size
        blocks = pool[: whole * block_size].unflatten(0, (whole, block_size))
        blocks.index_copy_(0, target, blocks.index_select(0, source))


class KVStorage:
    """Pools of all layers of one kind; block b of a layer is its slots [b * block_size, (b + 1) * block_size).

    Pools are sized for ``capacity`` blocks and never grow or move. On a CPU that reserves address space only: the
    system hands out memory when a page is first written, so what is resident follows the blocks that were used.

    Args:
        block_size: slots per block.
        capacity: most blocks that will ever be written.
        dtype: stored dtype; None keeps the dtype of the first keys.
        moves: how K/V are written and copied; None for torch's indexing.
    """

    def __init__(self, block_size: int, capacity: int, dtype: torch.dtype | None, moves: Moves | None = None) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self._dtype = dtype
        self._moves: Moves = TorchMoves() if moves is None else moves
        self._layers: dict[int, LayerPool] = {}
        self._null_slot = capacity * block_size

    @property
    def null_slot(self) -> int:
        """A slot that always reads as zero."""
        return self._null_slot

    def layer(self, index: int) -> LayerPool:
        """The pool of a layer that has been written."""
        return self._layers[index]

    def prepare(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Make the pool of a layer from the shape, dtype and device of its first K/V; True if it is new.

        Args:
            keys: [..., kv_heads, tokens, key_dim]; values likewise. K and V may differ in heads and head size.
        """
        if index in self._layers:
            return False
        self._layers[index] = LayerPool(self._empty(keys), self._empty(values))
        return True

    def block_bytes(self, index: int) -> int:
        """Bytes of one block of one layer, K and V."""
        pool = self._layers[index]
        return sum(t[0].numel() * t.element_size() for t in (pool.keys, pool.values)) * self.block_size

    def write(self, index: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write token i to slot ``slots[i]``.

        Args:
            slots: [tokens] int64, distinct, on the pool's device.
            keys: [tokens, kv_heads, key_dim]; values: [tokens, kv_heads, value_dim].
        """
        pool = self._layers[index]
        self._moves.write(pool.keys, pool.values, slots, keys, values)

    def copy(self, index: int, copies: BlockCopies) -> None:
        """Copy whole blocks of one layer. Sources are read before any target is written."""
        if len(copies.source) == 0:
            return
        pool = self._layers[index]
        source, target = torch.from_numpy(copies.source), torch.from_numpy(copies.target)
        for tensor in (pool.keys, pool.values):
            self._moves.copy(tensor, source.to(tensor.device), target.to(tensor.device), self.block_size)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        shape = (like.shape[-3], self._null_slot + 1, like.shape[-1])
        tensor = torch.empty(shape, dtype=self._dtype or like.dtype, device=like.device).transpose(0, 1)
        tensor[self._null_slot] = 0
        return tensor
