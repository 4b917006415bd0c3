"""The product of settings under which results must equal HuggingFace's, and a small cover of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from support.families import FAMILIES, MAX_NEW_TOKENS

EarlyStopping = bool | Literal["never"]

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample3": {"do_sample": True, "num_return_sequences": 3},
    "beam1": {"num_beams": 1},
    "beam2": {"num_beams": 2},
    "beam5": {"num_beams": 5},
    "beam8": {"num_beams": 8},
    "beamsample4": {"num_beams": 4, "do_sample": True},
}
# Without a search these settings mean nothing: the cell has None, and the product is not repeated for them. `beam1`
# keeps them: HF takes them beside num_beams=1 and returns greedy text, and so must we.
MODES_WITHOUT_SEARCH = ("greedy", "sample3")
PROMPTS: dict[str, int] = {"one": 1, "batch": 5}
EARLY_STOPPING: tuple[EarlyStopping, ...] = (True, False, "never")
LENGTH_PENALTIES = (-1.0, 0.0, 1.0, 2.0)
BLOCK_SIZES = (1, 3, 16, 512)


@dataclass(frozen=True)
class Cell:
    """One combination. `early_stopping` and `length_penalty` are None where the mode has no search."""

    family: str
    mode: str
    prompts: str
    early_stopping: EarlyStopping | None
    length_penalty: float | None
    block_size: int

    @property
    def id(self) -> str:
        """A stable name, such as llama-beam5-batch-es_never-lp2-bs16."""
        parts = [self.family, self.mode, self.prompts]
        if self.length_penalty is not None:
            parts += [f"es_{self.early_stopping}", f"lp{self.length_penalty:g}"]
        return "-".join([*parts, f"bs{self.block_size}"])

    @property
    def batch(self) -> int:
        """The number of prompts."""
        return PROMPTS[self.prompts]

    @property
    def settings(self) -> dict[str, Any]:
        """What to pass to HF's `generate` and to ours, beside the inputs and our block size."""
        return settings(self.family, self.mode, self.early_stopping, self.length_penalty)


def settings(
    family: str, mode: str, early_stopping: EarlyStopping | None = None, length_penalty: float | None = None
) -> dict[str, Any]:
    """Keyword arguments of `generate` for one mode; beams return all their hypotheses, so that all are compared."""
    chosen = MODES[mode] | {"max_new_tokens": MAX_NEW_TOKENS}
    if early_stopping is not None:
        chosen |= {"early_stopping": early_stopping, "length_penalty": length_penalty}
    if family == "whisper":
        # Its generate samples only where a temperature is given (then always with one beam), and returns one
        # hypothesis for each of num_return_sequences copies of a prompt.
        return chosen | ({"temperature": 1.0} if "do_sample" in chosen else {})
    return chosen | ({"num_return_sequences": chosen["num_beams"]} if "num_beams" in chosen else {})


def full_product() -> Iterator[Cell]:
    """Every cell, families outermost."""
    for family, mode, prompts in itertools.product(FAMILIES, MODES, PROMPTS):
        yield from _completions(family, mode, prompts)


def pairwise(max_cells: int = 300) -> list[Cell]:
    """A deterministic choice of cells that holds every pair of values of any two factors that can occur together.

    Beyond pairs it holds every (family, mode, prompts), which is what the forward depends on, and every
    (mode, early_stopping, length_penalty), which is what the search depends on. Raises ValueError if that takes more
    than `max_cells`.
    """
    open_goals = {goal for cell in full_product() for goal in goals(cell)}
    used: Counter[object] = Counter()
    chosen: list[Cell] = []

    def take(candidates: list[Cell]) -> None:
        # Among cells that reach as many open goals, the one whose values were used least keeps the cover balanced.
        best = max(candidates, key=lambda cell: (len(open_goals & goals(cell)), -sum(used[v] for v in _values(cell))))
        chosen.append(best)
        used.update(_values(best))
        open_goals.difference_update(goals(best))

    for family, mode, prompts in itertools.product(FAMILIES, MODES, PROMPTS):
        take(list(_completions(family, mode, prompts)))
    while open_goals:
        take([cell for cell in full_product() if open_goals & goals(cell)])
    if len(chosen) > max_cells:
        raise ValueError(f"the cover takes {len(chosen)} cells, more than {max_cells}")
    return chosen


def goals(cell: Cell) -> frozenset[tuple[object, ...]]:
    """What a cell contributes to a cover: pairs of (factor, value) and the two triples `pairwise` promises."""
    family, mode, prompts, early_stopping, length_penalty, _ = values = _values(cell)
    triples = [(family, mode, prompts), (mode, early_stopping, length_penalty)]
    return frozenset([*itertools.combinations(values, 2), *triples])


def _values(cell: Cell) -> tuple[tuple[str, object], ...]:
    # By name of the value: True == 1 and 1 == 1.0 must not be taken for each other.
    return tuple((name, str(getattr(cell, name))) for name in Cell.__dataclass_fields__)


def _completions(family: str, mode: str, prompts: str) -> Iterator[Cell]:
    search: list[tuple[EarlyStopping | None, float | None]] = [(None, None)]
    if mode not in MODES_WITHOUT_SEARCH:
        search = list(itertools.product(EARLY_STOPPING, LENGTH_PENALTIES))
    for (early_stopping, length_penalty), block_size in itertools.product(search, BLOCK_SIZES):
        yield Cell(family, mode, prompts, early_stopping, length_penalty, block_size)
