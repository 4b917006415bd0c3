"""The eager oracle: one row at a time, in the order of the formula. Slow, readable, runs in any dtype."""

from __future__ import annotations

import torch

from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan

__all__ = ["reference_attention"]


def reference_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``branchkv.kernels.attention.attention``. Reads tables and lengths only, nothing that decides on sharing."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads, kv_heads = query.shape[1], key_pool.shape[1]
    outputs, lses = [], []
    for row in range(plan.rows):
        positions = _positions(plan, row, query.device)
        table = plan.tables[plan.sequence[row]].long()
        slots = table[positions // plan.block_size] * plan.block_size + positions % plan.block_size
        keys = key_pool[slots].to(wide).repeat_interleave(heads // kv_heads, dim=1)  # [tokens, heads, key_dim]
        values = value_pool[slots].to(wide).repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("hd,thd->ht", query[row].to(wide), keys) * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if options.bias is not None:
            bias = options.bias[(None,) * (4 - options.bias.ndim)].expand(plan.rows, heads, 1, -1)[row, :, 0]
            scores = scores + bias[:, bias.shape[-1] - int(plan.ends[row]) + positions].to(wide)
        if options.alibi_slopes is not None:
            distance = positions - (int(plan.lengths[row]) - 1)
            scores = scores + options.alibi_slopes.to(wide)[:, None] * distance.to(wide)
        logits = scores if options.sinks is None else torch.cat([scores, options.sinks.to(wide)[:, None]], dim=-1)
        lse = torch.logsumexp(logits, dim=-1)
        weights = torch.softmax(logits, dim=-1)[:, : len(positions)]
        weights = weights.masked_fill(lse[:, None] == -torch.inf, 0.0)  # a bias may leave a row nothing
        outputs.append(torch.einsum("ht,thd->hd", weights, values))
        lses.append(lse)
    return torch.stack(outputs).to(query.dtype), torch.stack(lses)


def _positions(plan: AttentionPlan, row: int, device: torch.device) -> torch.Tensor:
    """Positions that a row sees, oldest first."""
    length = int(plan.lengths[row])
    first = 0 if plan.window is None else max(0, length - plan.window)
    return torch.arange(first, length, device=device)
