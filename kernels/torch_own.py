"""What each row reads alone, on the CPU: chunks in place and gathered tokens, side by side in one matrix of scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from branchkv.kernels.cpu_chunks import CPUChunks
from branchkv.kernels.cpu_layout import CPULayout, low_score

__all__ = ["own_scores", "own_values"]


def own_scores(query: torch.Tensor, keys: torch.Tensor, layout: CPULayout, scale: float, target: torch.Tensor) -> None:
    """Scaled scores into ``target``, very low where there is no token.

    Args:
        query: [kv_heads, rows * group, key_dim], rows in the layout's order.
        keys: [kv_heads, slots, key_dim].
        layout: what is read.
        scale: factor on the scores.
        target: [kv_heads, rows, group, own columns], float32 at least.
    """
    chunked = 0
    if layout.chunks is not None:
        chunked = layout.chunks.columns
        _chunk_scores(query, keys, layout.chunks, scale, target[..., :chunked])
    if layout.tail.shape[1]:
        _tail_scores(query, keys, layout, scale, target[..., chunked:] if chunked else target)


def own_values(weights: torch.Tensor, values: torch.Tensor, layout: CPULayout) -> torch.Tensor:
    """[kv_heads, rows * group, value_dim] from weights [kv_heads, rows, group, own columns], in their dtype."""
    kv_heads, rows, group, _ = weights.shape
    width, dim = layout.tail.shape[1], values.shape[2]
    if layout.chunks is None:
        return _tail_values(weights, values, layout).view(kv_heads, rows * group, dim)
    out = _chunk_values(weights[..., : layout.chunks.columns], values, layout.chunks)
    if width:
        out = out.view(kv_heads * rows, group, dim)
        out += _tail_values(weights[..., layout.chunks.columns :], values, layout)
    return out.view(kv_heads, rows * group, dim)


def _tail_scores(
    query: torch.Tensor, keys: torch.Tensor, layout: CPULayout, scale: float, target: torch.Tensor
) -> None:
    """As few calls as can be: each costs more than the few tokens do.

    The products are copied into ``target``: written there by the product itself, they take ten times as long.
    """
    kv_heads, rows, group, width = target.shape
    own = keys.index_select(1, layout.tail_slots).view(kv_heads * rows, width, -1).to(query.dtype)
    folded = query.view(kv_heads * rows, group, -1)
    mask = layout.tail_mask(kv_heads, target.dtype)
    if query.dtype == target.dtype:
        scores = torch.baddbmm(mask, folded, own.transpose(1, 2), alpha=scale)
    else:
        scores = torch.bmm(folded, own.transpose(1, 2)).to(target.dtype).mul_(scale).add_(mask)
    target.copy_(scores.view(target.shape))


def _tail_values(weights: torch.Tensor, values: torch.Tensor, layout: CPULayout) -> torch.Tensor:
    """[kv_heads * rows, group, value_dim]."""
    kv_heads, rows, group, width = weights.shape
    own = values.index_select(1, layout.tail_slots).view(kv_heads * rows, width, values.shape[2]).to(weights.dtype)
    return torch.bmm(weights.reshape(kv_heads * rows, group, width), own)


def _chunk_scores(
    query: torch.Tensor, keys: torch.Tensor, chunks: CPUChunks, scale: float, target: torch.Tensor
) -> None:
    """Every chunk with the queries of the row that owns it, then put into the rows' order.

    Head by head, because products over [kv_heads, chunks] would copy the pool to make one batch of both.
    """
    kv_heads, rows, group, _ = target.shape
    folded = query.view(kv_heads, rows, group, -1)
    if not chunks.in_order:
        folded = folded.index_select(1, chunks.owner)
    in_place = chunks.in_order and target.is_contiguous() and target.dtype == query.dtype
    products = target if in_place else query.new_empty((kv_heads, chunks.number, group, chunks.tokens))
    for head in range(kv_heads):
        for part in chunks.segments:
            inside = slice(part.first, part.first + part.count)
            own = part.view(keys[head], chunks.tokens).to(query.dtype)
            torch.bmm(folded[head, inside], own.transpose(1, 2), out=products[head, inside])
    if in_place:
        target.mul_(scale)
        return
    if not chunks.in_order:
        products = products.index_select(1, chunks.select)
    most = chunks.columns // chunks.tokens
    by_row = products.view(kv_heads, rows, most, group, chunks.tokens).transpose(2, 3)
    torch.mul(by_row.to(target.dtype), scale, out=target.unflatten(3, (most, chunks.tokens)))
    if chunks.padding is not None:
        target.masked_fill_(chunks.padding, low_score(target.dtype))


def _chunk_values(weights: torch.Tensor, values: torch.Tensor, chunks: CPUChunks) -> torch.Tensor:
    """[kv_heads, rows, group, value_dim] from weights [kv_heads, rows, group, columns]."""
    kv_heads, rows, group, columns = weights.shape
    most, dim = columns // chunks.tokens, values.shape[2]
    by_chunk = weights.unflatten(3, (most, chunks.tokens)).transpose(2, 3)
    by_chunk = by_chunk[:, :, 0] if most == 1 else by_chunk.reshape(kv_heads, rows * most, group, chunks.tokens)
    if not chunks.in_order:
        by_chunk = by_chunk.index_select(1, chunks.place)
    out = weights.new_empty((kv_heads, chunks.number, group, dim))
    for head in range(kv_heads):
        for part in chunks.segments:
            inside = slice(part.first, part.first + part.count)
            own = part.view(values[head], chunks.tokens).to(weights.dtype)
            torch.bmm(by_chunk[head, inside], own, out=out[head, inside])
    if chunks.whole_rows:
        return out if chunks.in_order else out.index_select(1, chunks.select)
    # The sum over the chunks of each row; chunks of no row, which may hold anything, are in none.
    flat = out.view(kv_heads, chunks.number, group * dim)
    sums = [F.embedding_bag(chunks.listed, head, chunks.offsets, mode="sum") for head in flat]
    return torch.stack(sums).view(kv_heads, rows, group, dim)
