"""Triton kernels: attention over work items, merging of partial results, writing and copying of K/V."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

__all__ = ["INTERPRETED", "attention_kernel", "copy_kernel", "merge_kernel", "write_kernel"]

# The interpreter keeps bfloat16 as bits in integers and would multiply those.
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def attention_kernel(
    query,
    key_pool,
    value_pool,
    out,
    lse,
    partial_out,
    partial_lse,
    items,
    order,
    sequence,
    lengths,
    ends,
    tables,
    sinks,
    bias,
    alibi,
    scale,
    softcap,
    window,
    kv_heads,
    table_stride,
    query_row,
    query_head,
    key_slot,
    key_head,
    value_slot,
    value_head,
    out_row,
    out_head,
    bias_row,
    bias_head,
    bias_columns,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    IEEE: tl.constexpr,
):
    """Attention of the rows of a work item over its tokens; grid (items * kv_heads,).

    A program handles one item (see ``branchkv.kernels.work.WorkItems``) and one K/V head. Its tile is NARROW or WIDE
    packed rows (query row x head of the group) by TOKENS tokens a turn; KEY_TILE and VALUE_TILE are the powers of two
    that hold KEY_DIM and VALUE_DIM. Scores, sums and the log-sum-exp are float32; products have the query's dtype as
    factors (float32 factors stay float32 with IEEE). A program of an item with ``count`` 0 returns at once.

    Pointers, with strides in elements and the last dimension dense:
        query: [rows, heads, KEY_DIM] fp32, fp16 or bf16, by query_row and query_head.
        key_pool, value_pool: [slots, kv_heads, KEY_DIM or VALUE_DIM], any float dtype, by ..._slot and ..._head.
        out: [rows, heads, VALUE_DIM] as query, by out_row and out_head; lse: [rows, heads] fp32. Of final items.
        partial_out: [partials, heads, VALUE_DIM] fp32; partial_lse: [partials, heads] fp32. Of items to be merged.
        items: [items, 6] int32. order, sequence, lengths, ends: [rows] int32; tables: [sequences, columns] int32 by
            table_stride. Of ``branchkv.kernels.plan.AttentionPlan``.
        sinks, alibi: [heads] fp32. bias: [rows, heads, bias_columns] fp32 by bias_row and bias_head, right-aligned with
            the ends of the sequences. Not read unless HAS_...

    Masks: a row sees a token that lies before ``stop``, before the row's own end and, with HAS_WINDOW, among its
    ``window`` newest. A token is loaded if any row of the tile sees it; what is not loaded reads as 0, since 0 * NaN
    would be NaN. A row that sees nothing gets 0 with an LSE of -inf.

    The softmax is computed online over the turns (https://arxiv.org/abs/1805.02867).
    """
    item = items + (tl.program_id(0) // kv_heads) * 6
    kv_head = tl.program_id(0) % kv_heads
    first = tl.load(item)
    count = tl.load(item + 1)
    if count == 0:
        return
    # Both widths are one launch: what few rows read does not wait for what many rows read.
    if NARROW == WIDE or count * GROUP > NARROW:
        _tile(
            query, key_pool, value_pool, out, lse, partial_out, partial_lse, order, sequence, lengths, ends, tables,
            sinks, bias, alibi, item, first, count, kv_head, scale, softcap, window, kv_heads, table_stride, query_row,
            query_head, key_slot, key_head, value_slot, value_head, out_row, out_head, bias_row, bias_head,
            bias_columns, GROUP, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_TILE, VALUE_TILE, WIDE, TOKENS, HAS_WINDOW,
            HAS_SOFTCAP, HAS_SINKS, HAS_BIAS, HAS_ALIBI, IEEE,
        )  # fmt: skip
    else:
        _tile(
            query, key_pool, value_pool, out, lse, partial_out, partial_lse, order, sequence, lengths, ends, tables,
            sinks, bias, alibi, item, first, count, kv_head, scale, softcap, window, kv_heads, table_stride, query_row,
            query_head, key_slot, key_head, value_slot, value_head, out_row, out_head, bias_row, bias_head,
            bias_columns, GROUP, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_TILE, VALUE_TILE, NARROW, TOKENS, HAS_WINDOW,
            HAS_SOFTCAP, HAS_SINKS, HAS_BIAS, HAS_ALIBI, IEEE,
        )  # fmt: skip


@triton.jit
def _tile(
    query, key_pool, value_pool, out, lse, partial_out, partial_lse, order, sequence, lengths, ends, tables,
    sinks, bias, alibi, item, first, count, kv_head, scale, softcap, window, kv_heads, table_stride, query_row,
    query_head, key_slot, key_head, value_slot, value_head, out_row, out_head, bias_row, bias_head,
    bias_columns, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """The packed rows [m_start, m_start + ROWS) of an item."""
    packed = tl.load(item + 2) + tl.arange(0, ROWS)
    start = tl.load(item + 3)
    stop = tl.load(item + 4)
    partial = tl.load(item + 5)
    valid = packed < count * GROUP
    row = tl.load(order + first + packed // GROUP, mask=valid, other=0)
    head = kv_head * GROUP + packed % GROUP
    length = tl.load(lengths + row, mask=valid, other=0)
    end = length
    if HAS_BIAS:
        end = tl.load(ends + row, mask=valid, other=0)
    table = tables + tl.load(sequence + tl.load(order + first)) * table_stride

    key_dims = tl.arange(0, KEY_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    query_at = row.to(tl.int64)[:, None] * query_row + head[:, None] * query_head + key_dims[None, :]
    rows = tl.load(query + query_at, mask=valid[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0)
    keys = key_pool + kv_head.to(tl.int64) * key_head
    values = value_pool + kv_head.to(tl.int64) * value_head

    # Slots beyond what the tile's rows see may never have been written: they are not read, for 0 * NaN is NaN.
    stop = tl.minimum(stop, tl.max(length, axis=0))
    if HAS_WINDOW:
        start = tl.maximum(start, tl.min(tl.where(valid, length, 2147483647), axis=0) - window)

    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, VALUE_TILE], dtype=tl.float32)
    for begin in range(start, stop, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        block = tl.load(table + token // BLOCK_SIZE, mask=token < stop, other=-1)
        seen = (block >= 0)[None, :] & (token[None, :] < length[:, None])
        if HAS_WINDOW:
            seen = seen & (token[None, :] >= length[:, None] - window)
        # Between the windows of two rows there may be tokens that nobody sees, and anything in their slots.
        read = tl.max(seen.to(tl.int32), axis=0) > 0
        slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        key_at = slot[None, :] * key_slot + key_dims[:, None]
        key = tl.load(keys + key_at, mask=read[None, :] & (key_dims < KEY_DIM)[:, None], other=0.0).to(rows.dtype)
        value_at = slot[:, None] * value_slot + value_dims[None, :]
        value_mask = read[:, None] & (value_dims < VALUE_DIM)[None, :]
        value = tl.load(values + value_at, mask=value_mask, other=0.0).to(rows.dtype)

        scores = _dot(rows, key, IEEE) * scale
        if HAS_SOFTCAP:
            scores = softcap * _tanh(scores / softcap)
        if HAS_BIAS:
            column = bias_columns - end[:, None] + token[None, :]
            bias_at = row.to(tl.int64)[:, None] * bias_row + head.to(tl.int64)[:, None] * bias_head + column
            scores += tl.load(bias + bias_at, mask=seen, other=0.0)
        if HAS_ALIBI:
            slope = tl.load(alibi + head, mask=valid, other=0.0)
            scores += slope[:, None] * (token[None, :] - length[:, None] + 1).to(tl.float32)
        scores = tl.where(seen, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN
        weights = tl.exp(scores - base[:, None])
        rescale = tl.exp(top - base)
        total = total * rescale + tl.sum(weights, axis=1)
        sums = sums * rescale[:, None] + _dot(weights.to(rows.dtype), value, IEEE)
        top = new_top

    if HAS_SINKS:
        # Partial results leave the sink to the merge, or it would count several times.
        sink = tl.load(sinks + head, mask=valid, other=float("-inf"))
        sink = tl.where(partial < 0, sink, float("-inf"))
        new_top = tl.maximum(top, sink)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp(top - base)
        total = total * rescale + tl.exp(sink - base)
        sums = sums * rescale[:, None]
        top = new_top

    divisor = tl.where(total > 0.0, total, 1.0)
    result = sums / divisor[:, None]
    row_lse = top + tl.log(divisor)
    result_mask = valid[:, None] & (value_dims < VALUE_DIM)[None, :]
    heads = kv_heads * GROUP
    if partial < 0:
        out_at = row.to(tl.int64)[:, None] * out_row + head[:, None] * out_head + value_dims[None, :]
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=result_mask)
        tl.store(lse + row.to(tl.int64) * heads + head, row_lse, mask=valid)
    else:
        part = (partial + packed // GROUP).to(tl.int64) * heads + head
        tl.store(partial_out + part[:, None] * VALUE_DIM + value_dims[None, :], result, mask=result_mask)
        tl.store(partial_lse + part, row_lse, mask=valid)


@triton.jit
def _dot(left, right, IEEE: tl.constexpr):
    """Product with sums in float32; ``IEEE`` keeps float32 factors from being cut to TF32."""
    if INTERPRETED:
        product = tl.dot(left.to(tl.float32), right.to(tl.float32))
    elif IEEE:
        product = tl.dot(left, right, input_precision="ieee")
    else:
        product = tl.dot(left, right)
    return product


@triton.jit
def _tanh(x):
    """By a polynomial where the exponentials would cancel, as in Cephes' tanhf (https://www.netlib.org/cephes/)."""
    square = x * x
    small = -5.70498872745e-3 * square + 2.06390887954e-2
    small = small * square - 5.37397155531e-2
    small = small * square + 1.33314422036e-1
    small = (small * square - 3.33332819422e-1) * square * x + x
    size = tl.abs(x)
    large = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * size))  # 1 where the exponential overflows
    return tl.where(size < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def merge_kernel(
    partial_out,
    partial_lse,
    offsets,
    slots,
    out,
    lse,
    sinks,
    heads,
    out_row,
    out_head,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Adds up the partial results of a query row's head, and its sink; grid (rows * heads,).

    partial_out: [partials, heads, VALUE_DIM] fp32; partial_lse: [partials, heads] fp32. offsets: [rows + 1] int32 and
    slots: [partials] int32, see ``branchkv.kernels.work.WorkItems``. out: [rows, heads, VALUE_DIM] by out_row and
    out_head; lse: [rows, heads] fp32. sinks: [heads] fp32. Sums are float32, weighted by exp(lse - largest lse).
    A row without partial results is left as it is.
    """
    row = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    start = tl.load(offsets + row)
    stop = tl.load(offsets + row + 1)
    if start == stop:  # an item wrote the row
        return
    dims = tl.arange(0, VALUE_TILE)
    top = float("-inf")
    if HAS_SINKS:
        top = tl.load(sinks + head)
    for place in range(start, stop):
        top = tl.maximum(top, tl.load(partial_lse + tl.load(slots + place).to(tl.int64) * heads + head))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    if HAS_SINKS:
        total = tl.exp(tl.load(sinks + head) - base)
    sums = tl.zeros([VALUE_TILE], dtype=tl.float32)
    for place in range(start, stop):
        part = tl.load(slots + place).to(tl.int64) * heads + head
        weight = tl.exp(tl.load(partial_lse + part) - base)
        total += weight
        sums += weight * tl.load(partial_out + part * VALUE_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
    divisor = tl.where(total > 0.0, total, 1.0)
    out_at = row.to(tl.int64) * out_row + head * out_head + dims
    tl.store(out + out_at, (sums / divisor).to(out.dtype.element_ty), mask=dims < VALUE_DIM)
    tl.store(lse + row.to(tl.int64) * heads + head, top + tl.log(divisor))


@triton.jit
def write_kernel(
    keys,
    values,
    key_pool,
    value_pool,
    slots,
    key_row,
    key_head_in,
    value_row,
    value_head_in,
    key_slot,
    key_head,
    value_slot,
    value_head,
    kv_heads,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Writes K and V of new tokens into their slots, in the pools' dtype; grid (tokens * kv_heads,).

    keys: [tokens, kv_heads, KEY_DIM] by key_row and key_head_in; values: [tokens, kv_heads, VALUE_DIM] likewise.
    key_pool, value_pool: [slots, kv_heads, dim] by ..._slot and ..._head. slots: [tokens] int64; below 0 is skipped.
    """
    token = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    key_dims = tl.arange(0, KEY_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    key = tl.load(keys + token * key_row + head * key_head_in + key_dims, mask=key_dims < KEY_DIM)
    value = tl.load(values + token * value_row + head * value_head_in + value_dims, mask=value_dims < VALUE_DIM)
    key_at = key_pool + slot * key_slot + head * key_head + key_dims
    value_at = value_pool + slot * value_slot + head * value_head + value_dims
    tl.store(key_at, key.to(key_pool.dtype.element_ty), mask=key_dims < KEY_DIM)
    tl.store(value_at, value.to(value_pool.dtype.element_ty), mask=value_dims < VALUE_DIM)


@triton.jit
def copy_kernel(
    source,
    target,
    source_ids,
    target_ids,
    source_block,
    source_slot,
    source_head,
    target_block,
    target_slot,
    target_head,
    heads,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_TARGET_IDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOT_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """Copies SLOT_TILE slots of one head of one block; grid (copies * heads, ceil(BLOCK_SIZE / SLOT_TILE)).

    Without ids, blocks are numbered as the copies are.

    source, target: [blocks, BLOCK_SIZE, heads, DIM] by strides, of one dtype. source_ids, target_ids: [copies] int64.
    """
    number = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    from_block = number
    to_block = number
    if HAS_SOURCE_IDS:
        from_block = tl.load(source_ids + number)
    if HAS_TARGET_IDS:
        to_block = tl.load(target_ids + number)
    slots = (tl.program_id(1) * SLOT_TILE + tl.arange(0, SLOT_TILE))[:, None]
    dims = tl.arange(0, DIM_TILE)[None, :]
    mask = (slots < BLOCK_SIZE) & (dims < DIM)
    source_at = from_block * source_block + head * source_head + slots * source_slot + dims
    target_at = to_block * target_block + head * target_head + slots * target_slot + dims
    tl.store(target + target_at, tl.load(source + source_at, mask=mask), mask=mask)
