"""Equality with HF generate: tokens, beam_indices and scores, family by family and setting by setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import branchkv
from support.families import FAMILIES
from support.grid import Cell, full_product, pairwise
from support.oracle import Result, assert_same, expected, rescorer, run

pytestmark = pytest.mark.usefixtures("one_thread")


def _decode(cell: Cell, **kv: Any) -> tuple[Result, Result, int]:
    """Ours, HF's, and the number of ties that rounding decided."""
    family = FAMILIES[cell.family]
    inputs = family.prompts(cell.batch)
    generate = partial(branchkv.generate, family.model, kv=branchkv.KVConfig(block_size=cell.block_size, **kv))
    ours = run(generate, family.model, inputs, cell.settings)
    theirs = expected(family, cell.settings, cell.batch)
    sampled = cell.settings.get("do_sample", False)
    ties = assert_same(
        ours,
        theirs,
        rescorer=None if sampled else rescorer(family.model, inputs),
        length_penalty=1.0 if cell.length_penalty is None else cell.length_penalty,
    )
    return ours, theirs, ties


@pytest.mark.parametrize("cell", pairwise(), ids=lambda cell: cell.id)
def test_equals_hf(cell: Cell) -> None:
    _, _, ties = _decode(cell)
    assert ties == 0, "the seeds were chosen so that no two candidates tie"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["greedy", "beam5", "sample3"])
@pytest.mark.parametrize(("attention", "block_size"), [("reference", 3), ("torch", 16)])
def test_other_attention_gives_the_same(family: str, mode: str, attention: str, block_size: int) -> None:
    search = mode.startswith("beam")
    cell = Cell(family, mode, "batch", False if search else None, 1.0 if search else None, block_size)
    _decode(cell, attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_three_implementations_give_the_same(family: str) -> None:
    """Few tokens: Triton's interpreter takes a second for each."""
    built = FAMILIES[family]
    model: Any = built.model
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 4, **built.prompts(2)}
    theirs = model.generate(**options)
    for attention in ("reference", "torch", "triton"):
        kv = branchkv.KVConfig(block_size=16, attention=attention)
        assert torch.equal(branchkv.generate(model, kv=kv, **options), theirs), attention


@pytest.mark.parity
@pytest.mark.timeout(0)
def test_full_product() -> None:
    """Every cell; prints how many there were, how many rows ended early, and how many ties rounding decided."""
    counts: Counter[str] = Counter()
    failures = []
    for cell in _announced(full_product()):
        try:
            ours, _, ties = _decode(cell)
        except AssertionError as error:
            failures.append(f"{cell.id}: {error}")
            continue
        counts["cells"] += 1
        counts["ties"] += ties
        counts["rows"] += len(ours.rows)
        counts["early"] += round(ours.early * len(ours.rows))
    share = counts["early"] / max(counts["rows"], 1)
    print(
        f"\nparity: {counts['cells']} cells equal to HF, {len(failures)} differ; {counts['rows']} rows, {share:.0%} of "
        f"them ended early; {counts['ties']} ties decided by rounding"
    )
    assert not failures, "\n".join(failures[:20])
    assert share >= 0.25, "too few hypotheses end early for the comparison to mean anything"
    assert counts["ties"] <= counts["rows"] // 1000


def _announced(cells: Iterator[Cell]) -> Iterator[Cell]:
    """Say where a long run is."""
    family = ""
    for cell in cells:
        if cell.family != family:
            family = cell.family
            print(f"\n{family} ...", end="", flush=True)
        yield cell


def test_global_generator_is_left_as_hf_leaves_it() -> None:
    family = FAMILIES["llama"]
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12, **family.prompts(5)}
    model: Any = family.model
    states = []
    for generate in (model.generate, partial(branchkv.generate, model)):
        torch.manual_seed(3)
        generate(**options)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
