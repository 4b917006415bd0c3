"""Greedy decoding and parallel samples over all prompts of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from branchkv.decoding.checks import check_choice
from branchkv.decoding.draws import Sampler
from branchkv.decoding.history import History
from branchkv.decoding.protocol import Criterion, Processor
from branchkv.decoding.record import Recorder
from branchkv.decoding.step import Hypotheses, SearchInputs, Step

__all__ = ["SampleSearcher"]


class SampleSearcher:
    """Every row chooses its own next token and ends on its own. ``n`` rows per prompt; greedy is n = 1 with Argmax.

    Args:
        inputs: prompts, limits and end tokens.
        n: samples per prompt.
        sampler: the axis that makes it greedy, HF's samples or per-sample streams.
        processors: change the logits, in order.
        criteria: further ends of samples.
        recorder: keeps per-step scores.
    """

    def __init__(
        self,
        inputs: SearchInputs,
        n: int,
        sampler: Sampler,
        processors: Sequence[Processor],
        criteria: Sequence[Criterion],
        recorder: Recorder,
    ) -> None:
        self.width = n
        self._inputs, self._sampler, self._recorder = inputs, sampler, recorder
        self._processors, self._criteria = processors, criteria
        device = inputs.prompts.padded.device
        places = len(inputs.prompts) * n
        self._eos = torch.tensor(inputs.eos, dtype=torch.int64, device=device)
        self._limits = torch.tensor(list(inputs.limits), dtype=torch.int64, device=device).repeat_interleave(n)
        self._generated = torch.empty((places, 0), dtype=torch.int64, device=device)
        self._layout = torch.arange(places, device=device)  # [rows] place of each live row

    @property
    def generated(self) -> torch.Tensor:
        """[prompts * n, steps] tokens so far, -1 after a row's end."""
        return self._generated

    def advance(self, logits: torch.Tensor) -> Step:
        """See ``Search.advance``."""
        layout, steps = self._layout, self._generated.shape[1]
        prompts, lanes = layout // self.width, layout % self.width
        history = History(self._inputs.prompts, self.width, prompts, lanes, self._generated[layout], self._generated)
        scores = logits.float()
        self._recorder.add_logits(scores, layout)
        for processor in self._processors:
            scores = processor(history, scores)
        check_choice(scores.amax(1), prompts, steps)
        self._recorder.add_scores(scores, layout)
        tokens = self._sampler(scores, layout)
        column = torch.full((len(self._generated), 1), -1, dtype=torch.int64, device=tokens.device)
        column[layout, 0] = tokens
        self._generated = torch.cat([self._generated, column], dim=1)
        going = ~self._stops(tokens)
        self._layout = layout[going]
        packed = torch.stack([going.nonzero().flatten(), prompts[going]]).cpu().numpy()
        return Step(packed[0], packed[1], tokens[going], column[:, 0])

    def results(self) -> list[Hypotheses]:
        """See ``Search.results``."""
        return [Hypotheses(rows) for rows in self._generated.split(self.width)]

    def _stops(self, tokens: torch.Tensor) -> torch.Tensor:
        layout, steps = self._layout, self._generated.shape[1]
        stops = torch.isin(tokens, self._eos) | (self._limits[layout] <= steps)
        if self._criteria:
            # Criteria see every row of the prompts that still run, as HF shows them.
            prompts = torch.unique(layout // self.width)
            places = (prompts[:, None] * self.width + torch.arange(self.width, device=layout.device)).flatten()
            owners = places // self.width
            ids = torch.cat([self._inputs.prompts.padded[owners], self._generated[places]], dim=1)
            hit = torch.zeros(len(self._generated), dtype=torch.bool, device=layout.device)
            for criterion in self._criteria:
                hit[places] |= criterion(ids, owners)
            stops = stops | hit[layout]
        return stops
