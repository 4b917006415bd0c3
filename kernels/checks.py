"""Checks of input that several files of this room share: what does not fit is named, with expected and got."""

from __future__ import annotations

from typing import Any

import torch

from branchkv.errors import InvalidArgumentError

__all__ = ["check", "check_tensors"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check(argument: str, holds: Any, expected: str, got: Any) -> None:
    """Raises InvalidArgumentError unless ``holds``."""
    if not holds:
        raise InvalidArgumentError(argument, expected, str(got))


def check_tensors(query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor) -> None:
    """Whether query and pools fit each other, whatever the plan; see ``branchkv.kernels.attention.attention``.

    Raises:
        InvalidArgumentError: shapes, dtypes, devices or strides do not.
    """
    for name, tensor in (("query", query), ("key_pool", key_pool), ("value_pool", value_pool)):
        check(name, tensor.ndim == 3, "3 dimensions", list(tensor.shape))
        check(name, tensor.dtype in _DTYPES, "float16, bfloat16, float32 or float64", tensor.dtype)
        check(name, tensor.device == query.device, f"a tensor on {query.device}, as query", tensor.device)
        check(name, min(tensor.shape[1:]) >= 1, "heads and head size of at least 1", list(tensor.shape))
        check(name, tensor.shape[2] == 1 or tensor.stride(2) == 1, "a stride of 1 within a head", tensor.stride())
    kv_heads, key_dim = key_pool.shape[1:]
    check("query", query.shape[2] == key_dim, f"head size {key_dim}, as key_pool", query.shape[2])
    check("query", query.shape[1] % kv_heads == 0, f"a multiple of {kv_heads} heads", query.shape[1])
    check("value_pool", value_pool.shape[1] == kv_heads, f"{kv_heads} heads, as key_pool", value_pool.shape[1])
    check("value_pool", value_pool.dtype == key_pool.dtype, f"{key_pool.dtype}, as key_pool", value_pool.dtype)
