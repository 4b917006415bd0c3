"""Learned position tables: how long a sequence may be, checked before the first step."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["check_positions", "position_limit"]


def position_limit(model: Any) -> int | None:
    """Positions of the decoder's learned position table, None where it has none.

    Found by the table itself (an ``nn.Embedding`` called position, wpe, ...): configs state a maximum for models
    with rotary positions too, which run on past it.
    """
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Embedding) and re.search(r"(wpe|position|pos_emb)", name.rsplit(".", 1)[-1]):
            return int(module.num_embeddings) - int(getattr(module, "offset", 0))
    return None


def check_positions(limit: int | None, lengths: Sequence[int], limits: Sequence[int], least: int) -> None:
    """Refuse what cannot fit the position table, warn of what may not.

    Args:
        limit: entries of the table, None for no table.
        lengths: tokens of each prompt.
        limits: most new tokens of each prompt.
        least: fewest new tokens.

    Raises:
        ValueError: a prompt and ``least`` new tokens do not fit; names the prompt and the limit.
    """
    if limit is None:
        return
    for prompt, length in enumerate(lengths):
        if length + least - 1 > limit:  # the last generated token is never fed back
            raise ValueError(
                f"prompt {prompt}: {length} tokens and at least {least} new ones do not fit the model's position table "
                f"of {limit} entries; use a shorter prompt"
            )
    longest = max(length + most - 1 for length, most in zip(lengths, limits, strict=True))
    if longest > limit:
        warnings.warn(
            f"up to {longest} positions may be needed, the model's position table has {limit}; a sequence that gets "
            "that far ends the call with a ValueError",
            UserWarning,
            stacklevel=2,
        )
