"""Rows from which nothing can be chosen."""

from __future__ import annotations

import math

import pytest
import torch

from branchkv.decoding.checks import check_rows
from branchkv.errors import NumericalError

PROMPTS = torch.tensor([4, 4, 7])


@pytest.mark.parametrize("best", [[0.0, -1.0, 2.0], [-3e38, 3e38, 1e-45], []])
def test_finite_scores_pass(best: list[float]) -> None:
    check_rows(torch.tensor(best), PROMPTS[: len(best)], 0, "logits")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-math.inf, "every continuation is banned (-inf)"),
        (math.inf, "logits contain inf"),
        (math.nan, "logits contain nan"),
    ],
)
@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_error_names_prompt_step_and_reason(row: int, value: float, reason: str) -> None:
    best = torch.zeros(3)
    best[row] = value
    with pytest.raises(NumericalError) as error:
        check_rows(best, PROMPTS, 12, "logits")
    facts = (error.value.prompt, error.value.step, error.value.reason)
    assert facts == (int(PROMPTS[row]), 12, reason)
    assert str(error.value) == f"prompt {PROMPTS[row]}, step 12: {reason}"


def test_the_first_bad_row_is_named() -> None:
    with pytest.raises(NumericalError, match=r"prompt 4, step 0: scores contain nan"):
        check_rows(torch.tensor([0.0, math.nan, -math.inf]), PROMPTS, 0, "scores")
