"""Launches of the Triton kernels, as custom operators that torch.compile and CUDA graphs take as they are."""

from __future__ import annotations

import torch

from branchkv.kernels.buffers import PlanBuffers
from branchkv.kernels.checks import check, check_tensors
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan
from branchkv.kernels.triton_configs import BLOCK_STEP, DTYPES, FP_FUSION, SLOT_TILE, packing, padded, tiles
from branchkv.kernels.triton_kernels import attention_kernel, copy_kernel, merge_kernel, write_kernel

__all__ = ["TritonMoves", "copy_blocks", "paged_attention", "triton_attention", "write_slots"]


def triton_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan | PlanBuffers,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``branchkv.kernels.attention.attention``; ``plan`` may be fixed buffers, for launches to be recorded.

    Raises:
        InvalidArgumentError: a block size or a dtype that the kernel does not take.
    """
    check("block_size", plan.block_size % BLOCK_STEP == 0, f"a multiple of {BLOCK_STEP}", plan.block_size)
    check("query", query.dtype in DTYPES, "float16, bfloat16 or float32", query.dtype)
    if isinstance(plan, PlanBuffers):
        _check_buffers(query, key_pool, value_pool, plan)
    heads, kv_heads = query.shape[1], key_pool.shape[1]
    key_dim, value_dim = query.shape[2], value_pool.shape[2]
    shape = tiles(query.dtype, key_dim, value_dim, plan.block_size)
    work = plan.work(packing(shape, kv_heads, heads // kv_heads, key_dim, value_dim, query.dtype))
    result: tuple[torch.Tensor, torch.Tensor] = paged_attention(
        query,
        key_pool,
        value_pool,
        work.items,
        work.offsets,
        work.slots,
        plan.order,
        plan.sequence,
        plan.lengths,
        plan.ends,
        plan.tables,
        None if options.sinks is None else options.sinks.float().contiguous(),
        None if options.bias is None else _bias(options.bias),
        None if options.alibi_slopes is None else options.alibi_slopes.float().contiguous(),
        options.scale,
        options.softcap,
        plan.window,
        plan.block_size,
    )
    return result


def _check_buffers(query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, buffers: PlanBuffers) -> None:
    """As ``attention`` does for a plan: the tensors of a recorded launch must fit every plan to come."""
    check_tensors(query, key_pool, value_pool)
    check("query", query.shape[0] == buffers.rows, f"{buffers.rows} rows, those of the buffers", query.shape[0])
    for name, pool in (("key_pool", key_pool), ("value_pool", value_pool)):
        check(name, pool.shape[0] >= buffers.slots, f"at least {buffers.slots} slots, the capacity", pool.shape[0])


def _bias(bias: torch.Tensor) -> torch.Tensor:
    """[rows or 1, heads or 1, columns] float32, last stride 1."""
    bias = bias[(None,) * (4 - bias.ndim)][:, :, 0].float()
    return bias if bias.stride(2) == 1 else bias.contiguous()


@torch.library.custom_op("branchkv::paged_attention", mutates_args=())
def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    items: torch.Tensor,
    offsets: torch.Tensor,
    slots: torch.Tensor,
    order: torch.Tensor,
    sequence: torch.Tensor,
    lengths: torch.Tensor,
    ends: torch.Tensor,
    tables: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    alibi: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the attention kernel and, where items write partial results, the merge kernel.

    Args:
        query, key_pool, value_pool: as for ``branchkv.kernels.attention.attention``.
        items, offsets, slots: from ``WorkItems``.
        order, sequence, lengths, ends, tables: from ``AttentionPlan``.
        sinks: [heads] float32 or None. bias: [rows or 1, heads or 1, columns] float32 or None. alibi: [heads] float32
            or None.
        scale, softcap: of ``AttentionOptions``.
        window, block_size: of ``AttentionPlan``.
    """
    rows, heads, key_dim = query.shape
    kv_heads, value_dim, partials = key_pool.shape[1], value_pool.shape[2], slots.shape[0]
    shape = tiles(query.dtype, key_dim, value_dim, block_size)
    out = _allocate(query, (rows, heads, value_dim), query.dtype)
    lse = _allocate(query, (rows, heads), torch.float32)
    partial_out = _allocate(query, (partials, heads, value_dim), torch.float32) if partials else lse
    partial_lse = _allocate(query, (partials, heads), torch.float32) if partials else lse
    bias_row, bias_head = (0, 0) if bias is None else (bias.stride(i) if bias.shape[i] > 1 else 0 for i in (0, 1))
    with torch.cuda.device_of(query):
        attention_kernel[(items.shape[0] * kv_heads,)](
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
            lse if sinks is None else sinks,
            lse if bias is None else bias,
            lse if alibi is None else alibi,
            scale,
            1.0 if softcap is None else softcap,
            window or 0,
            kv_heads,
            tables.stride(0),
            query.stride(0),
            query.stride(1),
            key_pool.stride(0),
            key_pool.stride(1),
            value_pool.stride(0),
            value_pool.stride(1),
            out.stride(0),
            out.stride(1),
            bias_row,
            bias_head,
            0 if bias is None else bias.shape[2],
            GROUP=heads // kv_heads,
            BLOCK_SIZE=block_size,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_TILE=padded(key_dim),
            VALUE_TILE=padded(value_dim),
            NARROW=shape.narrow,
            WIDE=shape.wide,
            TOKENS=shape.tokens,
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            HAS_BIAS=bias is not None,
            HAS_ALIBI=alibi is not None,
            IEEE=query.dtype == torch.float32,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            **FP_FUSION,
        )
        if partials:
            merge_kernel[(rows * heads,)](
                partial_out,
                partial_lse,
                offsets,
                slots,
                out,
                lse,
                lse if sinks is None else sinks,
                heads,
                out.stride(0),
                out.stride(1),
                VALUE_DIM=value_dim,
                VALUE_TILE=padded(value_dim),
                HAS_SINKS=sinks is not None,
                num_warps=1,
                **FP_FUSION,
            )
    return out, lse


