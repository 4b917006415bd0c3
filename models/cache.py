"""The cache plug-in: HF cache layers that hand their K/V to the forward pass in progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from branchkv.models.cross import CrossStore
from branchkv.models.handles import LazyKV

__all__ = ["CrossCache", "ForwardPass", "PagedCache"]


class ForwardPass(Protocol):
    """What one forward does with the K/V of a layer."""

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new K/V [rows, kv_heads, queries, head_dim]; return what the model's attention is to see."""

    def cached(self, layer: int) -> int:
        """Tokens before this forward, padding of the batch included."""

    def mask_sizes(self, layer: int, queries: int) -> tuple[int, int]:
        """(keys that the attention sees, position of the first one)."""


class PagedCache(Cache):
    """Looks like an HF cache of one layer per model layer; every call goes to the forward pass in progress."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.forward_pass: ForwardPass | None = None
        self._windows = list(windows)
        super().__init__(layers=[_PagedLayer(self, index, window) for index, window in enumerate(windows)])

    @contextmanager
    def during(self, forward_pass: ForwardPass) -> Iterator[None]:
        """Within, the cache belongs to ``forward_pass``."""
        self.forward_pass = forward_pass
        try:
            yield
        finally:
            self.forward_pass = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write through the block tables; may return lazy handles."""
        while layer_idx >= len(self.layers):  # some configs count the encoder's layers, not the decoder's
            self.layers.append(_PagedLayer(self, len(self.layers), self._windows[-1]))
        if self.forward_pass is None:
            raise RuntimeError("a branchkv cache can only be used inside a branchkv forward")
        return self.forward_pass.update(layer_idx, key_states, value_states)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refused: sequences are forked by the block manager, not by rows."""
        raise RuntimeError("a branchkv cache is reordered by its own decoding loop only")


class _PagedLayer(CacheLayerMixin):
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._index = index
        self.window = window
        self.is_sliding = window is not None

    @property
    def _pass(self) -> ForwardPass:
        if self._cache.forward_pass is None:
            raise RuntimeError("a branchkv cache can only be used inside a branchkv forward")
        return self._cache.forward_pass

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: pools are made by the block store."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pass.update(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._pass.cached(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._pass.mask_sizes(self._index, query_length)

    def get_max_length(self) -> int:
        return -1


class CrossCache(Cache):
    """Cross-attention K/V, written in the prefill, once per prompt; decoder rows read them through handles."""

    def __init__(self, store: CrossStore, layers: int) -> None:
        self._store = store
        super().__init__(layers=[_CrossLayer(store, index) for index in range(layers)])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the prefill's K/V [prompts, kv_heads, source tokens, head_dim]."""
        while layer_idx >= len(self.layers):
            self.layers.append(_CrossLayer(self._store, len(self.layers)))
        self._store.write(layer_idx, key_states, value_states)
        return key_states, value_states


class _CrossLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, store: CrossStore, index: int) -> None:
        self._store = store
        self._index = index
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def keys(self) -> LazyKV | None:
        return self._store.handle(self._index, 0)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        """CacheLayerMixin initialises the attribute; there is nothing to set."""

    @property
    def values(self) -> LazyKV | None:
        return self._store.handle(self._index, 1)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        """CacheLayerMixin initialises the attribute; there is nothing to set."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._store.write(self._index, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._store.length(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        return -1
