"""What an attention layer may ask for beyond plain softmax attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionOptions"]


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one layer. Scores are ``softcap(scale * q @ k) + bias + alibi``, softmax over them and the sink.

    Attributes:
        scale: factor on the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None for no cap.
        sinks: [query_heads] one more logit per head that takes probability and has no value; None for none.
        bias: additive, broadcastable to [rows, query_heads, queries, keys], right-aligned with the keys; None for none.
        alibi_slopes: [query_heads] ALiBi (https://arxiv.org/abs/2108.12409): slope times the distance from the query
            to the key, 0 at the query itself and negative before, is added to the score; None for none.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
