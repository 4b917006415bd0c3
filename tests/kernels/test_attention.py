"""The operator over block tables against plain attention written out here, row by row and in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from branchkv.errors import UnsupportedOptionError
from branchkv.kernels import plan as plan_module
from branchkv.kernels.attention import attention, implementation
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan, make_plan
from branchkv.kernels.reference import reference_attention
from branchkv.kernels.torch_batched import torch_attention
from branchkv.tests.kernels.random_tables import Tables, random_tables

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = float("nan")
HEADS = [(3, 3), (2, 8), (1, 5)]  # (kv_heads, query_heads): 1:1, 4:1, and one for all
DIMS = [(1, 1), (17, 17), (64, 64), (80, 80), (24, 40), (40, 8)]  # (key_dim, value_dim)
OPTIONS = ["plain", "window", "softcap", "sinks", "bias", "everything"]


@dataclass(frozen=True)
class Problem:
    """Inputs of the operator; what no row may read is NaN."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: Tables
    options: AttentionOptions

    @property
    def plan(self) -> AttentionPlan:
        tables = self.tables
        shape: dict[str, Any] = {"block_size": tables.block_size, "null_slot": tables.null_slot}
        return make_plan(tables.blocks, tables.lengths, **shape, window=tables.window)

    def to(self, dtype: torch.dtype) -> Problem:
        options = {
            name: None if (tensor := getattr(self.options, name)) is None else tensor.to(dtype)
            for name in ("sinks", "bias")
        }
        return Problem(
            *(tensor.to(dtype) for tensor in (self.query, self.keys, self.values)),
            self.tables,
            replace(self.options, **options),
        )


def problem(
    seed: int,
    heads: tuple[int, int] = (2, 8),
    dims: tuple[int, int] = (17, 17),
    option: str = "plain",
    dtype: torch.dtype = torch.float32,
    **layout: Any,
) -> Problem:
    """Values are rounded to `dtype` and returned in float64, so that every precision starts from the same numbers."""
    rng = np.random.default_rng(seed)
    everything = option == "everything"
    window = 9 if option == "window" or everything else None
    tables = random_tables(rng, block_size=int(rng.choice([1, 3, 16])), window=window, **layout)
    rows, (kv_heads, query_heads) = len(tables.lengths), heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype).double()

    keys, values = (torch.full((tables.null_slot + 1, kv_heads, dim), NAN, dtype=torch.float64) for dim in dims)
    used = used_slots(tables)
    keys[used], values[used] = draw(len(used), kv_heads, dims[0]), draw(len(used), kv_heads, dims[1])
    keys[-1], values[-1] = 0, 0  # the null slot reads as zero
    bias = None
    if option == "bias" or everything:
        most = max(len(tables.slots(row)) for row in range(rows))
        bias = draw(rows if everything else 1, query_heads, 1, most + 2)
        bias[..., :2] = NAN  # columns of no token
    options = AttentionOptions(
        scale=dims[0] ** -0.5,
        softcap=1.5 if option == "softcap" or everything else None,
        sinks=draw(query_heads) if option == "sinks" or everything else None,
        bias=bias,
    )
    return Problem(draw(rows, query_heads, dims[0]), keys, values, tables, options)


def used_slots(tables: Tables) -> list[int]:
    return sorted({slot for row in range(len(tables.lengths)) for slot in tables.slots(row).values()})


