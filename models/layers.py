"""Which layers a model has, and into which kinds they fall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs

__all__ = ["LayerPlan", "plan_layers"]

FULL = "full"


@dataclass(frozen=True)
class LayerPlan:
    """The kinds of a model's decoder layers.

    Attributes:
        kinds: kind of each layer; layers of one kind share tables and pool.
        windows: sliding window of each kind, None for full attention.
        unsupported: the first layer type that a paged cache cannot hold, or None.
        masked: whether some layers are restricted by their mask only (chunked attention).
    """

    kinds: tuple[str, ...]
    windows: dict[str, int | None]
    unsupported: str | None
    masked: bool


def plan_layers(model: Any) -> LayerPlan:
    """Read the layer kinds off the model's text decoder config, as HF's own DynamicCache does."""
    config = model.config.get_text_config(decoder=True)
    types, kwargs = get_layer_types_and_kwargs(config)
    kinds: list[str] = []
    windows: dict[str, int | None] = {}
    unsupported = None
    for layer_type, layer_kwargs in zip(types, kwargs, strict=True):
        window = layer_kwargs.get("sliding_window") if layer_type == "sliding_attention" else None
        if layer_type not in ("full_attention", "sliding_attention", "chunked_attention", "dummy"):
            unsupported = unsupported or layer_type
        kind = FULL if window is None else f"window-{window}"
        kinds.append(kind)
        if layer_type != "dummy":
            windows[kind] = window
    return LayerPlan(tuple(kinds), windows or {FULL: None}, unsupported, "chunked_attention" in types)
