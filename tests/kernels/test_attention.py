"""The operator over block tables against plain attention, row by row and in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from branchkv.kernels import cpu_chunks, cpu_layout
from branchkv.kernels.attention import attention
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.reference import reference_attention
from branchkv.kernels.torch_forked import torch_attention
from branchkv.tests.kernels.problems import Problem, plain, problem, used_slots

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = [(3, 3), (2, 8), (1, 5)]  # (kv_heads, query_heads): 1:1, 4:1, and one for all
DIMS = [(1, 1), (17, 17), (64, 64), (80, 80), (24, 40), (40, 8)]  # (key_dim, value_dim)
OPTIONS = ["plain", "window", "softcap", "sinks", "bias", "everything"]


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


WAYS = {"all-runs": (1, False), "some-runs": (40, True), "chunks": (10**9, True), "gathered": (10**9, False)}


@pytest.fixture(autouse=True, params=WAYS.values(), ids=list(WAYS))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tables with runs wherever rows share a token, with few or none, and the rest in chunks or gathered."""
    runs, chunks = request.param
    monkeypatch.setattr(cpu_layout, "MIN_RUN", runs)
    monkeypatch.setattr(cpu_chunks, "MIN_BLOCK", 1)
    monkeypatch.setattr(cpu_chunks, "MIN_TOKENS", 1 if chunks else 10**9)


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
    for seed, dim in enumerate((64, 80, 17, 64, 80)):
        assert_as_good_as_eager(problem(seed, dims=(dim, dim), option=option, dtype=dtype), run, dtype)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 64, 128])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("run", [reference_attention, torch_attention])
def test_every_block_size(run: Any, option: str, block_size: int) -> None:
    seed = OPTIONS.index(option) * 10 + block_size
    given = problem(seed, option=option, block_size=block_size, longest=3 * block_size + 40)
    assert_as_good_as_eager(given, run, torch.float32)


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
