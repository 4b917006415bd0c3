"""What a search tells the loop after each step, and how it picks it up: one small copy to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from branchkv.decoding.history import Prompts
from branchkv.paged_cache.block_pool import Ids

__all__ = ["Hypotheses", "Search", "SearchInputs", "Step"]


@dataclass(frozen=True)
class Step:
    """The rows that go on. Host integers, but for the tokens.

    Attributes:
        parents: [rows] row of the step before that each row continues; in the first step, whose rows are the prompts'
            lanes, ``prompt * width + lane``.
        prompts: [rows] prompt of each row, ascending.
        tokens: [rows] token that each row goes on with, on the device.
        chosen: [places] token chosen for every lane of the call, -1 for those that had ended before; None where the
            choice may still be revised (beams).
    """

    parents: Ids
    prompts: Ids
    tokens: torch.Tensor
    chosen: torch.Tensor | None


@dataclass(frozen=True)
class Hypotheses:
    """What one prompt ended with, best first (samples: in the order of their numbers).

    Attributes:
        tokens: [n, steps] generated tokens, -1 after the end.
        ancestry: [n, steps] beam that each token continued, -1 after the end; None for samples.
        scores: [n] float32, -inf where the prompt has fewer hypotheses than asked; None for samples.
    """

    tokens: torch.Tensor
    ancestry: torch.Tensor | None = None
    scores: torch.Tensor | None = None


@dataclass(frozen=True)
class SearchInputs:
    """What every search of a call needs to know.

    Attributes:
        prompts: the call's prompts.
        limits: [prompts] most tokens to generate for each, host integers, at least 1.
        eos: token ids that end a hypothesis.
    """

    prompts: Prompts
    limits: Sequence[int]
    eos: tuple[int, ...]


class Search(Protocol):
    """A way to choose tokens for all prompts of a call. ``width`` rows leave the prefill for each prompt."""

    width: int

    def advance(self, logits: torch.Tensor) -> Step:
        """Choose the next token of every row.

        Args:
            logits: [rows, vocabulary]; rows as of the last Step, at first ``width`` equal rows per prompt.
        """

    def results(self) -> list[Hypotheses]:
        """What each prompt ended with; call when a Step had no rows."""