@paged_attention.register_fake
def _(
    query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = query.shape[:2]
    out = query.new_empty((rows, heads, value_pool.shape[2]))
    return out, query.new_empty((rows, heads), dtype=torch.float32)


def _allocate(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory: the kernels write all of it. Tests put poison there."""
    return torch.empty(shape, dtype=dtype, device=like.device)


@torch.library.custom_op("branchkv::write_slots", mutates_args=("key_pool", "value_pool"))
def write_slots(
    key_pool: torch.Tensor, value_pool: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Writes new tokens' K and V [tokens, kv_heads, dim] into their slots of the pools; slots below 0 are skipped."""
    tokens, kv_heads, key_dim = keys.shape
    if not tokens:
        return
    value_dim = values.shape[2]
    keys, values = (given if given.stride(2) == 1 else given.contiguous() for given in (keys, values))
    slots = slots.contiguous()
    with torch.cuda.device_of(keys):
        write_kernel[(tokens * kv_heads,)](
            keys,
            values,
            key_pool,
            value_pool,
            slots,
            *keys.stride()[:2],
            *values.stride()[:2],
            *key_pool.stride()[:2],
            *value_pool.stride()[:2],
            kv_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_TILE=padded(key_dim),
            VALUE_TILE=padded(value_dim),
            num_warps=1,
            **FP_FUSION,
        )


@torch.library.custom_op("branchkv::copy_blocks", mutates_args=("pool",))
def copy_blocks(pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor, block_size: int) -> None:
    """Copies blocks of a pool [slots, kv_heads, dim] as if all at once: a block may be source and target.

    Args:
        pool: K or V.
        source, target: [copies] int64 block ids.
        block_size: slots per block.
    """
    copies, (_, heads, dim) = source.shape[0], pool.shape
    if not copies:
        return
    source, target = source.contiguous(), target.contiguous()  # halves of a matrix of pairs are not
    staging = pool.new_empty((copies, heads, block_size, dim))
    slot, head = pool.stride()[:2]
    pool_strides = (block_size * slot, slot, head)
    staging_strides = (staging.stride(0), staging.stride(2), staging.stride(1))
    grid = (copies * heads, -(-block_size // SLOT_TILE))
    with torch.cuda.device_of(pool):
        for gather in (True, False):
            copy_kernel[grid](
                pool if gather else staging,
                staging if gather else pool,
                source,
                target,
                *(pool_strides if gather else staging_strides),
                *(staging_strides if gather else pool_strides),
                heads,
                HAS_SOURCE_IDS=gather,
                HAS_TARGET_IDS=not gather,
                BLOCK_SIZE=block_size,
                SLOT_TILE=SLOT_TILE,
                DIM=dim,
                DIM_TILE=padded(dim),
                num_warps=4,
                **FP_FUSION,
            )


for _operator in (write_slots, copy_blocks):
    _operator.register_fake(lambda *_: None)


class TritonMoves:
    """Writes and copies of K/V by the Triton kernels; implements ``branchkv.paged_cache.storage.Moves``."""

    def write(
        self,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        write_slots(key_pool, value_pool, slots, keys, values)

    def copy(self, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor, block_size: int) -> None:
        copy_blocks(pool, source, target, block_size)
