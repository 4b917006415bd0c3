"""One step of beam search as a pure function: HF's algorithm, for all prompts at once.

The algorithm is that of ``GenerationMixin._beam_search`` of transformers 5.24, with one change: what cannot be reached
has score -inf where HF has -1e9, so that it can never pass for a hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
import torch.nn.functional as F

__all__ = ["BeamRule", "BeamState", "BeamStep", "Candidates", "beam_step", "top_candidates"]

Picker = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class BeamRule:
    """Settings of a beam search, with the names and meanings of GenerationConfig.

    Attributes:
        num_beams: beams per prompt.
        length_penalty: a hypothesis of n tokens scores ``sum of log-probs / n ** length_penalty``.
        early_stopping: True ends a prompt at num_beams hypotheses; False and "never" when no beam can improve them.
        candidates: continuations looked at per prompt and step, at least ``num_beams``.
    """

    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    candidates: int


@dataclass(frozen=True)
class BeamState:
    """Where the search of each prompt stands after ``steps`` tokens. Token and ancestry tensors are int64.

    Attributes:
        scores: [prompts, beams] float32 sum of log-probs of each running beam; -inf: no such beam.
        tokens: [prompts, beams, steps] tokens of the running beams.
        ancestry: [prompts, beams, steps] beam that each token continued.
        done_scores: [prompts, beams] scores of the best hypotheses, descending; -inf: none yet.
        done_tokens, done_ancestry: [prompts, beams, steps] of those hypotheses, -1 after their end.
        improvable: [prompts] bool, False once no running beam could enter the hypotheses.
        limits: [prompts] most tokens to generate.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    ancestry: torch.Tensor
    done_scores: torch.Tensor
    done_tokens: torch.Tensor
    done_ancestry: torch.Tensor
    improvable: torch.Tensor
    limits: torch.Tensor

    @classmethod
    def start(cls, num_beams: int, limits: torch.Tensor) -> BeamState:
        """The state before the first token: one beam per prompt. ``limits``: [prompts] int64."""
        prompts, device = len(limits), limits.device
        scores = torch.full((prompts, num_beams), float("-inf"), device=device)
        empty = torch.empty((prompts, num_beams, 0), dtype=torch.int64, device=device)
        done = scores.clone()
        scores[:, 0] = 0.0
        improvable = torch.ones(prompts, dtype=torch.bool, device=device)
        return cls(scores, empty, empty, done, empty, empty, improvable, limits)

    @property
    def steps(self) -> int:
        """Tokens generated so far."""
        return self.tokens.shape[-1]

    def select(self, prompts: torch.Tensor) -> BeamState:
        """The state of some prompts only."""
        return BeamState(**{f.name: getattr(self, f.name)[prompts] for f in fields(self)})


@dataclass(frozen=True)
class Candidates:
    """The continuations of one step that were looked at, best first.

    Attributes:
        scores: [prompts, candidates] float32 sum of log-probs, -inf where there is none.
        parents: [prompts, candidates] beam that is continued.
        tokens: [prompts, candidates] token that continues it.
    """

    scores: torch.Tensor
    parents: torch.Tensor
    tokens: torch.Tensor

    def take(self, order: torch.Tensor) -> Candidates:
        """Candidates in another order; ``order``: [prompts, n]."""
        return Candidates(*(getattr(self, f.name).gather(1, order) for f in fields(self)))


@dataclass(frozen=True)
class BeamStep:
    """Result of a step: the new state, each beam's parent and token, and which prompts have ended."""

    state: BeamState
    parents: torch.Tensor
    tokens: torch.Tensor
    ended: torch.Tensor