def plain(given: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each row over the tokens its table names, in the dtype of the inputs, from the tables alone."""
    options, outputs, lses = given.options, [], []
    group = given.query.shape[1] // given.keys.shape[1]
    wide = torch.promote_types(given.query.dtype, torch.float32)
    for row, query in enumerate(given.query):
        slots = list(given.tables.slots(row).values())
        keys, values = (
            pool[slots].repeat_interleave(group, dim=1).transpose(0, 1) for pool in (given.keys, given.values)
        )
        scores = (keys @ query[:, :, None]).squeeze(2).to(wide) * options.scale  # [heads, tokens]
        if options.softcap is not None:
            scores = options.softcap * (scores / options.softcap).tanh()
        if options.bias is not None:
            mine = options.bias[row if len(options.bias) > 1 else 0, :, 0]
            scores = scores + mine[:, mine.shape[1] - len(slots) :]
        if options.sinks is not None:
            scores = torch.cat([scores, options.sinks.to(wide)[:, None]], dim=1)
        weights = scores.softmax(-1)[:, : len(slots)].to(values.dtype)
        outputs.append((weights[:, None] @ values).squeeze(1))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outputs), torch.stack(lses)


def rms(values: torch.Tensor) -> float:
    assert torch.isfinite(values).all()
    return float(values.double().square().mean().sqrt())


def assert_as_good_as_eager(given: Problem, run: Any, dtype: torch.dtype) -> None:
    """At most twice the error of plain attention in the same precision, and half a unit for rounding the result.

    Errors are root mean squares: a largest error is one unlucky element, and compares luck.
    """
    narrow = given.to(dtype)
    output, lse = attention(narrow.query, narrow.keys, narrow.values, narrow.plan, narrow.options, run)
    truth, eager = plain(given), plain(narrow)
    assert (output.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    assert (output.shape, lse.shape) == (truth[0].shape, truth[1].shape)
    for got, rough, exact in zip((output, lse), eager, truth, strict=True):
        rounding = torch.finfo(got.dtype).eps / 2 * rms(exact)
        assert rms(got - exact) <= 2 * rms(rough - exact) + rounding


@pytest.fixture(autouse=True, params=[1, 40, 10**9], ids=["all-runs", "some-runs", "no-runs"])
def min_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The same tables with runs wherever rows share a token, with a few, and without."""
    monkeypatch.setattr(plan_module, "MIN_RUN", request.param)
    return int(request.param)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_both_implementations(heads: tuple[int, int], dims: tuple[int, int], option: str) -> None:
    seed = HEADS.index(heads) * 100 + DIMS.index(dims) * 10 + OPTIONS.index(option)
    given = problem(seed, heads, dims, option, sharing=seed % 3 > 0, scattered=seed % 2 > 0)
    truth = plain(given)
    got = attention(given.query, given.keys, given.values, given.plan, given.options, reference_attention)
    for value, exact in zip(got, truth, strict=True):
        # Both round a score of up to 80 products and a sum of up to 40 weights, some 120 times each, in float64.
        assert rms(value - exact) <= 2 * 120 * torch.finfo(torch.float64).eps * max(1.0, rms(exact))
    assert_as_good_as_eager(given, torch_attention, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("run", [reference_attention, torch_attention])
@pytest.mark.parametrize("option", ["plain", "everything"])
def test_every_precision_is_as_good_as_eager(option: str, run: Any, dtype: torch.dtype) -> None:
    for seed in range(5):
        assert_as_good_as_eager(problem(seed, dims=(64, 64), option=option, dtype=dtype), run, dtype)


@pytest.mark.parametrize("run", [reference_attention, torch_attention])
def test_keys_and_values_may_be_stored_in_less_precision(run: Any) -> None:
    given = problem(1, dtype=torch.bfloat16)
    single = given.to(torch.float32)
    pools = given.keys.bfloat16(), given.values.bfloat16()
    stored = attention(single.query, *pools, given.plan, single.options, run)
    wide = attention(single.query, single.keys, single.values, given.plan, single.options, run)
    assert stored[0].dtype == torch.float32
    assert torch.equal(stored[0], wide[0])
    assert torch.equal(stored[1], wide[1])


@pytest.mark.parametrize("run", [reference_attention, torch_attention])
@pytest.mark.parametrize("rows", [1, None], ids=["for all rows", "row by row"])
@pytest.mark.parametrize("heads", [1, 8], ids=["for all heads", "head by head"])
def test_a_bias_may_be_broadcast(heads: int, rows: int | None, run: Any) -> None:
    given = problem(7, option="everything").to(torch.float32)
    assert given.options.bias is not None
    full = given.options.bias[:rows, :heads]
    small = replace(given, options=replace(given.options, bias=full))
    large = replace(given, options=replace(given.options, bias=full.expand(len(given.query), 8, 1, -1).contiguous()))
    results = (attention(p.query, p.keys, p.values, p.plan, p.options, run) for p in (small, large))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.xfail(strict=True, reason="torch_attention expects all four dimensions; the reference broadcasts")
def test_a_bias_may_leave_out_leading_dimensions() -> None:
    given = problem(7, option="bias").to(torch.float32)
    assert given.options.bias is not None
    options = replace(given.options, bias=given.options.bias[0])
    output, _ = attention(given.query, given.keys, given.values, given.plan, options, torch_attention)
    assert output.shape == given.query.shape


@pytest.mark.parametrize("run", [reference_attention, torch_attention])
def test_large_scores_do_not_overflow(run: Any) -> None:
    given = problem(3)
    given = replace(given, options=AttentionOptions(scale=300.0))
    truth, narrow = plain(given), given.to(torch.float32)
    output, lse = attention(narrow.query, narrow.keys, narrow.values, narrow.plan, narrow.options, run)
    largest = float(truth[1].abs().max())
    assert largest > 1000
    # Scores are sums of 17 products, off by 18 roundings at most; weights are as far off relatively as scores and LSE
    # are absolutely, and go into the sum of the values and into the sum that divides it.
    off = 18 * torch.finfo(torch.float32).eps * largest
    assert rms(lse - truth[1]) <= 2 * off
    assert rms(output - truth[0]) <= 4 * off * float(given.values[used_slots(given.tables)].abs().max())


@pytest.mark.parametrize("run", [reference_attention, torch_attention])
def test_one_token_is_its_own_value(run: Any) -> None:
    given = problem(4, prompts=2, longest=1).to(torch.float32)
    output, _ = attention(given.query, given.keys, given.values, given.plan, given.options, run)
    slots = [given.tables.slots(row)[0] for row in range(len(output))]
    assert torch.equal(output, given.values[slots].repeat_interleave(4, dim=1))


@pytest.mark.parametrize("run", [reference_attention, torch_attention])
def test_inputs_may_be_views_and_stay_as_they_are(run: Any) -> None:
    given = problem(5, option="everything").to(torch.float32)
    want = attention(given.query, given.keys, given.values, given.plan, given.options, run)
    query = given.query.transpose(0, 1).contiguous().transpose(0, 1)
    before = query.clone(), given.keys.clone(), given.values.clone()
    got = attention(query, given.keys, given.values, given.plan, given.options, run)
    assert not query.is_contiguous()
    for value, expected in zip(got, want, strict=True):
        torch.testing.assert_close(value, expected)
    for now, then in zip((query, given.keys, given.values), before, strict=True):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 8, 17)}, r"query: expected \d+ \(rows of the plan\), got 2"),
        ({"query": "narrow"}, r"query: expected 17 \(key_dim of key_pool\), got 16"),
        ({"query": "odd"}, r"query: expected a multiple of 2 heads, got 7"),
        ({"values": torch.zeros(5, 3, 17)}, r"value_pool: expected 2 \(kv_heads of key_pool\), got 3"),
        ({"bias": 1}, r"bias: expected at least \d+ columns, got 1"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    given = problem(6, prompts=4).to(torch.float32)
    replacements = {"narrow": given.query[:, :, :16], "odd": given.query[:, :7]}
    query = change.get("query", given.query)
    query = replacements[query] if isinstance(query, str) else query
    bias = torch.zeros(1, 1, 1, change["bias"]) if "bias" in change else None
    options = replace(given.options, bias=bias)
    with pytest.raises(ValueError, match=message):
        attention(query, given.keys, change.get("values", given.values), given.plan, options)


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="sinks are not checked: torch's own error comes out")
@pytest.mark.parametrize("run", [reference_attention, torch_attention])
def test_a_sink_for_every_head_is_needed(run: Any) -> None:
    given = problem(6, option="sinks").to(torch.float32)
    options = replace(given.options, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="sinks: expected 8"):
        attention(given.query, given.keys, given.values, given.plan, options, run)


def test_implementations_are_chosen_by_name() -> None:
    assert implementation("reference") is reference_attention
    assert implementation("torch") is torch_attention
    assert implementation("auto") is torch_attention


@pytest.mark.parametrize("name", ["triton", "Torch", "eager"])
def test_an_unknown_implementation_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=name) as raised:
        implementation(name)
    assert raised.value.option == f"attention={name!r}"
