"""The Triton kernels in Triton's interpreter, against float64 computed row by row from the tables."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels are not interpreted: TRITON_INTERPRET is not 1", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from branchkv.errors import InvalidArgumentError
from branchkv.kernels import triton_ops
from branchkv.kernels.cost import GPU_COST, CostModel
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan, make_plan
from branchkv.kernels.planner import Planner
from branchkv.kernels.triton_configs import Tiles, packing, tiles
from branchkv.tests.kernels.forked_tables import forked_tables

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = float("nan")
# Sharing always pays and nothing is cut; and everything is cut, so that there is much to merge.
SHARE_ALL = CostModel(processors=1, fixed=0.0, bandwidth=1.0, rate=1e12, merge=0.0, reread=1.0)
CUT_ALL = CostModel(processors=4096, fixed=0.0, bandwidth=1.0, rate=1e12, merge=0.0, reread=1.0)
COSTS = [GPU_COST, SHARE_ALL, CUT_ALL]
HEADS = [(3, 3), (2, 8), (1, 5)]
DIMS = [(1, 1), (17, 17), (64, 64), (80, 80), (24, 40), (40, 8)]


@dataclass(frozen=True)
class Problem:
    """Inputs in float64 that the dtype under test holds exactly; slots that no row reads are NaN."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    made: dict[str, Any]
    plan: AttentionPlan
    options: AttentionOptions

    def to(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query and pools; the pools are stored head by head, as in production."""
        keys, values = (
            pool.to(dtype).transpose(0, 1).contiguous().transpose(0, 1) for pool in (self.keys, self.values)
        )
        return self.query.to(dtype), keys, values


def problem(
    seed: int, block_size: int, heads: tuple[int, int], dims: tuple[int, int], option: str, dtype: torch.dtype
) -> Problem:
    rng = np.random.default_rng(seed)
    everything = option == "everything"
    window = int(rng.integers(1, 60)) if option == "window" or everything else None
    rows, columns = int(rng.integers(2, 9)), max(2, 96 // block_size)
    made = forked_tables(rng, rows=rows, columns=columns, block_size=block_size, queries=3, roots=1)
    slots = (int(made["tables"].max()) + 1) * block_size
    made["window"], made["null_slot"] = window, slots
    base = make_plan(**made)
    cost = COSTS[seed % len(COSTS)]
    plan = AttentionPlan(base.sequences, base.sequence_order, base.nodes, slots, None, cost)
    kv_heads, query_heads = heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype).double()

    keys, values = (torch.full((slots + 1, kv_heads, dim), NAN, dtype=torch.float64) for dim in dims)
    used = written_slots(plan, made["tables"])
    keys[used], values[used] = draw(len(used), kv_heads, dims[0]), draw(len(used), kv_heads, dims[1])
    bias = None
    if option == "bias" or everything:
        shape = (plan.rows, query_heads) if rng.integers(2) else (1, 1)
        bias = draw(*shape, 1, int(made["lengths"].max()) + 3)
        bias[..., :3] = NAN  # columns of no token
    options = AttentionOptions(
        scale=dims[0] ** -0.5,
        softcap=1.5 if option == "softcap" or everything else None,
        sinks=draw(query_heads) if option == "sinks" or everything else None,
        bias=bias,
        alibi_slopes=draw(query_heads).abs() / 4 if option == "alibi" or everything else None,
    )
    return Problem(draw(plan.rows, query_heads, dims[0]), keys, values, made, plan, options)


def written_slots(plan: AttentionPlan, tables: Any) -> list[int]:
    """Slots from the first to the last token that any row sees in a block."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for row in range(plan.rows):
        for at in visible(plan, row):
            block, offset = int(tables[int(plan.sequence[row])][at // plan.block_size]), at % plan.block_size
            first[block] = min(offset, first.get(block, offset))
            last[block] = max(offset, last.get(block, offset))
    return [block * plan.block_size + at for block in first for at in range(first[block], last[block] + 1)]


def visible(plan: AttentionPlan, row: int) -> list[int]:
    length = int(plan.lengths[row])
    return list(range(0 if plan.window is None else max(0, length - plan.window), length))


def row_by_row(given: Problem, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention from the tables alone: products in ``dtype``, scores and softmax at least in float32."""
    query, keys, values = given.to(dtype)
    options, plan = given.options, given.plan
    wide = torch.promote_types(dtype, torch.float32)
    heads, group = query.shape[1], query.shape[1] // keys.shape[1]
    outs, lses = [], []
    for row in range(plan.rows):
        table, seen = given.made["tables"][int(plan.sequence[row])], visible(plan, row)
        slots = [int(table[at // plan.block_size]) * plan.block_size + at % plan.block_size for at in seen]
        key, value = (pool[slots].repeat_interleave(group, dim=1).transpose(0, 1) for pool in (keys, values))
        scores = (key @ query[row, :, :, None]).squeeze(2).to(wide) * options.scale
        positions = torch.tensor(seen)
        if options.softcap is not None:
            scores = options.softcap * (scores / options.softcap).tanh()
        if options.bias is not None:
            mine = options.bias.expand(plan.rows, heads, 1, -1)[row, :, 0]
            scores = scores + mine[:, mine.shape[1] - int(plan.ends[row]) + positions].to(wide)
        if options.alibi_slopes is not None:
            scores = scores + options.alibi_slopes.to(wide)[:, None] * (positions - int(plan.lengths[row]) + 1)
        if options.sinks is not None:
            scores = torch.cat([scores, options.sinks.to(wide)[:, None]], dim=1)
        weights = scores.softmax(-1)[:, : len(seen)].to(dtype)
        outs.append((weights[:, None] @ value).squeeze(1))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses)


def rms(error: torch.Tensor) -> float:
    return float(error.square().mean().sqrt())


def assert_as_exact_as_eager(
    given: Problem, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, pool_dtype: torch.dtype | None = None
) -> None:
    """RMS error at most twice that of the same sums in ``dtype`` by torch, and half a unit in the last place."""

    def poisoned(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, NAN, dtype=dtype, device=like.device)

    monkeypatch.setattr(triton_ops, "_allocate", poisoned)
    query, keys, values = given.to(dtype)
    if pool_dtype is not None:
        keys, values = keys.to(pool_dtype), values.to(pool_dtype)
    exact, eager = row_by_row(given, torch.float64), row_by_row(given, dtype)
    got = triton_ops.triton_attention(query, keys, values, given.plan, given.options)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    for mine, theirs, right in zip(got, eager, exact, strict=True):
        ulp = torch.finfo(mine.dtype).eps * rms(right)
        assert rms(mine.double() - right) <= 2 * rms(theirs.double() - right) + ulp / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("option", ["plain", "window", "softcap", "sinks", "bias", "alibi", "everything"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_attention(block_size: int, option: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["plain", "window", "softcap", "sinks", "bias", "alibi", "everything"]
    seed = names.index(option) * 5 + block_size // 16 + dtype.itemsize
    given = problem(seed, block_size, HEADS[seed % 3], DIMS[seed % 6], option, dtype)
    assert_as_exact_as_eager(given, dtype, monkeypatch)


@pytest.mark.parametrize("cost", range(3), ids=["gpu", "share all", "cut all"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads_and_dims(
    heads: tuple[int, int], dims: tuple[int, int], cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = problem(3 * sum(dims) + cost, 16, heads, dims, "everything", torch.float32)
    assert_as_exact_as_eager(given, torch.float32, monkeypatch)


@pytest.mark.parametrize("softcap", [15.0, 50.0, 1e5])
def test_a_high_softcap_loses_nothing(softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tanh of small numbers, where differences of exponentials would cancel."""
    for seed in range(4):
        given = problem(seed, 16, (2, 8), (64, 64), "plain", torch.float32)
        given = replace(given, options=replace(given.options, softcap=softcap))
        assert_as_exact_as_eager(given, torch.float32, monkeypatch)


def test_items_hold_for_lengths_that_fall_within_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(0, 16, (2, 8), (17, 17), "plain", torch.float32)
    pool = torch.randn(64, 2, 17).double()
    planner = Planner(16, 63, 20, None)
    tables, later, plans = np.array([[0, 1, 2]]), [44, 38, 47, 36], []
    for length in later:
        plans.append(planner.plan(tables, np.array([length])))
        plans[-1].work(packing(tiles(torch.float32, 17, 17, 16), 2, 4, 17, 17, torch.float32))
    for length, plan in zip(later, plans, strict=True):
        made = {"tables": tables, "lengths": np.array([length]), "block_size": 16}
        query = torch.randn(1, 8, 17).double()
        made_problem = replace(given, query=query, keys=pool, values=pool, made=made, plan=plan)
        assert_as_exact_as_eager(made_problem, torch.float32, monkeypatch)


def test_slots_between_the_windows_of_two_rows_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rows are in one item, one sees the first and one the last tokens of their common block."""
    given = problem(0, 16, (1, 1), (17, 17), "plain", torch.float32)
    tables, lengths = np.array([[0], [0]]), np.array([9, 60])
    made = {"tables": tables, "lengths": lengths, "block_size": 64}
    base = make_plan(tables, lengths, block_size=64, null_slot=64, window=5)
    plan = AttentionPlan(base.sequences, base.sequence_order, base.nodes, 64, None, SHARE_ALL)
    pool = torch.full((65, 1, 17), NAN, dtype=torch.float64)
    seen = [*range(4, 9), *range(55, 60)]
    pool[seen] = torch.randn(len(seen), 1, 17).float().double()
    query = torch.randn(2, 1, 17).float().double()
    assert_as_exact_as_eager(
        replace(given, query=query, keys=pool, values=pool, made=made, plan=plan), torch.float32, monkeypatch
    )


def test_a_row_whose_bias_leaves_it_nothing_is_zero() -> None:
    plan = make_plan(np.array([[0], [1]]), np.array([3, 3]), block_size=16, null_slot=32)
    query, pool, bias = torch.ones(2, 1, 4), torch.ones(33, 1, 4), torch.zeros(2, 1, 1, 3)
    bias[0] = -torch.inf
    out, lse = triton_ops.triton_attention(query, pool, pool, plan, AttentionOptions(scale=1.0, bias=bias))
    assert out[:, 0, 0].tolist() == [0.0, 1.0]
    assert lse[0, 0] == -torch.inf


def many_rows(dtype: torch.dtype) -> Problem:
    """30 rows of a group of 4 on one prompt: more than a wide tile holds."""
    given = problem(1, 16, (2, 8), (17, 17), "plain", dtype)
    tables = np.concatenate([np.tile(np.arange(3), (30, 1)), np.arange(3, 33)[:, None]], axis=1)
    made: dict[str, Any] = {
        "tables": tables,
        "lengths": np.arange(30) % 16 + 49,
        "block_size": 16,
        "null_slot": 33 * 16,
    }
    base = make_plan(**made)
    plan = AttentionPlan(base.sequences, base.sequence_order, base.nodes, 33 * 16, None, SHARE_ALL)
    torch.manual_seed(0)
    query, keys, values = (
        torch.randn(*shape, 17).to(dtype).double() for shape in ((30, 8), (33 * 16 + 1, 2), (33 * 16 + 1, 2))
    )
    unused = sorted(set(range(33 * 16 + 1)) - set(written_slots(plan, tables)))
    keys[unused], values[unused] = NAN, NAN
    return replace(given, query=query, keys=keys, values=values, made=made, plan=plan)


def many_rows_work(given: Problem) -> tuple[Tiles, torch.Tensor, int]:
    shape = tiles(torch.float32, 17, 17, 16)
    work = given.plan.work(packing(shape, 2, 4, 17, 17, torch.float32))
    return shape, work.items, work.partials


def test_an_item_of_several_wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    given = many_rows(torch.float32)
    shape, items, partials = many_rows_work(given)
    assert int(items[:, 2].max()) >= shape.wide
    assert partials
    assert_as_exact_as_eager(given, torch.float32, monkeypatch)


def test_padding_items_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = many_rows(torch.float32)
    shape, items, _ = many_rows_work(given)
    key = packing(shape, 2, 4, 17, 17, torch.float32)
    given.plan._work[key] = replace(given.plan.work(key), items=torch.cat([items, torch.zeros_like(items[:3])]))
    assert_as_exact_as_eager(given, torch.float32, monkeypatch)


def test_pools_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(5, 16, (2, 8), (24, 40), "everything", torch.float16)
    assert_as_exact_as_eager(given, torch.float32, monkeypatch, pool_dtype=torch.float16)


def test_a_bias_with_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(4, 16, (2, 8), (17, 17), "bias", torch.float32)
    bias = given.options.bias
    assert bias is not None
    every = torch.stack([bias, bias], dim=-1)[..., 0]
    assert every.stride(-1) == 2
    given = replace(given, options=replace(given.options, bias=every))
    assert_as_exact_as_eager(given, torch.float32, monkeypatch)


@pytest.mark.parametrize("block_size", [1, 8, 24])
def test_block_sizes_that_the_kernel_does_not_take(block_size: int) -> None:
    plan = make_plan(np.array([[0]]), np.array([1]), block_size=block_size, null_slot=block_size)
    pool = torch.zeros(block_size + 1, 1, 4)
    with pytest.raises(InvalidArgumentError, match="multiple of 16"):
        triton_ops.triton_attention(torch.zeros(1, 1, 4), pool, pool, plan, AttentionOptions(scale=1.0))


def test_float64_is_refused() -> None:
    plan = make_plan(np.array([[0]]), np.array([1]), block_size=16, null_slot=16)
    pool = torch.zeros(17, 1, 4, dtype=torch.float64)
    with pytest.raises(InvalidArgumentError, match="float64"):
        triton_ops.triton_attention(pool[:1], pool, pool, plan, AttentionOptions(scale=1.0))


def pools(blocks: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K of 17 and V of 40 in 3 heads, stored head by head; the copies and the writes move bits, so any numbers do."""
    torch.manual_seed(0)
    return tuple(torch.randn(3, blocks * block_size, dim).transpose(0, 1) for dim in (17, 40))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_write_slots(dtype: torch.dtype) -> None:
    key_pool, value_pool = (pool.to(dtype) for pool in pools(4, 16))
    want_keys, want_values = key_pool.clone(), value_pool.clone()
    keys = torch.randn(5, 17, 3).transpose(1, 2).to(dtype)
    values = torch.randn(3, 5, 40).transpose(0, 1).to(dtype)
    slots = torch.tensor([3, -1, 63, 0, 17])
    written = slots >= 0
    want_keys[slots[written]], want_values[slots[written]] = keys[written], values[written]
    triton_ops.write_slots(key_pool, value_pool, slots, keys, values)
    assert torch.equal(key_pool, want_keys)
    assert torch.equal(value_pool, want_values)


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize(
    "copies",
    [[(0, 3)], [(0, 1), (1, 2), (2, 3)], [(2, 3), (1, 2), (0, 1)], [(0, 1), (1, 0)], [(1, 0), (1, 2)], []],
    ids=["one", "chain", "chain backwards", "swap", "one to many", "none"],
)
def test_copy_blocks_as_if_all_at_once(copies: list[tuple[int, int]], block_size: int) -> None:
    source, target = torch.tensor(copies, dtype=torch.int64).reshape(-1, 2).unbind(1)
    for pool in pools(4, block_size):
        want = pool.clone().view(4, block_size, *pool.shape[1:])
        want[target] = want[source]
        triton_ops.copy_blocks(pool, source, target, block_size)
        assert torch.equal(pool, want.view_as(pool))


CHECKS = ("test_schema", "test_faketensor")


def test_operators_describe_themselves() -> None:
    """Schemas say what is written to, and the fake implementations give shapes and dtypes without running."""
    given = problem(3, 16, (2, 8), (24, 40), "everything", torch.float16)
    query, keys, values = given.to(torch.float16)
    plan = given.plan
    shape = tiles(torch.float16, 24, 40, 16)
    work = plan.work(packing(shape, 2, 4, 24, 40, torch.float16))
    step = (work.items, work.offsets, work.slots, plan.order, plan.sequence, plan.lengths, plan.ends, plan.tables)
    arguments = (query, keys, values, *step, None, None, None, 0.5, None, plan.window, 16)
    torch.library.opcheck(triton_ops.paged_attention, arguments, test_utils=CHECKS)
    key_pool, value_pool = pools(2, 16)
    new = (torch.tensor([1, 2]), torch.randn(2, 3, 17), torch.randn(2, 3, 40))
    torch.library.opcheck(triton_ops.write_slots, (key_pool, value_pool, *new), test_utils=CHECKS)
    copies = (key_pool, torch.tensor([0]), torch.tensor([1]), 16)
    torch.library.opcheck(triton_ops.copy_blocks, copies, test_utils=CHECKS)


def test_the_compiler_takes_an_operator_as_it_is() -> None:
    """No graph break, and the same numbers: the compiled graph calls the operator."""
    given = problem(3, 16, (2, 8), (24, 40), "window", torch.float32)
    query, keys, values = given.to(torch.float32)
    plan = given.plan
    work = plan.work(packing(tiles(torch.float32, 24, 40, 16), 2, 4, 24, 40, torch.float32))
    step = (work.items, work.offsets, work.slots, plan.order, plan.sequence, plan.lengths, plan.ends, plan.tables)

    def layer(query: torch.Tensor) -> torch.Tensor:
        options = (None, None, None, 0.5, None, plan.window, 16)
        out: torch.Tensor = triton_ops.paged_attention(query * 2, keys, values, *step, *options)[0]
        return out + 1

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(query), layer(query))
