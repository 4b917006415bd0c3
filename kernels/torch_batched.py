"""The CPU implementation: shared runs as one product over all their rows, the rest gathered and batched."""

from __future__ import annotations

import torch

from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan, RowSlots, SharedRun

__all__ = ["torch_attention"]

Partial = tuple[
    torch.Tensor, torch.Tensor
]  # output [rows, kv_heads, group, value_dim], its LSE [rows, kv_heads, group]


def torch_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``branchkv.kernels.attention.attention``."""
    rows, heads, key_dim = query.shape
    kv_heads = key_pool.shape[1]
    grouped = query.view(rows, kv_heads, heads // kv_heads, key_dim)
    bias = None
    if options.bias is not None:
        bias = options.bias[(None,) * (4 - options.bias.ndim)].expand(-1, heads, 1, -1)
        bias = bias.reshape(bias.shape[0], kv_heads, heads // kv_heads, -1)
    out, lse = _own_part(grouped, key_pool, value_pool, plan.own, options, bias)
    for run in plan.runs:
        part = _run_part(grouped[run.rows], key_pool, value_pool, run, options, bias)
        out[run.rows], lse[run.rows] = _merge((out[run.rows], lse[run.rows]), part)
    if options.sinks is not None:
        with_sink = torch.logaddexp(lse, options.sinks.to(lse.dtype).view(1, kv_heads, -1))
        out = out * torch.exp(lse - with_sink).unsqueeze(-1).to(out.dtype)
        lse = with_sink
    return out.to(query.dtype).reshape(rows, heads, -1), lse.reshape(rows, heads)


def _own_part(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    own: RowSlots,
    options: AttentionOptions,
    bias: torch.Tensor | None,
) -> Partial:
    """Attention of each row over its own slots, gathered; query [rows, kv_heads, group, key_dim]."""
    keys = _gather(key_pool, own.slots).to(query.dtype).permute(0, 2, 3, 1)  # [rows, kv_heads, key_dim, width]
    values = _gather(value_pool, own.slots).to(query.dtype).transpose(1, 2)
    scores = _capped(query @ keys, options)
    if bias is not None:
        scores = scores + bias[..., bias.shape[-1] - own.width :]
    if own.ragged:
        scores = scores.masked_fill(own.padding()[:, None, None, :], float("-inf"))
    return _softmax(scores, values)


def _run_part(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    run: SharedRun,
    options: AttentionOptions,
    bias: torch.Tensor | None,
) -> Partial:
    """Attention of the run's rows over its tokens, each read once; query [run rows, kv_heads, group, key_dim]."""
    rows, kv_heads, group, key_dim = query.shape
    keys = key_pool[run.slots].to(query.dtype).permute(1, 2, 0)  # [kv_heads, key_dim, tokens]
    values = value_pool[run.slots].to(query.dtype).transpose(0, 1)
    folded = query.transpose(0, 1).reshape(kv_heads, rows * group, key_dim)
    scores = _capped(folded @ keys, options)
    if bias is not None:
        first = bias.shape[-1] - run.from_end
        part = bias[..., first : first + run.tokens].expand(-1, kv_heads, group, -1)
        part = part[run.rows] if part.shape[0] > 1 else part.expand(rows, -1, -1, -1)
        scores = scores + part.transpose(0, 1).reshape(scores.shape)
    out, lse = _softmax(scores, values)
    return out.view(kv_heads, rows, group, -1).transpose(0, 1), lse.view(kv_heads, rows, group).transpose(0, 1)


def _capped(scores: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    scores = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32) * options.scale
    return scores if options.softcap is None else torch.tanh(scores / options.softcap) * options.softcap


def _softmax(scores: torch.Tensor, values: torch.Tensor) -> Partial:
    """Softmax over the last dimension and the weighted sum of values, with the log-sum-exp.

    The LSE is read off the largest score and its weight, which spares a second pass of exponentials; that weight is at
    least 1 / n, so nothing is lost.
    """
    weights = scores.softmax(dim=-1)
    lse = scores.amax(dim=-1) - weights.amax(dim=-1).log()
    return weights.to(values.dtype) @ values, lse


def _merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of tokens, from the attention over each."""
    lse = torch.logaddexp(a[1], b[1])
    weight_a, weight_b = ((part[1] - lse).exp().unsqueeze(-1).to(a[0].dtype) for part in (a, b))
    return a[0] * weight_a + b[0] * weight_b, lse


def _gather(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[rows, width, kv_heads, dim]; index_select is more than twice as fast as indexing with a matrix."""
    gathered: torch.Tensor = pool.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    return gathered
