"""Attention over dense K/V against the formula in float64, query by query."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from branchkv.kernels import dense
from branchkv.kernels.dense import causal_attention, causal_mask, dense_attention
from branchkv.kernels.options import AttentionOptions

pytestmark = pytest.mark.usefixtures("one_thread")

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

HEADS = [(3, 3), (2, 8), (1, 5)]  # (kv_heads, query_heads)
OPTIONS = ["plain", "softcap", "sinks", "bias", "everything"]
MASKS = ["none", "bool", "additive", "per row"]
ROWS, QUERIES, KEYS, KEY_DIM, VALUE_DIM = 2, 5, 9, 16, 12


def draw(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=shape)).float().double()


def inputs(rng: np.random.Generator, heads: tuple[int, int], queries: int = QUERIES, keys: int = KEYS) -> Inputs:
    return (
        draw(rng, ROWS, heads[1], queries, KEY_DIM),
        draw(rng, ROWS, heads[0], keys, KEY_DIM),
        draw(rng, ROWS, heads[0], keys, VALUE_DIM),
    )


def make_options(rng: np.random.Generator, heads: int, option: str) -> AttentionOptions:
    everything = option == "everything"
    return AttentionOptions(
        scale=0.3,
        softcap=1.2 if option == "softcap" or everything else None,
        sinks=draw(rng, heads) if option == "sinks" or everything else None,
        bias=draw(rng, 1, heads, QUERIES, KEYS) if option == "bias" or everything else None,
    )


def make_mask(rng: np.random.Generator, kind: str) -> torch.Tensor | None:
    """Every query sees at least its own key."""
    if kind == "none":
        return None
    seen = torch.from_numpy(rng.random((ROWS if kind == "per row" else 1, 1, QUERIES, KEYS)) < 0.6)
    seen[..., -QUERIES:] |= torch.eye(QUERIES, dtype=torch.bool)
    if kind != "additive":
        return seen
    return draw(rng, *seen.shape).masked_fill(~seen, -math.inf)


def formula(given: Inputs, options: AttentionOptions, mask: torch.Tensor | None) -> torch.Tensor:
    """softmax(softcap(scale * q k) + bias + mask, sink) v, for one query after another."""
    query, key, value = given
    rows, heads, queries, _ = query.shape
    out = torch.zeros((rows, heads, queries, value.shape[-1]), dtype=torch.float64)
    for row, head, place in itertools.product(range(rows), range(heads), range(queries)):
        of = head // (heads // key.shape[1])
        scores = key[row, of] @ query[row, head, place] * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if options.bias is not None:
            scores = scores + options.bias.expand(rows, heads, queries, -1)[row, head, place]
        if mask is not None:
            here = mask.expand(rows, heads, queries, -1)[row, head, place]
            scores = scores.masked_fill(~here, -math.inf) if here.dtype == torch.bool else scores + here
        weights = scores.exp()
        total = weights.sum() + (0 if options.sinks is None else options.sinks[head].exp())
        out[row, head, place] = (weights / total) @ value[row, of]
    return out


def in_single(value: torch.Tensor | None) -> Any:
    return value if value is None or value.dtype == torch.bool else value.float()


def singles(given: Inputs) -> Inputs:
    query, key, value = given
    return query.float(), key.float(), value.float()


def assert_close(got: torch.Tensor, given: Inputs, options: AttentionOptions, mask: Any, roundings: int) -> None:
    """Equal to the formula but for rounding.

    A score is off by at most `roundings` units of the sum of its absolute products. A weight is as far off relatively,
    and goes into two sums over the keys: of the values, and of the weights that divide them.
    """
    query, key, value = (tensor.double() for tensor in given)
    want = formula((query, key, value), options, mask)
    products = query.abs() @ key.abs().repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(-1, -2)
    off = roundings * float(products.max()) * options.scale + key.shape[2]
    assert got.shape == want.shape
    assert float((got.double() - want).abs().max()) <= 2 * off * torch.finfo(got.dtype).eps * float(value.abs().max())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("heads", HEADS)
def test_equals_the_formula(heads: tuple[int, int], option: str, mask: str) -> None:
    rng = np.random.default_rng([HEADS.index(heads), OPTIONS.index(option), MASKS.index(mask)])
    given, options, seen = inputs(rng, heads), make_options(rng, heads[1], option), make_mask(rng, mask)
    assert_close(dense_attention(*given, options, seen), given, options, seen, KEY_DIM)
    single = replace(options, sinks=in_single(options.sinks), bias=in_single(options.bias))
    got = dense_attention(*singles(given), single, in_single(seen))
    assert got.dtype == torch.float32
    assert_close(got, given, options, seen, KEY_DIM)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("option", OPTIONS)
def test_half_precision(option: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    query, key, value = (tensor.to(dtype) for tensor in inputs(rng, (2, 4)))
    options, seen = make_options(rng, 4, option), make_mask(rng, "bool")
    got = dense_attention(query, key, value, options, seen)
    assert got.dtype == dtype
    assert_close(got, (query, key, value), options, seen, 1)  # sums inside are float32


@pytest.mark.parametrize("option", ["plain", "bias", "everything"])
def test_what_is_masked_does_not_matter(option: str) -> None:
    rng = np.random.default_rng(2)
    query, key, value = inputs(rng, (2, 4))
    options, seen = make_options(rng, 4, option), torch.ones((1, 1, 1, KEYS), dtype=torch.bool)
    seen[..., [0, 4]] = False
    want = dense_attention(query, key, value, options, seen)
    key[:, :, [0, 4]], value[:, :, [0, 4]] = 50.0, -50.0
    torch.testing.assert_close(dense_attention(query, key, value, options, seen), want)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 6), (4, 4), (3, 8), (0, 3)])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
def test_causal_mask(window: int | None, queries: int, keys: int) -> None:
    got = causal_mask(queries, keys, window, torch.device("cpu"))
    assert (got.dtype, got.shape) == (torch.bool, (queries, keys))
    for query, key in itertools.product(range(queries), range(keys)):
        behind = (keys - queries + query) - key  # the last query stands at the last key
        assert bool(got[query, key]) == (0 <= behind < (math.inf if window is None else window))


@pytest.mark.parametrize("option", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
@pytest.mark.parametrize("tokens", [1, 2, 7, 11])
def test_causal_attention_equals_the_formula(
    tokens: int, window: int | None, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 4 queries, so that chunks and windows meet in every way."""
    monkeypatch.setattr(dense, "CHUNK", 4)
    rng = np.random.default_rng([tokens, window or 0])
    given, options = inputs(rng, (2, 4), tokens, tokens), make_options(rng, 4, option)
    seen = torch.tensor([[0 <= q - k < (window or tokens) for k in range(tokens)] for q in range(tokens)])
    assert_close(causal_attention(*given, options, window), given, options, seen, KEY_DIM)
    single = replace(options, sinks=in_single(options.sinks))
    assert_close(causal_attention(*singles(given), single, window), given, options, seen, KEY_DIM)


def test_long_prompts_in_chunks_of_the_real_size() -> None:
    tokens, options = dense.CHUNK + 3, AttentionOptions(scale=0.3, softcap=5.0)
    given = inputs(np.random.default_rng(0), (1, 1), tokens, tokens)
    for window in (None, 5):
        got = causal_attention(*given, options, window)
        whole = dense_attention(*given, options, causal_mask(tokens, tokens, window, torch.device("cpu")))
        torch.testing.assert_close(got, whole)
