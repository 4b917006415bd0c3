"""The CPU implementation: shared runs as one product over all their rows, the rest gathered; one softmax over both."""

from __future__ import annotations

import torch

from branchkv.kernels.cpu_layout import CPULayout, CPURun
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
    """See ``branchkv.kernels.attention.attention``.

    Rows are in the plan's sorted order, so the rows of a run are a slice, and a run in one piece of memory is read
    where it lies. Plain softmax goes run by run through torch's fused kernel, merged by log-sum-exp; with options that
    change scores, every token that a row reads has one column of [kv_heads, rows * group, columns] and there is one
    softmax over all of them.
    """
    rows, heads, key_dim = query.shape
    kv_heads = key_pool.shape[1]
    group = heads // kv_heads
    layout = plan.cpu_layout
    ordered = query if layout.order is None else query.index_select(0, layout.order)
    folded = (ordered * options.scale).view(rows, kv_heads, group, key_dim).transpose(0, 1)
    folded = folded.reshape(kv_heads, rows * group, key_dim)
    keys, values = key_pool.transpose(0, 1), value_pool.transpose(0, 1)  # [kv_heads, slots, dim]
    plain = options.softcap is None and options.bias is None and options.alibi_slopes is None
    if layout.runs and layout.whole and plain and key_dim == value_pool.shape[2] and query.device.type == "cpu":
        out, lse = _merged(folded, keys, values, layout, options.sinks)
    else:
        out, lse = _in_one_softmax(folded, keys, values, layout, options)
    out = out.transpose(0, 1).reshape(rows, heads, -1)
    lse = lse.transpose(0, 1).reshape(rows, heads)
    if layout.order is None:
        return out, lse
    return torch.empty_like(out).index_copy_(0, layout.order, out), torch.empty_like(lse).index_copy_(
        0, layout.order, lse
    )


def _in_one_softmax(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: CPULayout, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [kv_heads, rows, group, value_dim] and LSE [kv_heads, rows, group] of folded queries."""
    kv_heads, packed, _ = query.shape
    rows = len(layout.lengths)
    scores = _scores(query, keys, layout, rows)
    wide = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
    wide = _options(wide.view(kv_heads, rows, packed // rows, -1), layout, options)
    weights, lse = _softmax(wide, options.sinks)
    weights = weights.to(query.dtype).view(kv_heads, packed, -1)
    return _values(weights, values, layout, rows).view(kv_heads, rows, packed // rows, -1), lse


def _merged(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: CPULayout, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``_in_one_softmax``, without options that change scores; partial results are in float32 at least."""
    kv_heads, packed, dim = query.shape
    rows, wide = len(layout.lengths), torch.promote_types(query.dtype, torch.float32)
    group = packed // rows
    out, lse = _tail(query.view(kv_heads, rows, group, dim), keys, values, layout, wide)
    for run in layout.runs:
        part = slice(run.rows.start * group, run.rows.stop * group)
        run_keys, run_values = _run(keys, run, query.dtype), _run(values, run, query.dtype)
        # SDPA's own kernel: the public function does not return the LSE. Queries are scaled already.
        run_out, run_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None, :, part], run_keys[None], run_values[None], scale=1.0
        )
        run_out = run_out[0].to(wide).view(kv_heads, -1, group, dim)
        run_lse = run_lse.reshape(kv_heads, -1, group).to(wide)
        mine, before = out[:, run.rows], lse[:, run.rows]
        both = torch.logaddexp(before, run_lse)
        mine.mul_((before - both).exp_()[..., None]).addcmul_(run_out, (run_lse - both).exp_()[..., None])
        before.copy_(both)
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.to(wide).view(kv_heads, 1, group))
        out, lse = out * torch.exp(lse - with_sink)[..., None], with_sink
    return out.to(query.dtype), lse


def _tail(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: CPULayout, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' own tokens: 0 with an LSE of -inf for a row without. ``query`` is [kv_heads, rows, group, dim]."""
    if not layout.tail.shape[1]:
        shape = query.shape[:3]
        return query.new_zeros((*shape, values.shape[2]), dtype=wide), query.new_full(shape, -torch.inf, dtype=wide)
    scores = (query @ _gather(keys, layout.tail, query.dtype).transpose(2, 3)).to(wide)
    if layout.unread_tail is not None:
        scores = scores.masked_fill_(layout.unread_tail[None, :, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.clamp(min=torch.finfo(wide).min)[..., None]).exp_()
    return (weights.to(query.dtype) @ _gather(values, layout.tail, query.dtype)).to(wide), lse


def _scores(query: torch.Tensor, keys: torch.Tensor, layout: CPULayout, rows: int) -> torch.Tensor:
    """[kv_heads, rows * group, columns]; what stands where a row reads nothing is masked afterwards."""
    kv_heads, packed, _ = query.shape
    group, width = packed // rows, layout.tail.shape[1]
    every = layout.shared + width
    partly = any(run.rows.stop - run.rows.start < rows for run in layout.runs)
    scores = (query.new_zeros if partly else query.new_empty)((kv_heads, packed, every))
    for run in layout.runs:
        part = slice(run.rows.start * group, run.rows.stop * group)
        run_keys = _run(keys, run, query.dtype)
        target = scores[:, part, run.column : run.column + run.tokens]
        torch.bmm(query[:, part], run_keys.transpose(1, 2), out=target)
    if width:
        own = _gather(keys, layout.tail, query.dtype)  # [kv_heads, rows, width, key_dim]
        product = query.view(kv_heads, rows, group, -1) @ own.transpose(2, 3)
        scores.view(kv_heads, rows, group, every)[..., layout.shared :] = product
    return scores


def _values(weights: torch.Tensor, values: torch.Tensor, layout: CPULayout, rows: int) -> torch.Tensor:
    """[kv_heads, rows * group, value_dim]."""
    kv_heads, packed, every = weights.shape
    group = packed // rows
    if layout.tail.shape[1]:
        own = _gather(values, layout.tail, weights.dtype)
        out = weights.view(kv_heads, rows, group, every)[..., layout.shared :] @ own
        out = out.view(kv_heads, packed, -1)
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
    1 / n, so nothing is lost.
    """
    weights = scores.softmax(dim=-1)
    lse = scores.amax(dim=-1) - weights.amax(dim=-1).log()
    if sinks is None:
        return weights, lse
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype).view(lse.shape[0], 1, lse.shape[2]))
    return weights * torch.exp(lse - with_sink).unsqueeze(-1), with_sink


def _run(pool: torch.Tensor, run: CPURun, dtype: torch.dtype) -> torch.Tensor:
    """[kv_heads, tokens, dim]: a view of the pool where the run is in one piece."""
    if isinstance(run.slots, slice):
        return pool[:, run.slots].to(dtype)
    return pool.index_select(1, run.slots).to(dtype)


def _gather(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[kv_heads, rows, width, dim]; index_select is more than twice as fast as indexing with a matrix."""
    gathered: torch.Tensor = pool.index_select(1, slots.flatten()).unflatten(1, slots.shape).to(dtype)
    return gathered
