"""The K/V tensors of a call: one storage per layer kind, made when the first layer of the kind is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from branchkv.paged_cache.manager import CacheManager
from branchkv.paged_cache.storage import KVStorage, LayerPool, Moves
from branchkv.paged_cache.views import BlockCopies

__all__ = ["BlockStore"]


class BlockStore:
    """Writes and reads K/V of all layers by slot.

    Args:
        manager: told how many bytes a block takes as soon as that is known, so that it can refuse.
        kinds: layer kind of each layer.
        worst_case: per kind, the most blocks the call can ever hold; storage is reserved for no more.
        dtype: stored dtype, None for the model's.
        moves: how K/V are written and copied; None for torch's indexing.
    """

    def __init__(
        self,
        manager: CacheManager,
        kinds: Sequence[str],
        worst_case: Mapping[str, int],
        dtype: torch.dtype | None,
        moves: Moves | None = None,
    ) -> None:
        self._manager = manager
        self._kinds = list(kinds)
        self._worst_case = worst_case
        self._dtype = dtype
        self._moves = moves
        self._storages: dict[str, KVStorage] = {}
        self._layer_bytes: dict[str, dict[int, int]] = {}

    def kind(self, layer: int) -> str:
        """The kind of a layer. Models may have more layers than their config says; those are of the last kind."""
        return self._kinds[min(layer, len(self._kinds) - 1)]

    def pool(self, layer: int) -> LayerPool:
        """The tensors of a layer that has been written."""
        return self._storages[self.kind(layer)].layer(layer)

    def null_slot(self, kind: str) -> int:
        """The slot of ``kind`` that reads as zero."""
        return self._storages[kind].null_slot

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, copies: BlockCopies
    ) -> None:
        """Run the layer's block copies, then write its new tokens.

        Args:
            keys: [tokens, kv_heads, key_dim]; values: [tokens, kv_heads, value_dim].
            slots: [tokens] int64 on the keys' device.

        Raises:
            OutOfBlocksError: the blocks held already need more bytes than the budget has.
        """
        kind = self.kind(layer)
        if layer not in self._layer_bytes.setdefault(kind, {}):
            self._measure(kind, layer, keys, values)
        storage = self._storages[kind]
        storage.prepare(layer, keys.transpose(0, 1), values.transpose(0, 1))
        storage.copy(layer, copies)
        storage.write(layer, slots, keys, values)

    def _measure(self, kind: str, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """State the bytes of a block of ``kind``: exact for the layers seen, their mean for those still to come."""
        width = sum(t[0].numel() * (self._dtype or t.dtype).itemsize for t in (keys, values))
        seen = self._layer_bytes[kind]
        seen[layer] = width * self._manager.block_size
        layers = max(self._kinds.count(kind), len(seen))
        self._manager.set_block_bytes(kind, sum(seen.values()) * layers // len(seen))
        if kind not in self._storages:
            room = self._manager.budget.room(kind)
            capacity = self._worst_case[kind] if room is None else min(room, self._worst_case[kind])
            self._manager.set_capacity(kind, capacity)
            self._storages[kind] = KVStorage(self._manager.block_size, capacity, self._dtype, self._moves)
