"""What the operator refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from branchkv.errors import InvalidArgumentError
from branchkv.kernels.attention import attention
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import make_plan
from branchkv.kernels.reference import reference_attention
from branchkv.kernels.torch_forked import torch_attention
from branchkv.tests.kernels.problems import problem

OPTIONS = AttentionOptions(scale=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 8, 17)}, r"query: expected \d+ rows, those of the plan, got 2"),
        ({"query": torch.zeros(8, 17)}, r"query: expected 3 dimensions, got \[8, 17\]"),
        ({"query": "narrow"}, r"query: expected head size 17, as key_pool, got 16"),
        ({"query": "odd"}, r"query: expected a multiple of 2 heads, got 7"),
        ({"query": "strided"}, r"query: expected a stride of 1 within a head, got \(272, 34, 2\)"),
        ({"query": "whole"}, r"query: expected float16, .*, got torch.int64"),
        ({"query": "elsewhere"}, r"key_pool: expected a tensor on meta, as query, got cpu"),
        ({"values": torch.zeros(5, 3, 17)}, r"value_pool: expected 2 heads, as key_pool, got 3"),
        (
            {"values": torch.zeros(5, 2, 17).half()},
            r"value_pool: expected torch.float32, .* got torch.float16",
        ),
        ({"values": torch.zeros(5, 2, 17)}, r"value_pool: expected at least \d+ slots, which the plan names, got 5"),
        ({"bias": (1, 1, 1, 1)}, r"bias: expected at least \d+ columns, got 1"),
        ({"bias": (1, 3, 1, 99)}, r"bias: expected 1 or 8 heads, got 3"),
        ({"bias": (2, 8, 1, 99)}, r"bias: expected 1 or \d+ rows, got 2"),
        ({"bias": (1, 8, 2, 99)}, r"bias: expected 1 query per row, got 2"),
        ({"query": [[[1.0]]]}, r"query: expected a torch.Tensor, got list"),
        ({"softcap": float("inf")}, r"softcap: expected more than 0 and finite, or None, got inf"),
        ({"sinks": torch.zeros(8, dtype=torch.int64)}, r"sinks: expected a floating-point dtype, got torch.int64"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    given = problem(6, prompts=4).to(torch.float32)
    query = given.query
    replacements = {
        "narrow": query[:, :, :16],
        "odd": query[:, :7],
        "strided": query.repeat_interleave(2, dim=2)[..., ::2],
        "whole": query.long(),
        "elsewhere": query.to("meta"),
    }
    query = change.get("query", given.query)
    query = replacements[query] if isinstance(query, str) else query
    bias = torch.zeros(change["bias"]) if "bias" in change else None
    options = replace(given.options, bias=bias, softcap=change.get("softcap"), sinks=change.get("sinks"))
    with pytest.raises(InvalidArgumentError, match=message):
        attention(query, given.keys, change.get("values", given.values), given.plan, options)


@pytest.mark.parametrize("run", [reference_attention, torch_attention])
def test_a_sink_for_every_head_is_needed(run: Any) -> None:
    given = problem(6, option="sinks").to(torch.float32)
    options = replace(given.options, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="sinks: expected 8"):
        attention(given.query, given.keys, given.values, given.plan, options, run)


def test_a_plan_for_another_device_is_refused() -> None:
    given = problem(6).to(torch.float32)
    tables = given.tables
    shape: dict[str, Any] = {"block_size": tables.block_size, "null_slot": tables.null_slot}
    plan = make_plan(tables.blocks, tables.lengths, **shape, device=torch.device("meta"))
    with pytest.raises(InvalidArgumentError, match="plan: expected a plan on cpu, as query"):
        attention(given.query, given.keys, given.values, plan, given.options)


@pytest.mark.parametrize("run", [reference_attention, torch_attention])
def test_no_rows(run: Any) -> None:
    plan = make_plan(np.empty((0, 3), dtype=np.int64), np.empty(0, dtype=np.int64), block_size=16, null_slot=16)
    out, lse = attention(torch.zeros(0, 4, 8), torch.zeros(17, 2, 8), torch.zeros(17, 2, 5), plan, OPTIONS, run)
    assert (out.shape, lse.shape) == ((0, 4, 5), (0, 4))
