"""The CPU implementation: brings rows into the plan's order, then plain softmax or one with options."""

from __future__ import annotations

import torch

from branchkv.kernels.cpu_layout import CPULayout, CPURun
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan
from branchkv.kernels.torch_merged import merged_attention
from branchkv.kernels.torch_own import own_scores, own_values

__all__ = ["torch_attention"]


def torch_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``branchkv.kernels.attention.attention``.

    Rows are in the plan's sorted order, so the rows of a run are a slice, and a run in one piece of memory is read
    where it lies. Plain softmax leaves runs to torch's fused kernel, see ``torch_merged.py``; with options that change
    scores, every token that a row reads has one column of [kv_heads, rows * group, columns] and there is one softmax
    over all of them.
    """
    rows, heads, key_dim = query.shape
    kv_heads = key_pool.shape[1]
    group = heads // kv_heads
    layout = plan.cpu_layout
    ordered = query if layout.order is None else query.index_select(0, layout.order)
    folded = ordered.view(rows, kv_heads, group, key_dim).transpose(0, 1).contiguous()
    folded = folded.view(kv_heads, rows * group, key_dim)
    keys, values = key_pool.transpose(0, 1), value_pool.transpose(0, 1)  # [kv_heads, slots, dim]
    plain = options.softcap is None and options.bias is None and options.alibi_slopes is None
    if plain and layout.whole and key_dim == value_pool.shape[2] and query.device.type == "cpu":
        out, lse = merged_attention(folded, keys, values, layout, plan.cpu_batches, options)
        out = out.to(query.dtype)
    else:
        out, lse = _in_one_softmax(folded, keys, values, layout, options)
    out = out.view(kv_heads, rows, group, -1).transpose(0, 1).reshape(rows, heads, -1)
    lse = lse.view(kv_heads, rows, group).transpose(0, 1).reshape(rows, heads)
    if layout.place is None:
        return out, lse
    return out.index_select(0, layout.place), lse.index_select(0, layout.place)


def _in_one_softmax(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: CPULayout, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [kv_heads, rows, group, value_dim] and LSE [kv_heads, rows, group] of folded queries."""
    kv_heads, packed, _ = query.shape
    rows = len(layout.lengths)
    scores = _scores(query, keys, layout, options.scale).view(kv_heads, rows, packed // rows, -1)
    weights, lse = _softmax(_options(scores, layout, options), options.sinks)
    weights = weights.to(query.dtype).view(kv_heads, packed, -1)
    return _values(weights, values, layout, rows).view(kv_heads, rows, packed // rows, -1), lse


def _scores(query: torch.Tensor, keys: torch.Tensor, layout: CPULayout, scale: float) -> torch.Tensor:
    """[kv_heads, rows * group, columns] in float32 at least; masked afterwards where a row reads nothing."""
    kv_heads, packed, _ = query.shape
    rows, every = len(layout.lengths), layout.shared + layout.own
    group, wide = packed // rows, torch.promote_types(query.dtype, torch.float32)
    partly = any(run.rows.stop - run.rows.start < rows for run in layout.runs)
    scores = (query.new_zeros if partly else query.new_empty)((kv_heads, packed, every), dtype=wide)
    for run in layout.runs:
        part = slice(run.rows.start * group, run.rows.stop * group)
        run_keys = _run(keys, run, query.dtype)
        target = scores[:, part, run.column : run.column + run.tokens]
        # Scaled afterwards: a scaled query would be rounded once more.
        torch.mul(torch.bmm(query[:, part], run_keys.transpose(1, 2)).to(wide), scale, out=target)
    if layout.own:
        own_scores(query, keys, layout, scale, scores.view(kv_heads, rows, group, every)[..., layout.shared :])
    return scores


def _values(weights: torch.Tensor, values: torch.Tensor, layout: CPULayout, rows: int) -> torch.Tensor:
    """[kv_heads, rows * group, value_dim]."""
    kv_heads, packed, every = weights.shape
    group = packed // rows
    if layout.own:
        out = own_values(weights.view(kv_heads, rows, group, every)[..., layout.shared :], values, layout)
    else:
        out = weights.new_zeros((kv_heads, packed, values.shape[2]))
    for run in layout.runs:
        part = slice(run.rows.start * group, run.rows.stop * group)
        columns = slice(run.column, run.column + run.tokens)
        out[:, part].baddbmm_(weights[:, part, columns], _run(values, run, weights.dtype))
    return out


def _options(scores: torch.Tensor, layout: CPULayout, options: AttentionOptions) -> torch.Tensor:
    """Everything that changes scores [kv_heads, rows, group, columns] before the softmax."""
    kv_heads, rows, group, columns = scores.shape
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.bias is not None:
        bias = options.bias[(None,) * (4 - options.bias.ndim)][:, :, 0]
        bias = bias.expand(rows, kv_heads * group, -1)
        if layout.order is not None:
            bias = bias.index_select(0, layout.order)
        index = (bias.shape[2] - layout.from_end)[:, None].expand(rows, kv_heads * group, columns)
        added = bias.gather(2, index).view(rows, kv_heads, group, columns).transpose(0, 1)
        scores = scores + added.to(scores.dtype)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(scores.dtype).view(kv_heads, 1, group, 1)
        scores = scores + slopes * layout.distance[None, :, None].to(scores.dtype)
    if layout.unread is not None:
        scores = scores.masked_fill(layout.unread[None, :, None], float("-inf"))
    return scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension of [kv_heads, rows, group, columns], and the log-sum-exp; sinks in both.

    The LSE is read off the largest score and its weight, which spares a pass of exponentials; that weight is at least
    1 / n, so nothing is lost. A row whose bias leaves it nothing gets 0, with an LSE of -inf.
    """
    weights, top = scores.softmax(dim=-1), scores.amax(dim=-1)
    nothing = top == -torch.inf
    lse = (top - weights.amax(dim=-1).log()).masked_fill_(nothing, -torch.inf)
    if bool(nothing.any()):
        weights = weights.masked_fill(nothing[..., None], 0.0)
    if sinks is None:
        return weights, lse
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype).view(lse.shape[0], 1, lse.shape[2]))
    return weights * torch.exp(lse - with_sink).unsqueeze(-1), with_sink


def _run(pool: torch.Tensor, run: CPURun, dtype: torch.dtype) -> torch.Tensor:
    """[kv_heads, tokens, dim]: a view of the pool where the run is in one piece."""
    if isinstance(run.slots, slice):
        return pool[:, run.slots].to(dtype)
    return pool.index_select(1, run.slots).to(dtype)
