"""The CPU implementation: gather the rows' K/V, then batched products over all rows at once."""

from __future__ import annotations

import torch

from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan

__all__ = ["torch_attention"]


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
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys = key_pool[plan.slots].to(query.dtype).transpose(1, 2)  # [rows, kv_heads, width, key_dim]
    values = value_pool[plan.slots].to(query.dtype).transpose(1, 2)
    grouped = query.view(rows, kv_heads, heads // kv_heads, key_dim) * options.scale
    scores = (grouped @ keys.transpose(-1, -2)).to(wide)  # [rows, kv_heads, group, width]
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.bias is not None:
        bias = options.bias.expand(-1, heads, 1, -1)[..., options.bias.shape[-1] - plan.width :]
        scores = scores + bias.reshape(bias.shape[0], kv_heads, heads // kv_heads, plan.width)
    if plan.ragged:
        scores = scores.masked_fill(plan.padding()[:, None, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks.to(wide).view(1, kv_heads, -1, 1))
    out = torch.exp(scores - lse).to(query.dtype) @ values
    return out.reshape(rows, heads, -1), lse.reshape(rows, heads)
