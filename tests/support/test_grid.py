"""The cover stands for the whole product: it must hold what it promises, and be the same on every run."""

from __future__ import annotations

import itertools

import pytest

from support.families import FAMILIES
from support.grid import BLOCK_SIZES, EARLY_STOPPING, LENGTH_PENALTIES, Cell, full_product, pairwise

FACTORS = ("family", "mode", "prompts", "early_stopping", "length_penalty", "block_size")


def pairs(cells: list[Cell]) -> set[tuple[object, ...]]:
    return {
        (a, repr(getattr(cell, a)), b, repr(getattr(cell, b)))
        for cell in cells
        for a, b in itertools.combinations(FACTORS, 2)
    }


def test_the_cover_holds_every_pair() -> None:
    chosen = pairwise()
    assert len(chosen) <= 300
    assert len({cell.id for cell in chosen}) == len(chosen)
    assert pairs(chosen) == pairs(list(full_product()))
    assert chosen == pairwise(), "the choice is not deterministic"


def test_the_cover_holds_the_triples_it_promises() -> None:
    chosen, every = pairwise(), list(full_product())
    for factors in (("family", "mode", "prompts"), ("mode", "early_stopping", "length_penalty")):
        held, wanted = ({tuple(repr(getattr(c, f)) for f in factors) for c in cells} for cells in (chosen, every))
        assert held == wanted
    with pytest.raises(ValueError, match="more than 100"):
        pairwise(max_cells=100)


def test_the_product_is_whole_and_repeats_nothing() -> None:
    cells = list(full_product())
    searches = len(EARLY_STOPPING) * len(LENGTH_PENALTIES)
    assert len(cells) == len(FAMILIES) * 2 * len(BLOCK_SIZES) * (2 + 5 * searches)
    assert len({cell.id for cell in cells}) == len(cells)
    ids = {cell.id: cell for cell in cells}
    cell = ids["llama-beam5-batch-es_never-lp2-bs16"]
    assert cell.settings["early_stopping"] == "never" and cell.settings["num_return_sequences"] == 5
    assert "early_stopping" not in ids["whisper-greedy-one-bs1"].settings
