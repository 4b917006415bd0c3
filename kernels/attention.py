"""The operator: attention of query rows over the blocks that their tables name. Validates, then dispatches by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from branchkv.errors import UnsupportedOptionError
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan
from branchkv.kernels.reference import reference_attention
from branchkv.kernels.torch_batched import torch_attention

__all__ = ["Implementation", "attention", "implementation"]

Implementation = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan, AttentionOptions], tuple[torch.Tensor, torch.Tensor]
]


def implementation(name: str) -> Implementation:
    """The implementation called ``name``: ``"reference"``, ``"torch"`` or ``"auto"``.

    Raises:
        UnsupportedOptionError: there is no such implementation; never falls back to another one.
    """
    match name:
        case "reference":
            return reference_attention
        case "torch" | "auto":
            return torch_attention
        case _:
            raise UnsupportedOptionError(
                f"attention={name!r}", "this version has the implementations 'reference' and 'torch'"
            )


def attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    run: Implementation = torch_attention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query row, softmax attention over the tokens its block table names.

    Args:
        query: [rows, query_heads, key_dim].
        key_pool: [slots, kv_heads, key_dim]; value_pool: [slots, kv_heads, value_dim]. ``query_heads`` is a multiple of
            ``kv_heads``; slots that no row names may hold anything, NaN included.
        plan: which slots each row reads; ``rows`` must match ``query``.
        options: scale, soft cap, sinks, bias. The bias is right-aligned: its last column belongs to the newest token.
        run: the implementation, from ``implementation``.

    Returns:
        Output [rows, query_heads, value_dim] in the dtype of ``query``; log-sum-exp of the scores, sink included,
        [rows, query_heads] in float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit together, named with expected and got.
    """
    _check("query", query.shape[0], plan.rows, "rows of the plan")
    _check("query", query.shape[-1], key_pool.shape[-1], "key_dim of key_pool")
    _check("value_pool", value_pool.shape[1], key_pool.shape[1], "kv_heads of key_pool")
    if query.shape[1] % key_pool.shape[1]:
        raise ValueError(f"query: expected a multiple of {key_pool.shape[1]} heads, got {query.shape[1]}")
    if options.bias is not None and options.bias.shape[-1] < plan.most:
        raise ValueError(f"bias: expected at least {plan.most} columns, got {options.bias.shape[-1]}")
    if options.sinks is not None and options.sinks.shape != query.shape[1:2]:
        raise ValueError(
            f"sinks: expected {query.shape[1]} values, one per query head, got shape {list(options.sinks.shape)}"
        )
    return run(query, key_pool, value_pool, plan, options)


def _check(name: str, got: int, expected: int, what: str) -> None:
    if got != expected:
        raise ValueError(f"{name}: expected {expected} ({what}), got {got}")