def top_candidates(log_probs: torch.Tensor, scores: torch.Tensor, count: int, pick: Picker) -> Candidates:
    """The best ``count`` continuations of each prompt over all its beams.

    Args:
        log_probs: [prompts, beams, vocabulary] processed log-probs of the next token.
        scores: [prompts, beams] sums so far.
        count: how many to take; fewer where beams * vocabulary is smaller.
        pick: takes [prompts, beams * vocabulary] and a count, returns (scores, indices), descending.
    """
    prompts, beams, vocabulary = log_probs.shape
    flat = (log_probs + scores[:, :, None]).view(prompts, beams * vocabulary)
    best, index = pick(flat, min(count, flat.shape[1]))
    return Candidates(best, index // vocabulary, index % vocabulary)


def beam_step(state: BeamState, candidates: Candidates, stops: torch.Tensor, rule: BeamRule) -> BeamStep:
    """Choose the beams that go on and file the hypotheses that ended.

    Args:
        state: before this token.
        candidates: from ``top_candidates``.
        stops: [prompts, candidates] bool, whether that continuation ends its hypothesis.
        rule: settings.
    """
    stops = stops | torch.isneginf(candidates.scores)
    running = candidates.scores.masked_fill(stops, float("-inf"))
    best = running.topk(rule.num_beams, dim=1)
    chosen = candidates.take(best.indices)
    scores, tokens, ancestry = _file(state, candidates, stops, rule)
    new = BeamState(
        scores=best.values,
        tokens=_extend(state.tokens, chosen.parents, chosen.tokens),
        ancestry=_extend(state.ancestry, chosen.parents, chosen.parents),
        done_scores=scores,
        done_tokens=tokens,
        done_ancestry=ancestry,
        improvable=state.improvable,
        limits=state.limits,
    )
    improvable = state.improvable & _improvable(new, rule)
    ended = ~improvable | stops.all(1)
    if rule.early_stopping is True:
        ended = ended | ~torch.isneginf(scores).any(1)
    return BeamStep(replace(new, improvable=improvable), chosen.parents, chosen.tokens, ended)


def _file(
    state: BeamState, candidates: Candidates, stops: torch.Tensor, rule: BeamRule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge the candidates that ended into the hypotheses; returns their new (scores, tokens, ancestry).

    Only candidates ranked among the first ``num_beams`` may enter: the others are there to keep the beams filled.
    """
    ranked = torch.arange(stops.shape[1], device=stops.device) < rule.num_beams
    may_enter = state.improvable
    if rule.early_stopping is True:
        may_enter = may_enter & torch.isneginf(state.done_scores).any(1)
    length = state.steps + 1
    ending = candidates.scores / length**rule.length_penalty
    ending = ending.masked_fill(~(stops & ranked & may_enter[:, None]), float("-inf"))
    merged = torch.cat([state.done_scores, ending], dim=1).topk(rule.num_beams, dim=1)
    old = merged.indices.clamp(max=rule.num_beams - 1)
    is_old = (merged.indices < rule.num_beams)[:, :, None]
    entered = candidates.take((merged.indices - rule.num_beams).clamp(min=0))
    absent = torch.isneginf(merged.values)[:, :, None]

    def merge(done: torch.Tensor, running: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        kept = _gather(F.pad(done, (0, 1), value=-1), old)
        return torch.where(is_old, kept, _extend(running, entered.parents, new)).masked_fill(absent, -1)

    tokens = merge(state.done_tokens, state.tokens, entered.tokens)
    ancestry = merge(state.done_ancestry, state.ancestry, entered.parents)
    return merged.values, tokens, ancestry


def _improvable(state: BeamState, rule: BeamRule) -> torch.Tensor:
    """[prompts] whether the best running beam could still beat the worst hypothesis, by HF's estimate of its length."""
    if rule.early_stopping == "never" and rule.length_penalty > 0.0:
        length = state.limits.to(torch.float64)
    else:
        length = torch.full_like(state.limits, state.steps, dtype=torch.float64)
    best = state.scores[:, 0] / (length**rule.length_penalty).to(state.scores.dtype)
    return best > state.done_scores[:, -1]


def _extend(past: torch.Tensor, parents: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """[prompts, n, steps + 1]: the past of each parent and one new entry; parents and new: [prompts, n]."""
    return torch.cat([_gather(past, parents), new[:, :, None]], dim=2)


def _gather(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Pick along dimension 1; values [prompts, n, steps], order [prompts, m]."""
    return values.gather(1, order[:, :, None].expand(-1, -1, values.shape[2]))
