"""A tensor that stands for K or V in the blocks and is gathered only when somebody computes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["KVSource", "LazyKV"]


class KVSource(Protocol):
    """Where the K or V of one layer can be read in this forward."""

    def gather(self) -> torch.Tensor:
        """The dense tensor [rows, kv_heads, keys, head_dim], contiguous."""


class LazyKV(torch.Tensor):
    """Has the shape, dtype and device of the dense K or V, but no data.

    Attention functions that know the handle read ``source``; for every other operation the dense tensor is gathered
    first, once, so that any model code works.
    """

    source: KVSource
    _dense: torch.Tensor | None

    @staticmethod
    def __new__(cls, source: KVSource, shape: tuple[int, ...], like: torch.Tensor) -> LazyKV:
        """A handle of ``shape`` with the dtype and device of ``like``."""
        handle: LazyKV = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        handle.source = source
        handle._dense = None
        return handle

    def dense(self) -> torch.Tensor:
        """The gathered tensor."""
        if self._dense is None:
            self._dense = self.source.gather()
        return self._dense

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        args, kwargs = tree_map_only(LazyKV, LazyKV.dense, (args, kwargs or {}))
        return func(*args, **kwargs)
