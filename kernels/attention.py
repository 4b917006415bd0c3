"""The operator: attention of query rows over the blocks that their tables name. Validates, then runs."""

from __future__ import annotations

import math

import torch

from branchkv.kernels.checks import check, check_tensors
from branchkv.kernels.implementations import Implementation, implementation, resolve
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan

__all__ = ["attention"]


def attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    run: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query row, softmax attention over the tokens its block table names.

    Args:
        query: [rows, query_heads, key_dim].
        key_pool: [slots, kv_heads, key_dim]; value_pool: [slots, kv_heads, value_dim]. ``query_heads`` is a multiple of
            ``kv_heads``; slots that no row names may hold anything, NaN included.
        plan: which slots each row reads; ``rows`` must match ``query``.
        options: scale, soft cap, sinks, bias, ALiBi. The bias is right-aligned: its last column belongs to the newest
            token of a row's sequence.
        run: from ``branchkv.kernels.implementations.implementation``; None for the fast one of the device.

    Returns:
        Output [rows, query_heads, value_dim] in the dtype of ``query``; log-sum-exp of the scores, sink included,
        [rows, query_heads] in float32 (float64 for float64).

    Raises:
        InvalidArgumentError: shapes, dtypes, devices or strides that do not fit together, or a table that names slots
            beyond the pools; named with expected and got, before anything runs.
    """
    check("plan", isinstance(plan, AttentionPlan), "an AttentionPlan", type(plan).__name__)
    for name, tensor in (("query", query), ("key_pool", key_pool), ("value_pool", value_pool)):
        check(name, isinstance(tensor, torch.Tensor), "a torch.Tensor", type(tensor).__name__)
    shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (query, key_pool, value_pool))
    if shapes not in plan.accepted:  # the layers of a step are alike
        check_tensors(query, key_pool, value_pool)
        _check_plan(query, key_pool, value_pool, plan)
        plan.accepted.add(shapes)
    _check_options(options, query, plan)
    if plan.rows == 0:
        wide = torch.promote_types(query.dtype, torch.float32)
        return query.new_empty((0, query.shape[1], value_pool.shape[2])), query.new_empty(query.shape[:2], dtype=wide)
    if run is None:
        run = implementation(resolve("auto", query.device))
    return run(query, key_pool, value_pool, plan, options)


def _check_plan(query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, plan: AttentionPlan) -> None:
    check("query", query.shape[0] == plan.rows, f"{plan.rows} rows, those of the plan", query.shape[0])
    device = plan.lengths.device
    check("plan", device == query.device, f"a plan on {query.device}, as query: make_plan(..., device=...)", device)
    slots = max((plan.largest_block + 1) * plan.block_size, plan.null_slot + 1)
    for name, pool in (("key_pool", key_pool), ("value_pool", value_pool)):
        check(name, pool.shape[0] >= slots, f"at least {slots} slots, which the plan names", pool.shape[0])


def _check_options(options: AttentionOptions, query: torch.Tensor, plan: AttentionPlan) -> None:
    heads = query.shape[1]
    for name, values in (("sinks", options.sinks), ("alibi_slopes", options.alibi_slopes)):
        if values is not None:
            check(name, values.is_floating_point(), "a floating-point dtype", values.dtype)
            check(name, values.shape == (heads,), f"{heads} values, one per query head", list(values.shape))
            check(name, values.device == query.device, f"a tensor on {query.device}, as query", values.device)
    if options.softcap is not None:
        check("softcap", 0 < options.softcap < math.inf, "more than 0 and finite, or None", options.softcap)
    if options.bias is None:
        return
    check("bias", options.bias.is_floating_point(), "a floating-point dtype", options.bias.dtype)
    shape = (1,) * (4 - options.bias.ndim) + tuple(options.bias.shape)
    check("bias", len(shape) == 4, "at most 4 dimensions", list(options.bias.shape))
    check("bias", options.bias.device == query.device, f"a tensor on {query.device}, as query", options.bias.device)
    check("bias", shape[0] in (1, plan.rows), f"1 or {plan.rows} rows", shape[0])
    check("bias", shape[1] in (1, heads), f"1 or {heads} heads", shape[1])
    check("bias", shape[2] == 1, "1 query per row", shape[2])
    check("bias", shape[3] >= plan.most, f"at least {plan.most} columns", shape[3])
