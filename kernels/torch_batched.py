"""The CPU implementation: shared runs as one product over all their rows, the rest gathered; one softmax over both."""

from __future__ import annotations

import torch

from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan, SharedRun

__all__ = ["torch_attention"]


def torch_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``branchkv.kernels.attention.attention``.

    Scores are laid out as [rows, kv_heads, group, run tokens | own tokens]: a row is in at most one run, so one softmax
    serves both parts and nothing has to be merged afterwards.
    """
    rows, heads, key_dim = query.shape
    kv_heads = key_pool.shape[1]
    grouped = (query * options.scale).view(rows, kv_heads, heads // kv_heads, key_dim)
    own_keys = _gather(key_pool, plan.own.slots).to(query.dtype).permute(0, 2, 3, 1)
    own_scores = grouped @ own_keys  # [rows, kv_heads, group, own tokens]
    shared = max((run.tokens for run in plan.runs), default=0)
    scores = _with_runs(grouped, own_scores, key_pool, plan.runs, shared) if shared else own_scores
    scores = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.bias is not None:
        scores = scores + _bias(options.bias, plan, shared, scores.shape)
    unread = _unread(plan, shared)
    if unread is not None:
        scores = scores.masked_fill(unread[:, None, None, :], float("-inf"))
    weights, lse = _softmax(scores, options.sinks)
    weights = weights.to(query.dtype)
    own_values = _gather(value_pool, plan.own.slots).to(query.dtype).transpose(1, 2)
    out = weights[..., shared:] @ own_values
    for run in plan.runs:
        values = value_pool[run.slots].to(query.dtype).transpose(0, 1)  # [kv_heads, tokens, value_dim]
        out[run.rows] += _unfold(_fold(weights[run.rows, ..., : run.tokens]) @ values, run)
    return out.reshape(rows, heads, -1), lse.reshape(rows, heads)


def _with_runs(
    query: torch.Tensor, own: torch.Tensor, key_pool: torch.Tensor, runs: tuple[SharedRun, ...], shared: int
) -> torch.Tensor:
    """Scores of the runs in front of the rows' own; what stands where a row has no run is masked afterwards."""
    parts = [
        _unfold(_fold(query[run.rows]) @ key_pool[run.slots].to(query.dtype).permute(1, 2, 0), run) for run in runs
    ]
    if len(parts[0]) == len(own):
        return torch.cat([parts[0], own], dim=-1)
    scores = own.new_zeros((*own.shape[:3], shared + own.shape[3]))
    for run, part in zip(runs, parts, strict=True):
        scores[run.rows, ..., : run.tokens] = part
    scores[..., shared:] = own
    return scores


def _unread(plan: AttentionPlan, shared: int) -> torch.Tensor | None:
    """[rows, run tokens | own tokens] bool, True where a row reads nothing; None where every row reads everything."""
    whole = not plan.runs or plan.runs[0].rows.stop - plan.runs[0].rows.start == plan.rows
    if whole and not plan.own.ragged:
        return None
    unread = plan.own.slots.new_ones((plan.rows, shared + plan.own.width), dtype=torch.bool)
    for run in plan.runs:
        unread[run.rows, : run.tokens] = False
    unread[:, shared:] = plan.own.padding()
    return unread


def _fold(rows: torch.Tensor) -> torch.Tensor:
    """[rows, kv_heads, group, n] -> [kv_heads, rows * group, n]: all rows of a run in one product per KV head."""
    return rows.transpose(0, 1).flatten(1, 2)


def _unfold(folded: torch.Tensor, run: SharedRun) -> torch.Tensor:
    """The reverse of ``_fold``."""
    rows: torch.Tensor = folded.unflatten(1, (run.rows.stop - run.rows.start, -1)).transpose(0, 1)
    return rows


def _bias(bias: torch.Tensor, plan: AttentionPlan, shared: int, shape: torch.Size) -> torch.Tensor:
    """The bias in the layout of the scores [rows, kv_heads, group, run tokens | own tokens]."""
    rows, kv_heads, group, _ = shape
    bias = bias[(None,) * (4 - bias.ndim)].expand(-1, kv_heads * group, 1, -1)
    bias = bias.reshape(bias.shape[0], kv_heads, group, -1).expand(rows, -1, -1, -1)
    laid_out = bias.new_zeros(shape)
    laid_out[..., shared:] = bias[..., bias.shape[-1] - plan.own.width :]
    for run in plan.runs:
        first = bias.shape[-1] - run.from_end
        laid_out[run.rows, ..., : run.tokens] = bias[run.rows, ..., first : first + run.tokens]
    return laid_out


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension, and the log-sum-exp; with ``sinks`` one more logit per head in both.

    The LSE is read off the largest score and its weight, which spares a pass of exponentials; that weight is at least
    1 / n, so nothing is lost.
    """
    weights = scores.softmax(dim=-1)
    lse = scores.amax(dim=-1) - weights.amax(dim=-1).log()
    if sinks is None:
        return weights, lse
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, lse.shape[1], -1))
    return weights * torch.exp(lse - with_sink).unsqueeze(-1), with_sink


def _gather(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[rows, width, kv_heads, dim]; index_select is more than twice as fast as indexing with a matrix."""
    gathered: torch.Tensor = pool.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    return gathered
