"""Plain softmax on the CPU: torch's fused kernel for batches of runs, and one softmax over those and all the rest.

The attention over a run is, for the rest of the softmax, one more token: its score is the log-sum-exp of the run's
scores, its value is the run's output. So is a sink, whose value is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from branchkv.kernels.cpu_batches import CPUBatch, pieces_of
from branchkv.kernels.cpu_layout import CPULayout, low_score
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.torch_own import own_scores, own_values

__all__ = ["merged_attention"]

# SDPA's own kernel: the public function does not return the LSE.
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class _Part:
    """Attention over runs: packed rows, their output [kv_heads, rows, dim] and LSE [kv_heads, rows]."""

    place: slice | torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def merged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: CPULayout,
    batches: tuple[CPUBatch, ...],
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without options that change scores.

    Args:
        query: [kv_heads, rows * group, dim], rows in the layout's order.
        keys, values: [kv_heads, slots, dim], of one dim.
        layout: of one step; the rows of a run see all of it.
        batches: the layout's runs.
        options: of the layer; its scale and sinks are used.

    Returns:
        Output [kv_heads, rows * group, dim] and LSE [kv_heads, rows * group], in float32 at least.
    """
    kv_heads, packed, dim = query.shape
    rows, wide = len(layout.lengths), torch.promote_types(query.dtype, torch.float32)
    parts = [part for batch in batches for part in _parts(query, keys, values, batch, options.scale, packed // rows)]
    first = len(parts) + (options.sinks is not None)
    scores = query.new_empty((kv_heads, rows, packed // rows, first + layout.own), dtype=wide)
    flat = scores.view(kv_heads, packed, first + layout.own)
    for column, part in enumerate(parts):
        _put(flat[..., column], part)
    if options.sinks is not None:
        scores[..., first - 1] = options.sinks.view(kv_heads, 1, packed // rows)
    if layout.own:
        own_scores(query, keys, layout, options.scale, scores[..., first:])
    # In place, and the LSE from the largest score and its weight, at least 1 / columns: half the time of logsumexp.
    top = flat.amax(dim=-1)
    torch.softmax(flat, dim=-1, out=flat)
    lse = top.sub_(flat.amax(dim=-1).log_())
    if layout.own:
        out = own_values(scores[..., first:].to(query.dtype), values, layout).to(wide)
    else:
        out = query.new_zeros((kv_heads, packed, dim), dtype=wide)
    for column, part in enumerate(parts):
        _add(out, part, flat[..., column : column + 1])
    return out, lse


def _parts(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: CPUBatch, scale: float, group: int
) -> list[_Part]:
    """The attention of a batch's rows to its runs; that of a run that is cut, piece by piece."""
    place = _packed(batch.rows, group)
    if isinstance(place, torch.Tensor):
        query = query.index_select(1, place)
    elif place.stop - place.start < query.shape[1]:
        query = query[:, place]
    kv_heads, packed, dim = query.shape
    if batch.runs > 1:
        pieces, folded = 1, query.unflatten(1, (batch.runs, packed // batch.runs)).transpose(0, 1)
    else:
        pieces = pieces_of(batch.tokens, kv_heads, packed, torch.get_num_threads())
        folded = query.expand(pieces, kv_heads, packed, dim)
    run_keys, run_values = batch.view(keys, pieces).to(query.dtype), batch.view(values, pieces).to(query.dtype)
    out, lse = _fused(folded, run_keys, run_values, scale=scale)
    if batch.runs > 1:
        out, lse = out.transpose(0, 1).reshape(kv_heads, packed, dim), lse.transpose(0, 1).reshape(kv_heads, packed)
        return [_Part(place, out, lse)]
    return [_Part(place, out[piece], lse[piece]) for piece in range(pieces)]


def _put(column: torch.Tensor, part: _Part) -> None:
    """The LSE of a part into a column [kv_heads, packed] of scores; for other rows nothing comes of the column."""
    if isinstance(part.place, slice) and part.place.stop - part.place.start == column.shape[1]:
        column.copy_(part.lse)
        return
    column.fill_(low_score(column.dtype))
    if isinstance(part.place, slice):
        column[:, part.place] = part.lse
    else:
        column.index_copy_(1, part.place, part.lse.to(column.dtype))


def _add(out: torch.Tensor, part: _Part, weight: torch.Tensor) -> None:
    """Add a part, weighted by [kv_heads, packed, 1], to ``out`` [kv_heads, packed, dim]."""
    mine = part.out.to(out.dtype)
    if isinstance(part.place, slice):
        out[:, part.place].addcmul_(mine, weight[:, part.place])
    else:
        out.index_add_(1, part.place, mine.mul_(weight.index_select(1, part.place)))


def _packed(rows: slice | torch.Tensor, group: int) -> slice | torch.Tensor:
    """The packed rows, query row x head of the group, of query rows."""
    if isinstance(rows, slice):
        return slice(rows.start * group, rows.stop * group)
    return (rows[:, None] * group + torch.arange(group, device=rows.device)).flatten()
