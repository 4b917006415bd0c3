"""Plans in memory that never moves: the same results as the plan itself, whatever was loaded before."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels are not interpreted: TRITON_INTERPRET is not 1", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from branchkv.errors import InvalidArgumentError
from branchkv.kernels.attention import attention
from branchkv.kernels.buffers import PlanBuffers, PlanCapacity
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan, make_plan
from branchkv.kernels.triton_configs import packing, tiles
from branchkv.kernels.triton_ops import triton_attention
from branchkv.tests.kernels.forked_tables import forked_tables

pytestmark = pytest.mark.usefixtures("one_thread")

KV_HEADS, HEADS, DIM, BLOCK, SLOTS = 2, 4, 17, 16, 4000
PACKING = packing(tiles(torch.float32, DIM, DIM, BLOCK), KV_HEADS, HEADS // KV_HEADS, DIM, DIM, torch.float32)
CAPACITY = PlanCapacity(sequences=8, columns=8, rows=24, items=60, partials=400, slots=SLOTS)
OPTIONS = AttentionOptions(scale=0.25)


def plan_of(seed: int, rows: int, columns: int, **more: Any) -> AttentionPlan:
    made = forked_tables(np.random.default_rng(seed), rows=rows, columns=columns, block_size=BLOCK, queries=3)
    return make_plan(**made, null_slot=SLOTS, **more)


def tensors(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    shapes = ((rows, HEADS, DIM), (SLOTS + 1, KV_HEADS, DIM), (SLOTS + 1, KV_HEADS, DIM))
    query, keys, values = (torch.randn(*shape) for shape in shapes)
    return query, keys, values


def addresses(buffers: PlanBuffers) -> list[int]:
    work = buffers.work(PACKING)
    every = (buffers.tables, buffers.sequence, buffers.lengths, buffers.ends, buffers.order)
    return [tensor.data_ptr() for tensor in (*every, work.items, work.offsets, work.slots)]


def test_one_plan_after_another_in_the_same_memory() -> None:
    buffers = PlanBuffers(CAPACITY, PACKING, BLOCK)
    before = addresses(buffers)
    query, keys, values = tensors(CAPACITY.rows)
    for seed, (rows, columns) in enumerate([(5, 6), (8, 8), (1, 1), (3, 7)]):
        plan = plan_of(seed, rows, columns)
        buffers.load(plan)
        got = triton_attention(query, keys, values, buffers, OPTIONS)
        want = triton_attention(query[: plan.rows], keys, values, plan, OPTIONS)
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine[: plan.rows], theirs)
        assert addresses(buffers) == before


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        ({"sequences": 7}, "at most 7 sequences"),
        ({"columns": 7}, "at most 7 columns"),
        ({"rows": 8}, "at most 8 rows"),
        ({"items": 1}, "at most 1 items"),
    ],
)
def test_a_plan_that_is_too_large_is_refused_and_the_last_one_stays(capacity: dict[str, int], message: str) -> None:
    buffers = PlanBuffers(PlanCapacity(**{**vars(CAPACITY), **capacity}), PACKING, BLOCK)
    buffers.load(plan_of(2, 1, 1))
    before = buffers.lengths.clone(), buffers.work(PACKING).items.clone()
    with pytest.raises(InvalidArgumentError, match=message):
        buffers.load(plan_of(1, 8, 8))
    assert torch.equal(buffers.lengths, before[0])
    assert torch.equal(buffers.work(PACKING).items, before[1])


def test_a_plan_that_names_slots_beyond_the_pools_is_refused() -> None:
    plan = plan_of(1, 8, 8)
    slots = plan.largest_block * BLOCK
    buffers = PlanBuffers(PlanCapacity(**{**vars(CAPACITY), "slots": slots}), PACKING, BLOCK)
    with pytest.raises(InvalidArgumentError, match=f"at most {slots} slots"):
        buffers.load(plan)


def test_tensors_that_do_not_fit_the_capacity_are_refused() -> None:
    buffers = PlanBuffers(CAPACITY, PACKING, BLOCK)
    buffers.load(plan_of(1, 8, 8))
    query, keys, values = tensors(CAPACITY.rows)
    with pytest.raises(InvalidArgumentError, match="query: expected 24 rows"):
        triton_attention(query[:1], keys, values, buffers, OPTIONS)
    with pytest.raises(InvalidArgumentError, match="value_pool: expected at least 4000 slots"):
        triton_attention(query, keys, values[:100], buffers, OPTIONS)
    with pytest.raises(InvalidArgumentError, match="plan: expected an AttentionPlan, got PlanBuffers"):
        attention(query, keys, values, buffers, OPTIONS)  # type: ignore[arg-type]


def test_plans_of_another_kind_are_refused() -> None:
    buffers = PlanBuffers(CAPACITY, PACKING, BLOCK)
    with pytest.raises(InvalidArgumentError, match="window None"):
        buffers.load(plan_of(1, 2, 2, window=5))
    with pytest.raises(InvalidArgumentError, match="that of the buffers"):
        buffers.work(packing(tiles(torch.float32, 64, 64, BLOCK), KV_HEADS, 2, 64, 64, torch.float32))


def test_what_is_not_of_the_plan_is_padding() -> None:
    buffers = PlanBuffers(CAPACITY, PACKING, BLOCK)
    buffers.load(plan_of(1, 8, 8))
    plan = plan_of(2, 1, 1)
    buffers.load(plan)
    work, own = buffers.work(PACKING), plan.work(PACKING)
    assert torch.equal(work.items[: len(own.items)], own.items)
    assert not work.items[len(own.items) :].any()
    assert (work.offsets[plan.rows :] == own.offsets[-1]).all()
