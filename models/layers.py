"""Which layers a model has, and into which kinds they fall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

__all__ = ["LayerPlan", "plan_layers"]

FULL = "full"


@dataclass(frozen=True)
class LayerPlan:
    """The kinds of a model's decoder layers.

    Attributes:
        kinds: kind of each layer; layers of one kind share tables and pool.
        windows: sliding window of each kind, None for full attention.
        unsupported: HF's class of the first layer that a paged cache cannot hold, or None.
        masked: whether some layers are restricted by their mask only (chunked attention).
    """

    kinds: tuple[str, ...]
    windows: dict[str, int | None]
    unsupported: str | None
    masked: bool


def plan_layers(model: Any) -> LayerPlan:
    """Read the layer kinds off HF's own DynamicCache for the model's text decoder."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or ()
    chunked = "chunked_attention" in types or (not types and getattr(config, "attention_chunk_size", None) is not None)
    kinds: list[str] = []
    windows: dict[str, int | None] = {}
    unsupported = None
    for index, layer in enumerate(DynamicCache(config=config).layers):
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        if chunked and (not types or types[index] == "chunked_attention"):
            window = None  # HF's chunked layer is a sliding one; what a query sees is in its mask
        if type(layer).__name__ != "DummyLayer" and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            unsupported = unsupported or type(layer).__name__
        kind = FULL if window is None else f"window-{window}"
        kinds.append(kind)
        if type(layer).__name__ != "DummyLayer":
            windows[kind] = window
    return LayerPlan(tuple(kinds or (FULL,)), windows or {FULL: None}, unsupported, chunked)
