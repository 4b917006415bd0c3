"""Plain softmax on the CPU: torch's fused kernel for batches of runs, a product for the rest, merged by LSE."""

from __future__ import annotations

import torch

from branchkv.kernels.cpu_batches import CPUBatch, pieces_of
from branchkv.kernels.cpu_layout import CPULayout
from branchkv.kernels.torch_own import own_scores, own_values

__all__ = ["merged_attention"]

# SDPA's own kernel: the public function does not return the LSE.
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

Partial = tuple[torch.Tensor, torch.Tensor]


def merged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: CPULayout,
    batches: tuple[CPUBatch, ...],
    scale: float,
) -> Partial:
    """Attention without options that change scores, and without sinks.

    Args:
        query: [kv_heads, rows * group, dim], rows in the layout's order.
        keys, values: [kv_heads, slots, dim], of one dim.
        layout: of one step; the rows of a run see all of it.
        batches: the layout's runs.
        scale: factor on the scores.

    Returns:
        Output [kv_heads, rows * group, dim] and LSE [kv_heads, rows * group], in float32 at least.
    """
    rows = len(layout.lengths)
    group = query.shape[1] // rows
    total = _own(query, keys, values, layout, scale) if layout.own else None
    for batch in batches:
        if batch.rows == slice(0, rows):
            total = _add(total, *_batch(query, keys, values, batch, scale))
            continue
        out, lse = total = _nothing(query) if total is None else total
        place = _packed(batch.rows, group)
        if isinstance(place, slice):
            part = _batch(query[:, place], keys, values, batch, scale)
            out[:, place], lse[:, place] = _add((out[:, place], lse[:, place]), *part)
        else:
            part = _batch(query.index_select(1, place), keys, values, batch, scale)
            new = _add((out.index_select(1, place), lse.index_select(1, place)), *part)
            out.index_copy_(1, place, new[0])
            lse.index_copy_(1, place, new[1])
    assert total is not None  # every row sees a token
    return total


def _batch(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: CPUBatch, scale: float) -> Partial:
    """Partial outputs [pieces, kv_heads, packed, dim] and LSE [pieces, kv_heads, packed] of the batch's own queries."""
    kv_heads, packed, dim = query.shape
    if batch.runs > 1:
        folded = query.unflatten(1, (batch.runs, packed // batch.runs)).transpose(0, 1)
        run_keys, run_values = batch.view(keys, 1), batch.view(values, 1)
    else:
        pieces = pieces_of(batch.tokens, kv_heads, packed, torch.get_num_threads())
        folded = query.expand(pieces, kv_heads, packed, dim)
        run_keys, run_values = batch.view(keys, pieces), batch.view(values, pieces)
    out, lse = _fused(folded, run_keys.to(query.dtype), run_values.to(query.dtype), scale=scale)
    if batch.runs > 1:
        return out.transpose(0, 1).reshape(1, kv_heads, packed, dim), lse.transpose(0, 1).reshape(1, kv_heads, packed)
    return out, lse


def _own(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: CPULayout, scale: float) -> Partial:
    """What the rows read alone; the LSE of a row without is so small that nothing comes of it."""
    kv_heads, packed, _ = query.shape
    scores = own_scores(query, keys, layout, scale)
    # In place, and the LSE from the largest score and its weight, at least 1 / columns: half the time of logsumexp.
    top = scores.amax(dim=-1)
    weights = torch.softmax(scores, dim=-1, out=scores)
    lse = top.sub_(weights.amax(dim=-1).log_())
    out = own_values(weights.to(query.dtype), values, layout)
    return out.to(scores.dtype), lse.view(kv_heads, packed)


def _add(total: Partial | None, out: torch.Tensor, lse: torch.Tensor) -> Partial:
    """Merge partial results along their first dimension, and with what there is so far, which may be overwritten."""
    wide = torch.promote_types(out.dtype, torch.float32)
    out, lse = out.to(wide), lse.to(wide)
    for piece in range(len(out)):
        part_out, part_lse = out[piece], lse[piece]
        if total is None:
            total = part_out, part_lse
            continue
        # exp(a) / (exp(a) + exp(b)) is the logistic function of a - b.
        weight = torch.sigmoid(part_lse - total[1])
        total = total[0].lerp_(part_out, weight[..., None]), torch.logaddexp(total[1], part_lse)
    assert total is not None
    return total


def _nothing(query: torch.Tensor) -> Partial:
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.zeros_like(query, dtype=wide), query.new_full(query.shape[:2], -torch.inf, dtype=wide)


def _packed(rows: slice | torch.Tensor, group: int) -> slice | torch.Tensor:
    """The packed rows, query row x head of the group, of query rows."""
    if isinstance(rows, slice):
        return slice(rows.start * group, rows.stop * group)
    return (rows[:, None] * group + torch.arange(group, device=rows.device)).flatten()
