"""From what HF prepared to clean prompts: not expanded, left-padded, none empty."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils.generic import ModelOutput

from branchkv.errors import UnsupportedOptionError

__all__ = ["clean_prompts", "unexpand"]

_MULTIMODAL = ("pixel_values", "pixel_values_videos", "image_embeds", "input_features", "mm_encoder_outputs", "images")


def unexpand(input_ids: torch.Tensor, kwargs: dict[str, Any], copies: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Undo HF's expansion to ``copies`` rows per prompt (num_beams or num_return_sequences).

    Raises:
        UnsupportedOptionError: multimodal inputs, whose expansion cannot be undone row by row.
    """
    if copies == 1:
        return input_ids, kwargs
    for name in _MULTIMODAL:
        if kwargs.get(name) is not None:
            raise UnsupportedOptionError(
                f"custom_generate=branchkv.decode with {name}", "call branchkv.generate(model, ...) instead"
            )
    plain = {name: _every(value, copies, 1 if name == "position_ids" else 0) for name, value in kwargs.items()}
    return input_ids[::copies], plain


def clean_prompts(
    input_ids: torch.Tensor, kwargs: dict[str, Any], bos: int | None
) -> tuple[torch.Tensor, tuple[int, ...], dict[str, Any]]:
    """Left-pad every prompt of a decoder-only model and give empty ones a BOS.

    Positions count real tokens only, so a token that the mask hides is as good as absent and is taken out; right
    padding becomes left padding.

    Args:
        input_ids: [prompts, tokens].
        kwargs: HF's model kwargs; ``attention_mask`` [prompts, tokens] or None.
        bos: the model's BOS, None if it has none.

    Returns:
        ids, real tokens per prompt, and kwargs with the tensors of the same shape as the ids treated likewise.

    Raises:
        ValueError: an empty prompt and no BOS; names the row.
    """
    mask = kwargs.get("attention_mask")
    width = input_ids.shape[1] or (kwargs["inputs_embeds"].shape[1] if kwargs.get("inputs_embeds") is not None else 0)
    if mask is None or mask.ndim != 2 or mask.shape != (len(input_ids), width):
        return input_ids, (width,) * len(input_ids), kwargs
    real = mask.bool()
    lengths = real.sum(1)
    left_padded = bool((real == (torch.arange(width, device=mask.device) >= (width - lengths)[:, None])).all())
    if not left_padded or not lengths.all():
        if input_ids.shape[1] == 0:
            raise ValueError("attention_mask: expected left padding only with inputs_embeds, and no empty row")
        # A stable sort by the mask moves hidden tokens to the left and keeps the order of the others.
        order = real.long().argsort(dim=1, stable=True)
        kwargs = {
            name: value.gather(1, order)
            if isinstance(value, torch.Tensor) and value.shape == input_ids.shape
            else value
            for name, value in kwargs.items()
        }
        input_ids = input_ids.gather(1, order)
        input_ids, kwargs = _fill_empty(input_ids, kwargs, lengths, bos)
    return input_ids, tuple(lengths.clamp(min=1).tolist()), kwargs


def _fill_empty(
    input_ids: torch.Tensor, kwargs: dict[str, Any], lengths: torch.Tensor, bos: int | None
) -> tuple[torch.Tensor, dict[str, Any]]:
    empty = lengths == 0
    if not empty.any():
        return input_ids, kwargs
    if bos is None:
        row = int(empty.nonzero()[0])
        raise ValueError(f"input_ids: prompt {row} is empty and the model has no bos_token_id to start it with")
    input_ids = input_ids.clone()
    input_ids[empty, -1] = bos
    mask = kwargs["attention_mask"].clone()
    mask[empty, -1] = 1
    kwargs = dict(kwargs, attention_mask=mask)
    if kwargs.get("position_ids") is not None and kwargs["position_ids"].shape == input_ids.shape:
        kwargs["position_ids"] = kwargs["position_ids"].masked_fill(empty[:, None], 0)
    return input_ids, kwargs


def _every(value: Any, copies: int, dim_if_3d: int) -> Any:
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _every(part, copies, 0) for name, part in value.items()})
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    return value[:, ::copies] if value.ndim == 3 and dim_if_3d == 1 else value[::copies]
