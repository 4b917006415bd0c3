"""`beam_step` as the tests call it, and its state read as lists of beams."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from branchkv.decoding.beam_step import BeamRule, BeamState, BeamStep, beam_step, top_candidates
from branchkv.decoding.draws import top_picker
from branchkv.tests.decoding.list_beams import Beam, EarlyStopping

INF = math.inf
STOPPING: tuple[EarlyStopping, ...] = (False, True, "never")
PENALTIES = (-1.0, 0.0, 1.0, 2.0)


def make_rule(
    num_beams: int, penalty: float = 1.0, stopping: EarlyStopping = False, eos: Sequence[int] = (0,)
) -> BeamRule:
    return BeamRule(num_beams, penalty, stopping, max(2, 1 + len(eos)) * num_beams)


def start(num_beams: int, *limits: int) -> BeamState:
    return BeamState.start(num_beams, torch.tensor(limits))


def advance(state: BeamState, log_probs: torch.Tensor, rule: BeamRule, eos: Sequence[int] = (0,)) -> BeamStep:
    """One step, with log-probs [prompts, beams, vocabulary]; only ends and the limit stop a hypothesis."""

    def pick(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return top_picker(scores, count, torch.arange(len(scores)))

    candidates = top_candidates(log_probs, state.scores, rule.candidates, pick)
    stops = torch.isin(candidates.tokens, torch.tensor(list(eos), dtype=torch.int64))
    stops |= (state.limits <= state.steps + 1)[:, None]
    return beam_step(state, candidates, stops, rule)


def random_table(rng: np.random.Generator, shape: tuple[int, ...], banned: float) -> torch.Tensor:
    """Log-probs, a share `banned` of which is -inf."""
    table = torch.from_numpy(rng.normal(scale=3.0, size=shape)).float().log_softmax(-1)
    return table.masked_fill(torch.from_numpy(rng.random(shape) < banned), -INF)


def running(state: BeamState, prompt: int = 0) -> list[Beam]:
    return _beams(state.scores[prompt], state.tokens[prompt], state.ancestry[prompt])


def finished(state: BeamState, prompt: int = 0) -> list[Beam]:
    return _beams(state.done_scores[prompt], state.done_tokens[prompt], state.done_ancestry[prompt])


def _beams(scores: torch.Tensor, tokens: torch.Tensor, ancestry: torch.Tensor) -> list[Beam]:
    """The beams that exist; they come first, best first, and the rest is -inf."""
    exist = scores > -INF
    assert exist.tolist() == sorted(exist.tolist(), reverse=True)
    assert (scores.diff()[exist[1:]] <= 0).all()
    return [
        Beam(np.float32(score), tuple(t for t in text if t >= 0), tuple(p for p in parents if p >= 0))
        for score, text, parents in zip(scores.tolist(), tokens.tolist(), ancestry.tolist(), strict=True)
        if score > -INF
    ]
