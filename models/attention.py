"""The attention and mask functions that HF calls while branchkv decodes.

They are registered under a name of their own for the time of one call and selected on the decoder's configs only;
whatever is not over the paged cache goes on to the implementation that the model had.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from branchkv.kernels.options import AttentionOptions
from branchkv.models.cross import CrossSource
from branchkv.models.handles import LazyKV

__all__ = ["AttentionRouter", "SelfSource"]

_SERIAL = itertools.count()
# Keywords that need no action: dropout is 0 in eval mode, positions are in the K/V, masks are in the block tables.
_IGNORED = frozenset(
    {"dropout", "position_ids", "use_cache", "output_router_logits", "is_causal", "return_dict"}
    | {"output_attentions", "output_hidden_states", "cache_position", "logits_to_keep", "num_items_in_batch"}
)
_KNOWN = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "position_bias"})


class SelfSource(Protocol):
    """Self-attention K or V of one layer in a forward."""

    def gather(self) -> torch.Tensor:
        """See ``KVSource.gather``."""

    def attend(self, query: torch.Tensor, options: AttentionOptions, window: int | None) -> torch.Tensor | None:
        """Attention of query [rows, query_heads, queries, key_dim] over the blocks: [rows, queries, heads, value_dim].

        None where this forward has to leave it to the model's own function. ``window`` is what the module asks for;
        the cache's own window holds as well.
        """


class AttentionRouter:
    """Routes attention calls of one model for the time of ``installed``.

    Args:
        model: the model.
        masks_needed: called before a mask is built; False where the forward in progress needs none.
    """

    def __init__(self, model: PreTrainedModel, masks_needed: Callable[[], bool]) -> None:
        self._model = model
        self._masks_needed = masks_needed
        self._originals: dict[int, str] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Select the router on the decoder's configs; restores them whatever happens."""
        name = f"branchkv_{next(_SERIAL)}"
        configs = [config for config in _decoder_configs(self._model) if config._attn_implementation is not None]
        self._originals = {id(config): config._attn_implementation for config in configs}
        AttentionInterface.register(name, self.attend)
        AttentionMaskInterface.register(name, self.mask)
        try:
            for config in configs:
                config._attn_implementation_internal = name
            yield
        finally:
            for config in configs:
                config._attn_implementation_internal = self._originals[id(config)]
            AttentionInterface._global_mapping.pop(name, None)
            AttentionMaskInterface._global_mapping.pop(name, None)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """HF's attention function: query [rows, heads, queries, dim] -> ([rows, queries, heads, dim], None)."""
        if isinstance(key, LazyKV) and isinstance(value, LazyKV):
            out = self._over_blocks(query, key, attention_mask, kwargs)
            if out is not None:
                return out, None
            key, value = key.dense(), value.dense()
        original = self._original(module)
        result: tuple[torch.Tensor, torch.Tensor | None] = original(module, query, key, value, attention_mask, **kwargs)
        return result

    def mask(self, **kwargs: Any) -> torch.Tensor | None:
        """HF's mask function: that of the model's own implementation, or None where no mask is needed."""
        if not self._masks_needed():
            return None
        mask: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[self._originals[id(kwargs["config"])]](**kwargs)
        return mask

    def _over_blocks(
        self, query: torch.Tensor, key: LazyKV, mask: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        unknown = {name for name, value in kwargs.items() if value is not None} - _IGNORED - _KNOWN
        if unknown or kwargs.get("output_attentions"):
            return None
        options = AttentionOptions(
            scale=kwargs["scaling"] if kwargs.get("scaling") is not None else query.shape[-1] ** -0.5,
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
            bias=kwargs.get("position_bias"),
        )
        source = key.source
        if isinstance(source, CrossSource):
            return source.store.attend(source.layer, query, mask, options) if query.shape[2] == 1 else None
        return source.attend(query, options, kwargs.get("sliding_window"))  # type: ignore[attr-defined, no-any-return]

    def _original(self, module: torch.nn.Module) -> Callable[..., Any]:
        name = self._originals[id(module.config)]
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        return function


def _decoder_configs(model: PreTrainedModel) -> list[Any]:
    """Configs of the submodels whose attention may be routed: all but the towers of other modalities."""
    text = model.config.get_text_config(decoder=True)
    towers = {
        id(config)
        for name in getattr(model.config, "sub_configs", {})
        if (config := getattr(model.config, name, None)) is not None and config is not text
    }
    submodels = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    found = {
        id(module.config): module.config
        for module in submodels
        if id(module.config) not in towers and module._can_set_attn_implementation()
    }
    return list(found.values())
