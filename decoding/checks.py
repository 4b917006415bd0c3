"""Scores from which nothing can be chosen are an error that names prompt and step, never a silent choice."""

from __future__ import annotations

import torch

from branchkv.errors import NumericalError

__all__ = ["check_rows"]


def check_rows(best: torch.Tensor, prompts: torch.Tensor, step: int, what: str) -> None:
    """Raise NumericalError for the first row whose best score is NaN, +inf, or -inf (everything banned).

    Args:
        best: [rows] highest score of each row.
        prompts: [rows] prompt of each row.
        step: tokens generated so far.
        what: what the scores are, for the message.
    """
    bad = ~torch.isfinite(best)
    if not bad.any():
        return
    row = int(bad.nonzero()[0])
    value = float(best[row])
    reason = "every continuation is banned (-inf)" if value == float("-inf") else f"{what} contain {value}"
    raise NumericalError(int(prompts[row]), step, reason)
