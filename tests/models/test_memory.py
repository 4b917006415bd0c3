"""How much a cache may take: budgets from settings, true numbers in the refusal, and equal results wherever it fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import branchkv
from branchkv import KVConfig, OutOfBlocksError
from branchkv.models import memory
from branchkv.paged_cache.budget import BlockBudget, ByteBudget
from support.families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
generate: Any = branchkv.generate
BEAMS: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3}
SAMPLES: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3}
LLAMA_TOKEN = 2 * 2 * 2 * 4 * 4  # bytes per token: 2 layers, K and V, 2 heads, 4 numbers, fp32


# Budgets


def test_free_bytes_are_free_on_this_machine() -> None:
    assert 0 < memory.free_bytes(CPU) <= psutil.virtual_memory().total


@pytest.mark.parametrize(("limit", "used", "free"), [(80, 30, 50), (500, 30, 100), (None, 30, 100), (80, None, 100)])
def test_free_bytes_respect_a_container_limit(
    limit: int | None, used: int | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_available_on_host", lambda: 100)
    monkeypatch.setattr(memory, "_read_int", lambda path: limit if path.name == "memory.max" else used)
    assert memory.free_bytes(CPU) == free


def test_unreadable_limits_are_no_limits(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._read_int(tmp_path / "memory.max") is None
    assert memory._read_int(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("config", "kind", "limit"),
    [
        (KVConfig(), ByteBudget, 800),
        (KVConfig(memory=0.25), ByteBudget, 250),
        (KVConfig(memory=1.0), ByteBudget, 1000),
        (KVConfig(memory="2KiB"), ByteBudget, 2048),
        (KVConfig(memory="1.5kB"), ByteBudget, 1500),
        (KVConfig(num_blocks=7), BlockBudget, 7),
    ],
)
def test_the_budget_that_was_asked_for(
    config: KVConfig, kind: type, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    budget = memory.make_budget(config, CPU)
    assert isinstance(budget, kind)
    assert budget.limit == limit


# Calls


def attempt(family: str, kv: KVConfig, **options: Any) -> list[list[int]] | tuple[int, int, int]:
    """What comes out, or the numbers of the refusal."""
    torch.manual_seed(0)
    options = {"max_new_tokens": 8, **options}
    try:
        rows: list[list[int]] = generate(
            FAMILIES[family].model, **FAMILIES[family].prompts(3), **options, kv=kv
        ).tolist()
    except OutOfBlocksError as error:
        return error.needed, error.free, error.total
    return rows


@pytest.mark.parametrize("options", [BEAMS, SAMPLES], ids=["beams", "samples"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "bart"])
def test_a_pool_refuses_with_true_numbers_until_it_fits_and_then_never_matters(
    family: str, options: dict[str, Any]
) -> None:
    unlimited = attempt(family, KVConfig(block_size=4), **options)
    sizes = range(1, 31)
    results = [attempt(family, KVConfig(block_size=4, num_blocks=size), **options) for size in sizes]
    first = next(size for size, result in zip(sizes, results, strict=True) if isinstance(result, list))
    for size, result in zip(sizes, results, strict=True):
        if size >= first:
            assert result == unlimited
        else:
            assert isinstance(result, tuple)
            needed, free, total = result
            assert total == size
            assert 0 <= free < needed
    torch.manual_seed(0)
    inputs = FAMILIES[family].prompts(3)
    asked = {"max_new_tokens": 8, "return_dict_in_generate": True, **options}
    output = generate(FAMILIES[family].model, **inputs, **asked, kv=KVConfig(block_size=4))
    assert output.kv.peak_blocks <= first  # a copy holds its source for a moment more


def test_the_numbers_of_a_refusal_by_hand() -> None:
    """One prompt of 9 tokens, blocks of 4: 3 blocks; three samples copy the last one twice, and part at token 13."""
    one, found = FAMILIES["llama"].prompts(1), []
    options = {**SAMPLES, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 1}
    for size in range(1, 9):
        torch.manual_seed(0)
        try:
            generate(FAMILIES["llama"].model, **one, **options, kv=KVConfig(block_size=4, num_blocks=size))
        except OutOfBlocksError as error:
            found.append((error.needed, error.free, error.total))
            assert all(str(number) in str(error) for number in found[-1])
    assert found == [(3, 1, 1), (3, 2, 2), (2, 0, 3), (2, 1, 4), (3, 0, 5), (3, 1, 6), (3, 2, 7)]


@pytest.mark.parametrize("options", [BEAMS, SAMPLES], ids=["beams", "samples"])
def test_memory_in_bytes_is_that_many_blocks(options: dict[str, Any]) -> None:
    for blocks in range(8, 18):
        size = f"{blocks * 4 * LLAMA_TOKEN + LLAMA_TOKEN}B"
        assert attempt("llama", KVConfig(block_size=4, memory=size), **options) == attempt(
            "llama", KVConfig(block_size=4, num_blocks=blocks), **options
        )


@pytest.mark.parametrize("size", ["1", "100B", "1KB"])
def test_memory_for_less_than_a_block_is_refused(size: str) -> None:
    assert attempt("llama", KVConfig(memory=size), **BEAMS) == (3, 0, 0)


@pytest.mark.parametrize("part", ["64MiB", "0.1GB", 0.5, 1.0])
def test_enough_memory_changes_nothing(part: str | float) -> None:
    assert attempt("llama", KVConfig(memory=part), **BEAMS) == attempt("llama", KVConfig(), **BEAMS)


def test_a_fraction_too_small_is_refused() -> None:
    assert attempt("llama", KVConfig(memory=1e-12), **BEAMS) == (3, 0, 0)


def test_one_limit_at_a_time() -> None:
    with pytest.raises(ValueError, match="memory: expected None beside num_blocks"):
        KVConfig(num_blocks=10**6, memory="1KB")


def test_after_a_refusal_the_next_call_works() -> None:
    before = attempt("llama", KVConfig(), **BEAMS)
    for size in (1, 3, 6):
        assert isinstance(attempt("llama", KVConfig(block_size=4, num_blocks=size), **BEAMS), tuple)
        assert attempt("llama", KVConfig(), **BEAMS) == before
