"""Several new tokens per sequence: every implementation against float64, token by token from the tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from branchkv.kernels import cpu_layout
from branchkv.kernels.attention import attention
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan, make_plan
from branchkv.kernels.reference import reference_attention
from branchkv.kernels.torch_forked import torch_attention
from branchkv.tests.kernels.forked_tables import forked_tables

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, KV_HEADS, DIM = 4, 2, 16


def one_row(given: tuple[torch.Tensor, ...], made: dict[str, Any], plan: AttentionPlan, row: int, options: Any) -> Any:
    query, keys, values = given
    length, end, size = int(plan.lengths[row]), int(plan.ends[row]), plan.block_size
    table = made["tables"][int(plan.sequence[row])]
    positions = range(0 if plan.window is None else max(0, length - plan.window), length)
    slots = [int(table[at // size]) * size + at % size for at in positions]
    seen = torch.tensor(list(positions))
    outs, lses = [], []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = keys[slots, kv_head] @ query[row, head] * options.scale
        if options.bias is not None:
            scores = scores + options.bias[row, head, 0, options.bias.shape[-1] - end + seen]
        if options.alibi_slopes is not None:
            scores = scores + options.alibi_slopes[head] * (seen - (length - 1))
        logits = scores if options.sinks is None else torch.cat([scores, options.sinks[head : head + 1]])
        outs.append(logits.softmax(0)[: len(slots)] @ values[slots, kv_head])
        lses.append(logits.logsumexp(0))
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("min_run", [1, 256])
@pytest.mark.parametrize("option", ["plain", "bias", "alibi", "sinks"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block_size", [1, 3, 32])
def test_several_queries(
    block_size: int, window: int | None, option: str, min_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_layout, "MIN_RUN", min_run)
    rng = np.random.default_rng([block_size, window or 0, min_run])
    torch.manual_seed(0)
    made = forked_tables(rng, rows=7, columns=6, block_size=block_size, queries=5)
    null = (int(made["tables"].max()) + 1) * block_size
    plan = make_plan(**made, null_slot=null, window=window)
    query = torch.randn(plan.rows, HEADS, DIM, dtype=torch.float64)
    keys, values = (torch.full((null + 1, KV_HEADS, DIM), torch.nan, dtype=torch.float64) for _ in range(2))
    used = sorted(
        {
            int(table[at // block_size]) * block_size + at % block_size
            for table, end, count in zip(made["tables"], made["lengths"], made["queries"], strict=True)
            for at in range(0 if window is None else max(0, end - count + 1 - window), end)
        }
    )
    keys[used], values[used] = (torch.randn(len(used), KV_HEADS, DIM, dtype=torch.float64) for _ in range(2))
    keys[null], values[null] = 0, 0
    most = int(made["lengths"].max())
    options = AttentionOptions(
        scale=0.25,
        bias=torch.randn(plan.rows, HEADS, 1, most, dtype=torch.float64) if option == "bias" else None,
        alibi_slopes=torch.rand(HEADS, dtype=torch.float64) if option == "alibi" else None,
        sinks=torch.randn(HEADS, dtype=torch.float64) if option == "sinks" else None,
    )
    want = [one_row((query, keys, values), made, plan, row, options) for row in range(plan.rows)]
    for run in (reference_attention, torch_attention):
        out, lse = attention(query, keys, values, plan, options, run)
        # Sums of at most 192 products and weights in float64, a factor of 10 above their rounding.
        torch.testing.assert_close(out, torch.stack([o for o, _ in want]), rtol=0, atol=192 * 2.3e-16 * 10)
        torch.testing.assert_close(lse, torch.stack([x for _, x in want]), rtol=0, atol=192 * 2.3e-16 * 10)


def test_rows_that_share_blocks_but_are_sorted_apart() -> None:
    """The window has left block 0 of the last row only, so another row stands between it and the one it shares with."""
    tables = np.array([[*range(40), -1], [0, *range(200, 239), -1], [*range(40), 100]])
    plan = make_plan(tables, np.array([640, 640, 656]), block_size=16, null_slot=5000, window=640)
    assert_like_float64(plan)


def assert_like_float64(plan: AttentionPlan) -> None:
    torch.manual_seed(0)
    query = torch.randn(plan.rows, HEADS, DIM, dtype=torch.float64)
    keys, values = (torch.randn(5001, KV_HEADS, DIM, dtype=torch.float64) for _ in range(2))
    options = AttentionOptions(scale=0.3)
    got = attention(query, keys, values, plan, options, torch_attention)
    for value, exact in zip(got, attention(query, keys, values, plan, options, reference_attention), strict=True):
        torch.testing.assert_close(value, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("run", [reference_attention, torch_attention])
def test_what_a_row_does_not_see_has_no_weight_however_low_its_scores(run: Any) -> None:
    """In fp16 real scores reach the lowest numbers there are; the newest token, unseen by row 0, has the highest."""
    plan = make_plan(np.array([[0]]), np.array([3]), block_size=16, null_slot=16, queries=np.array([2]))
    keys, values = torch.zeros(17, 1, 4, dtype=torch.float16), torch.zeros(17, 1, 4, dtype=torch.float16)
    keys[:3, 0, 0] = torch.tensor([160.0, 160.0, -160.0])
    values[:3, 0, 0] = torch.tensor([1.0, 3.0, 100.0])
    query = torch.zeros(2, 1, 4, dtype=torch.float16)
    query[:, 0, 0] = -160.0
    out, lse = attention(query, keys, values, plan, AttentionOptions(scale=1.0), run)
    assert out[:, 0, 0].tolist() == [2.0, 100.0]
    assert lse[:, 0].tolist() == pytest.approx([-25600 + math.log(2), 25600])


@pytest.mark.parametrize("run", [reference_attention, torch_attention])
def test_a_row_whose_bias_leaves_it_nothing_is_zero(run: Any) -> None:
    plan = make_plan(np.array([[0], [1]]), np.array([3, 3]), block_size=16, null_slot=32)
    query, pool = torch.ones(2, 1, 4), torch.ones(33, 1, 4)
    bias = torch.zeros(2, 1, 1, 3)
    bias[0] = -torch.inf
    out, lse = attention(query, pool, pool, plan, AttentionOptions(scale=1.0, bias=bias), run)
    assert out[:, 0, 0].tolist() == [0.0, 1.0]
    assert lse[:, 0].tolist() == [-torch.inf, pytest.approx(4 + math.log(3))]
