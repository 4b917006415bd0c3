"""Scores from which nothing can be chosen are an error that names prompt and step, never a silent choice."""

from __future__ import annotations

import torch

from branchkv.errors import NumericalError

__all__ = ["check_choice", "check_numbers"]


def check_numbers(best: torch.Tensor, prompts: torch.Tensor, step: int) -> None:
    """Raise NumericalError for the first row whose best score is NaN or +inf.

    Args:
        best: [rows] highest processed score of each row; NaN anywhere in a row makes it NaN.
        prompts: [rows] prompt of each row.
        step: tokens generated so far.
    """
    bad = torch.isnan(best) | torch.isposinf(best)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise NumericalError(int(prompts[row]), step, f"the scores of the next token contain {float(best[row])}")


def check_choice(best: torch.Tensor, prompts: torch.Tensor, step: int) -> None:
    """``check_numbers``, and refuse rows in which every token is banned; arguments as there."""
    check_numbers(best, prompts, step)
    banned = torch.isneginf(best)
    if banned.any():
        raise NumericalError(int(prompts[banned][0]), step, "every continuation is banned (-inf)")
