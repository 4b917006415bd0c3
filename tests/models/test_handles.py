"""The lazy K/V handle: what a model may ask of it for free, and that every operation gathers once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from branchkv.models.handles import LazyKV

SHAPE = (3, 2, 5, 4)


class Source:
    """Counts how often it is read."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dense = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.gathered = 0

    def gather(self) -> Tensor:
        self.gathered += 1
        return self.dense


def handle_of(source: Source) -> LazyKV:
    return LazyKV(source, SHAPE, source.dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_shape_dtype_and_device_are_free(dtype: torch.dtype) -> None:
    source = Source(dtype)
    handle = handle_of(source)
    assert isinstance(handle, Tensor)
    assert (handle.shape, handle.size(2), handle.ndim, handle.dim(), len(handle)) == (SHAPE, 5, 4, 4, 3)
    assert (handle.numel(), handle.element_size()) == (math.prod(SHAPE), source.dense.element_size())
    assert (handle.dtype, handle.device, handle.is_floating_point()) == (dtype, torch.device("cpu"), True)
    assert not handle.requires_grad
    assert handle.is_contiguous()
    assert handle.source is source
    assert source.gathered == 0


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda kv: kv + 1,
    "radd": lambda kv: 1 + kv,
    "index": lambda kv: kv[:, :, -1],
    "mask": lambda kv: kv[kv > 0],
    "transpose": lambda kv: kv.transpose(2, 3),
    "repeat": lambda kv: kv.repeat_interleave(2, dim=1),
    "expand": lambda kv: kv[:, :, None].expand(3, 2, 2, 5, 4),
    "reshape": lambda kv: kv.reshape(6, 20),
    "cast": lambda kv: kv.to(torch.float16),
    "split": lambda kv: kv.split([1, 3], dim=-1),
    "cat of two handles": lambda kv: torch.cat([kv, kv], dim=2),
    "matmul": lambda kv: torch.ones(3, 2, 1, 4) @ kv.transpose(-1, -2),
    "einsum": lambda kv: torch.einsum("bhkd,bhkd->bhk", kv, kv),
    "pad": lambda kv: F.pad(kv, (0, 4)),
    "sdpa": lambda kv: F.scaled_dot_product_attention(torch.ones(3, 2, 1, 4), kv, kv),
    "where in a keyword": lambda kv: torch.where(kv > 0, input=kv, other=torch.zeros(1)),
    "sum": lambda kv: kv.sum(),
    "detach": lambda kv: kv.detach(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gathers_once_and_returns_plain_tensors(name: str) -> None:
    source = Source()
    handle = handle_of(source)
    results = [OPERATIONS[name](handle), OPERATIONS[name](handle)]
    assert source.gathered == 1
    expected = OPERATIONS[name](source.dense)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        parts = result if isinstance(result, tuple) else [result]
        assert not any(isinstance(part, LazyKV) for part in parts)


def test_dense_is_the_gathered_tensor_itself() -> None:
    source = Source()
    handle = handle_of(source)
    assert handle.dense() is source.dense
    assert handle.dense() is source.dense
    assert source.gathered == 1
