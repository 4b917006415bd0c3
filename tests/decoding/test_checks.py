"""Scores from which nothing can be chosen name the prompt and the step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from branchkv.decoding.checks import check_choice, check_numbers
from branchkv.errors import NumericalError

PROMPTS = torch.tensor([0, 0, 4])


@pytest.mark.parametrize("check", [check_choice, check_numbers])
def test_finite_scores_pass(check: Callable[..., None]) -> None:
    check(torch.tensor([0.0, -1e30, 3.0]), PROMPTS, 0)


@pytest.mark.parametrize("check", [check_choice, check_numbers])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_bad_row_is_named(check: Callable[..., None], value: float) -> None:
    with pytest.raises(NumericalError, match=f"prompt 4, step 12: .*{value}") as error:
        check(torch.tensor([0.0, 1.0, value]), PROMPTS, 12)
    assert (error.value.prompt, error.value.step) == (4, 12)


def test_a_row_with_everything_banned_is_no_choice_but_no_bad_number() -> None:
    best = torch.tensor([0.0, -math.inf, 1.0])
    check_numbers(best, PROMPTS, 3)
    with pytest.raises(NumericalError, match="prompt 0, step 3: every continuation is banned"):
        check_choice(best, PROMPTS, 3)


def test_a_bad_number_comes_before_a_ban() -> None:
    with pytest.raises(NumericalError, match="prompt 4"):
        check_choice(torch.tensor([-math.inf, 0.0, math.nan]), PROMPTS, 0)
