"""HF's beam search once more, in lists: what `beam_step` and the loop are compared with.

Beams that cannot be reached are simply not in the lists. Numbers are single float32 scalars, so that sums and quotients
round as they do in tensors and results can be compared without a tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

EarlyStopping = bool | Literal["never"]


class Tie(Exception):
    """Two candidates have the same score, so that both orders are right."""


@dataclass(frozen=True)
class Beam:
    """A running beam, or a hypothesis when `score` has been divided by its length."""

    score: np.float32
    tokens: tuple[int, ...] = ()
    ancestry: tuple[int, ...] = ()


@dataclass
class ListBeams:
    """The beam search of one prompt.

    Attributes:
        candidates: continuations looked at; None for HF's number.
        limit: most tokens.
        parents: of the last step, the beam that each running beam continues.
        ended: whether the search is over.
    """

    num_beams: int
    length_penalty: float
    early_stopping: EarlyStopping
    eos: Sequence[int]
    limit: int
    candidates: int | None = None
    running: list[Beam] = field(default_factory=lambda: [Beam(np.float32(0.0))])
    finished: list[Beam] = field(default_factory=list)
    improvable: bool = True
    ended: bool = False

    @property
    def parents(self) -> list[int]:
        return [beam.ancestry[-1] for beam in self.running]

    def step(self, log_probs: Sequence[Sequence[float]]) -> None:
        """Take one token; `log_probs` [running beams][vocabulary]."""
        length = len(self.running[0].tokens) + 1
        looked_at = self._look_at(log_probs)
        stops = [beam.tokens[-1] in self.eos or length >= self.limit for beam in looked_at]
        was_full = len(self.finished) == self.num_beams
        if self.improvable and not (self.early_stopping is True and was_full):
            for beam, stop in list(zip(looked_at, stops, strict=True))[: self.num_beams]:
                if stop:
                    score = np.float32(beam.score / np.float32(length**self.length_penalty))
                    self.finished.append(Beam(score, beam.tokens, beam.ancestry))
            self.finished = _best_first(self.finished)[: self.num_beams]
        self.running = [beam for beam, stop in zip(looked_at, stops, strict=True) if not stop][: self.num_beams]
        self.improvable = self.improvable and self._can_improve(length)
        full = len(self.finished) == self.num_beams
        self.ended = not self.improvable or (self.early_stopping is True and full)

    def _look_at(self, log_probs: Sequence[Sequence[float]]) -> list[Beam]:
        count = self.candidates
        if count is None:
            count = max(2, 1 + len(self.eos)) * self.num_beams
        everything = [
            Beam(np.float32(beam.score + np.float32(value)), (*beam.tokens, token), (*beam.ancestry, number))
            for number, (beam, row) in enumerate(zip(self.running, log_probs, strict=True))
            for token, value in enumerate(row)
            if value > -math.inf
        ]
        ranked = _best_first(everything)
        if count < len(ranked) and ranked[count].score == ranked[count - 1].score:
            raise Tie
        return ranked[:count]

    def _can_improve(self, length: int) -> bool:
        if not self.running:
            return False
        if len(self.finished) < self.num_beams:
            return True
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.limit
        best = np.float32(self.running[0].score / np.float32(length**self.length_penalty))
        return bool(best > self.finished[-1].score)


def _best_first(beams: Iterable[Beam]) -> list[Beam]:
    ranked = sorted(beams, key=lambda beam: -beam.score)
    if any(a.score == b.score for a, b in itertools.pairwise(ranked)):
        raise Tie
    return ranked
