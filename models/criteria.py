"""HF's stopping criteria, split into what the search decides itself and what it has to ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import stopping_criteria as hf

from branchkv.decoding.protocol import Criterion

__all__ = ["Ends", "split_criteria"]

Scores = tuple[torch.Tensor, ...] | None


@dataclass(frozen=True)
class Ends:
    """When a hypothesis ends.

    Attributes:
        eos: token ids that end it.
        max_length: most tokens, the padded prompt included; None where only other criteria end it.
        criteria: everything else.
    """

    eos: tuple[int, ...]
    max_length: int | None
    criteria: list[Criterion]


def split_criteria(criteria: Sequence[Any], scores: Callable[[], Scores], prompts: int, fill: int) -> Ends:
    """Read end tokens and length off HF's own criteria; adapt the others.

    Args:
        criteria: HF's prepared list, the user's own included.
        scores: the per-step scores so far, None unless they are kept.
        prompts: prompts of the call.
        fill: token that stands after the end of a row.
    """
    eos: list[int] = []
    lengths: list[int] = []
    others: list[Criterion] = []
    for criterion in criteria:
        if type(criterion) is hf.EosTokenCriteria:
            eos.extend(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is hf.MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) in (hf.StopStringCriteria, hf.MaxTimeCriteria):
            others.append(_RunningRows(criterion, scores, fill))
        else:
            others.append(_WholeLayout(criterion, scores, prompts, fill))
    return Ends(tuple(eos), min(lengths, default=None), others)


class _RunningRows:
    """A criterion that looks at one row at a time: asked about the rows that run."""

    def __init__(self, criterion: Any, scores: Callable[[], Scores], fill: int) -> None:
        self._criterion, self._scores, self._fill = criterion, scores, fill

    def __call__(self, ids: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        hit: torch.Tensor = self._criterion(ids.masked_fill(ids < 0, self._fill), self._scores())
        return torch.as_tensor(hit, dtype=torch.bool, device=ids.device).expand(len(ids))


class _WholeLayout:
    """Any other criterion: sees all rows of the call as HF shows them, ended prompts as they were last."""

    def __init__(self, criterion: Any, scores: Callable[[], Scores], prompts: int, fill: int) -> None:
        self._criterion, self._scores, self._prompts, self._fill = criterion, scores, prompts, fill
        self._last: torch.Tensor | None = None

    def __call__(self, ids: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        running = torch.unique(prompts)
        per_prompt = len(ids) // len(running)
        full = torch.full((self._prompts, per_prompt, ids.shape[1]), self._fill, dtype=ids.dtype, device=ids.device)
        if self._last is not None and self._last.shape[1] == per_prompt:
            full[:, :, : self._last.shape[2]] = self._last
        full[running] = ids.masked_fill(ids < 0, self._fill).view(len(running), per_prompt, -1)
        self._last = full
        hit = torch.as_tensor(self._criterion(full.flatten(0, 1), self._scores()), dtype=torch.bool, device=ids.device)
        return hit.expand(self._prompts * per_prompt).view(self._prompts, per_prompt)[running].flatten()
