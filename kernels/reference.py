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
    """See ``branchkv.kernels.attention.attention``."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads, kv_heads = query.shape[1], key_pool.shape[1]
    outputs, lses = [], []
    for row in range(plan.rows):
        slots = _slots(plan, row, len(key_pool))
        keys = key_pool[slots].to(wide).repeat_interleave(heads // kv_heads, dim=1)  # [tokens, heads, key_dim]
        values = value_pool[slots].to(wide).repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("hd,thd->ht", query[row].to(wide), keys) * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if options.bias is not None:
            bias = options.bias.expand(plan.rows, heads, 1, -1)[row, :, 0]
            scores = scores + bias[:, bias.shape[-1] - len(slots) :].to(wide)
        logits = scores if options.sinks is None else torch.cat([scores, options.sinks.to(wide)[:, None]], dim=-1)
        lse = torch.logsumexp(logits, dim=-1)
        outputs.append(torch.einsum("ht,thd->hd", torch.exp(scores - lse[:, None]), values))
        lses.append(lse)
    return torch.stack(outputs).to(query.dtype), torch.stack(lses)


def _slots(plan: AttentionPlan, row: int, pool: int) -> torch.Tensor:
    """Slots of every token that a row sees, oldest first."""
    every = torch.arange(pool, device=plan.own.slots.device)
    runs = [run for run in plan.runs if run.rows.start <= row < run.rows.stop]
    parts = [every[run.slots] if isinstance(run.slots, slice) else run.slots for run in runs]
    return torch.cat([*parts, plan.own.slots[row, int(plan.own.starts[row]) :]])
