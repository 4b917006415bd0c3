"""Which models are supported, and the error that says why one is not."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from branchkv.errors import UnsupportedModelError
from branchkv.models.layers import LayerPlan, plan_layers

__all__ = ["cache_argument", "check_model", "packs"]

_REASONS = {
    "mllama": "its image cross-attention lives in layers of the same cache",
    "rag": "it decodes through a generator of its own",
    "moshi": "it decodes two streams at once",
    "musicgen": "it decodes several codebooks at once",
    "musicgen_melody": "it decodes several codebooks at once",
    "dia": "it decodes several channels at once",
    "csm": "it decodes several codebooks at once",
}
# Inputs that the packed layout accounts for; any other one sends the call to the rectangular layout.
_PACKED_INPUTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}
)


def check_model(model: Any) -> LayerPlan:
    """The layer kinds of ``model``.

    Raises:
        UnsupportedModelError: names the model and why it cannot run.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(type(model).__name__, "it is not a transformers model with generate()")
    name = f"{type(model).__name__} (type {model.config.model_type!r})"
    if not model.can_generate():
        raise UnsupportedModelError(name, "it has no language modelling head, so it cannot generate")
    if model.config.model_type in _REASONS:
        raise UnsupportedModelError(name, _REASONS[model.config.model_type])
    generative: Any = model
    if not generative._supports_default_dynamic_cache():
        raise UnsupportedModelError(name, "it keeps its state in a cache of its own, not in HF's DynamicCache")
    if cache_argument(model) is None:
        raise UnsupportedModelError(name, "its forward takes no cache")
    plan = plan_layers(model)
    if plan.unsupported is not None:
        raise UnsupportedModelError(name, f"it has layers kept as {plan.unsupported}, whose state is not K/V per token")
    return plan


def cache_argument(model: Any) -> str | None:
    """Name of the forward's cache argument: ``cache`` since transformers 5.24, ``past_key_values`` before."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def packs(model: Any, plan: LayerPlan, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether the packed layout may be tried: attention through the interface, explicit positions, text inputs only."""
    parameters = inspect.signature(model.forward).parameters
    given = {name for name, value in model_kwargs.items() if value is not None}
    return (
        not model.config.is_encoder_decoder
        and bool(getattr(model, "_supports_attention_backend", False))
        and model._can_set_attn_implementation()
        and {"input_ids", "position_ids", "logits_to_keep"} <= parameters.keys()
        and not plan.masked
        and given <= _PACKED_INPUTS
        and model_kwargs.get("logits_to_keep", 1) == 1
        and input_ids.shape[1] > 0
        and _plain_positions(input_ids, model_kwargs)
    )


def _plain_positions(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether position ids are those that follow from the mask."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is None:
        return True
    if positions.shape != input_ids.shape:
        return False
    real = torch.ones_like(input_ids) if mask is None else mask.long()
    expected = real.cumsum(-1) - 1
    return bool(((positions == expected) | (real == 0)).all())
