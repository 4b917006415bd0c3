"""Beam search and beam sampling over all prompts of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from branchkv.decoding.beam_step import BeamRule, BeamState, BeamStep, Candidates, beam_step, top_candidates
from branchkv.decoding.checks import check_numbers
from branchkv.decoding.history import History
from branchkv.decoding.protocol import Criterion, Processor
from branchkv.decoding.record import Recorder
from branchkv.decoding.step import Hypotheses, SearchInputs, Step
from branchkv.errors import NumericalError

__all__ = ["BeamSearcher", "CandidatePicker"]


class CandidatePicker(Protocol):
    """Picks continuations: the best, or drawn ones (``branchkv.decoding.draws``)."""

    def __call__(self, scores: torch.Tensor, count: int, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, indices), both [rows, count] and descending, of [rows, n] summed log-probs."""


@dataclass(frozen=True)
class _Live:
    """Prompts whose search goes on: their numbers, state, and which beams have a row in the forward."""

    prompts: torch.Tensor  # [prompts]
    state: BeamState
    rows: torch.Tensor  # [rows] place ``i * num_beams + beam`` within the live prompts


class BeamSearcher:
    """Runs ``beam_step`` over the prompts of a call; finished prompts leave at once.

    Args:
        inputs: prompts, limits and end tokens.
        rule: settings.
        pick: the axis that makes it beam search or beam sampling.
        processors: change the log-probs, in order.
        criteria: further ends of hypotheses.
        recorder: keeps per-step scores.
    """

    def __init__(
        self,
        inputs: SearchInputs,
        rule: BeamRule,
        pick: CandidatePicker,
        processors: Sequence[Processor],
        criteria: Sequence[Criterion],
        recorder: Recorder,
    ) -> None:
        self.width = rule.num_beams
        self._inputs, self._rule, self._pick = inputs, rule, pick
        self._processors, self._criteria, self._recorder = processors, criteria, recorder
        device = inputs.prompts.padded.device
        count = len(inputs.prompts)
        self._eos = torch.tensor(inputs.eos, dtype=torch.int64, device=device)
        state = BeamState.start(self.width, torch.tensor(list(inputs.limits), dtype=torch.int64, device=device))
        self._live = _Live(torch.arange(count, device=device), state, torch.arange(count * self.width, device=device))
        self._frozen = torch.empty((count * self.width, 0), dtype=torch.int64, device=device)
        self._results: dict[int, Hypotheses] = {}

    def advance(self, logits: torch.Tensor) -> Step:
        """See ``Search.advance``."""
        live = self._live
        history = self._history()
        logits = logits.float()
        self._recorder.add_logits(logits, history.layout)
        log_probs = logits.log_softmax(dim=-1)
        for processor in self._processors:
            log_probs = processor(history, log_probs)
        check_numbers(log_probs.amax(1), history.prompts, live.state.steps)
        self._recorder.add_scores(log_probs, history.layout)
        candidates = top_candidates(
            self._spread(log_probs),
            live.state.scores,
            self._rule.candidates,
            lambda scores, count: self._pick(scores, count, live.prompts),
        )
        result = beam_step(live.state, candidates, self._stops(candidates), self._rule)
        self._check(candidates, result)
        return self._go_on(result)

    def results(self) -> list[Hypotheses]:
        """See ``Search.results``."""
        return [self._results[prompt] for prompt in range(len(self._inputs.prompts))]

    # -- before the step ----------------------------------------------------------------------------------------

    def _history(self) -> History:
        live = self._live
        generated = live.state.tokens.flatten(0, 1)[live.rows]
        prompts, lanes = live.prompts[live.rows // self.width], live.rows % self.width
        return History(self._inputs.prompts, self.width, prompts, lanes, generated, self._frozen)

    def _spread(self, log_probs: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] -> [prompts, beams, vocabulary]; beams without a row get zeros, their score is -inf."""
        places = len(self._live.prompts) * self.width
        if len(log_probs) == places:
            return log_probs.view(-1, self.width, log_probs.shape[1])
        full = log_probs.new_zeros((places, log_probs.shape[1]))
        full[self._live.rows] = log_probs
        return full.view(-1, self.width, log_probs.shape[1])

    def _stops(self, candidates: Candidates) -> torch.Tensor:
        """[prompts, candidates] whether a continuation ends its hypothesis."""
        state = self._live.state
        stops = torch.isin(candidates.tokens, self._eos)
        stops = stops | (state.limits <= state.steps + 1)[:, None]
        if self._criteria:
            past = state.tokens.gather(1, candidates.parents[:, :, None].expand(-1, -1, state.steps))
            generated = torch.cat([past, candidates.tokens[:, :, None]], dim=2).flatten(0, 1)
            prompts = self._live.prompts.repeat_interleave(candidates.tokens.shape[1])
            ids = torch.cat([self._inputs.prompts.padded[prompts], generated], dim=1)
            for criterion in self._criteria:
                stops = stops | criterion(ids, prompts).view(stops.shape)
        return stops

    # -- after the step -----------------------------------------------------------------------------------------

    def _check(self, candidates: Candidates, result: BeamStep) -> None:
        best = candidates.scores.amax(1)
        step = self._live.state.steps
        for row in torch.nonzero(torch.isneginf(best)).flatten().tolist():
            prompt = int(self._live.prompts[row])
            if torch.isneginf(result.state.done_scores[row, 0]):
                raise NumericalError(prompt, step, "every continuation of every beam is banned (-inf)")

    def _go_on(self, result: BeamStep) -> Step:
        """File the prompts that ended, and say which rows go on."""
        alive = ~torch.isneginf(result.state.scores) & ~result.ended[:, None]
        packed = torch.cat([result.parents, alive.long(), result.ended.long()[:, None]], dim=1).cpu().numpy()
        parents, lanes_alive, ended = np.split(packed, [self.width, 2 * self.width], axis=1)
        if ended.any():
            self._retire(result.state, ended[:, 0].astype(bool))
        stays = np.flatnonzero(ended[:, 0] == 0)
        prompt_at, lane = np.nonzero(lanes_alive[stays])
        row_of = np.full(len(packed) * self.width, -1)
        row_of[self._live.rows.cpu().numpy()] = np.arange(len(self._live.rows))
        continued = row_of[stays[prompt_at] * self.width + parents[stays[prompt_at], lane]]
        device = result.tokens.device
        keep = torch.from_numpy(stays).to(device)
        numbers = self._live.prompts[keep]
        rows = torch.from_numpy(prompt_at * self.width + lane).to(device)
        state = result.state if len(stays) == len(packed) else result.state.select(keep)
        self._live = _Live(numbers, state, rows)
        tokens = result.tokens[keep].flatten()[rows]
        return Step(continued, numbers.cpu().numpy()[prompt_at], tokens, chosen=None)

    def _retire(self, state: BeamState, ended: np.ndarray) -> None:
        steps = state.steps
        frozen = torch.full((len(self._frozen), steps), -1, dtype=torch.int64, device=self._frozen.device)
        frozen[:, : self._frozen.shape[1]] = self._frozen
        for index in np.flatnonzero(ended).tolist():
            prompt = int(self._live.prompts[index])
            self._results[prompt] = Hypotheses(
                state.done_tokens[index], state.done_ancestry[index], state.done_scores[index]
            )
            frozen[prompt * self.width : (prompt + 1) * self.width] = state.tokens[index]
        self._frozen = frozen
