"""Attention over dense K/V with every option of AttentionOptions: for prompts and cross-attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from branchkv.kernels.options import AttentionOptions

__all__ = ["causal_attention", "causal_mask", "dense_attention"]

# Queries per product where a mask has to be written out, so that a long prompt does not need a square of memory.
CHUNK = 512


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every query over all keys.

    Args:
        query: [rows, query_heads, queries, key_dim].
        key: [rows, kv_heads, keys, key_dim]; value: [rows, kv_heads, keys, value_dim]. ``query_heads`` is a multiple
            of ``kv_heads``.
        mask: broadcastable to [rows, query_heads, queries, keys]; bool (True: may be seen) or additive.

    Returns:
        [rows, query_heads, queries, value_dim] in the dtype of ``query``. Softmax is in float32 (float64 for float64).
    """
    if options.softcap is None and options.sinks is None:
        bias = _additive(mask, query.dtype) if options.bias is not None else mask
        if options.bias is not None:
            bias = options.bias.to(query.dtype) if bias is None else bias + options.bias.to(query.dtype)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=options.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    rows, heads, queries, _ = query.shape
    group = heads // key.shape[1]
    folded = query.reshape(rows, key.shape[1], group * queries, -1)
    scores = (folded @ key.transpose(-1, -2)).view(rows, heads, queries, -1).to(_wide(query.dtype)) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    for term in (options.bias, _additive(mask, scores.dtype)):
        if term is not None:
            scores = scores + term
    weights = softmax_with_sink(scores, options.sinks).to(query.dtype)
    out = weights.view(rows, key.shape[1], group * queries, -1) @ value
    return out.view(rows, heads, queries, -1)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions, window: int | None
) -> torch.Tensor:
    """Attention within one prompt: each query sees the keys up to its own, at most ``window`` of them.

    Args:
        query: [rows, query_heads, tokens, key_dim]; key and value: [rows, kv_heads, tokens, dim].
        options: without a bias.
        window: None for all keys.

    Returns:
        [rows, query_heads, tokens, value_dim].
    """
    tokens = query.shape[2]
    if options.softcap is None and options.sinks is None and (window is None or window >= tokens):
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=tokens > 1, scale=options.scale, enable_gqa=grouped
        )
    parts = []
    for start in range(0, tokens, CHUNK):
        stop = min(start + CHUNK, tokens)
        first = 0 if window is None else max(0, start - window + 1)
        mask = causal_mask(stop - start, stop - first, window, query.device)
        seen = slice(first, stop)
        parts.append(dense_attention(query[:, :, start:stop], key[:, :, seen], value[:, :, seen], options, mask))
    return torch.cat(parts, dim=2)


def softmax_with_sink(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension of [rows, heads, queries, keys], with one more logit per head that is dropped."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[queries, keys] bool, True where the query may see the key; the last query stands at the last key."""
    distance = torch.arange(queries, device=device)[:, None] + (keys - queries) - torch.arange(keys, device=device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
