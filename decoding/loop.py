"""The decoding loop: prefill, then step after step until no row goes on. There is no other loop.

prompts -> sequences -> tables -> forward -> search step -> fork and free -> tables -> ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from branchkv.decoding.protocol import Model
from branchkv.decoding.step import Hypotheses, Search, Step
from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.manager import CacheManager

__all__ = ["DecodingLoop"]


class DecodingLoop:
    """Runs one search over a model and a paged cache.

    Args:
        model: computes logits.
        cache: the bookkeeping of the blocks; the loop opens, forks and frees sequences in it.
        search: chooses tokens.
        on_step: called after each choice with the Step, for progress and streaming; may raise to stop.
    """

    def __init__(
        self, model: Model, cache: CacheManager, search: Search, on_step: Callable[[Step], None] | None = None
    ) -> None:
        self._model = model
        self._cache = cache
        self._search = search
        self._on_step = on_step

    def run(self, lengths: Sequence[int]) -> list[Hypotheses]:
        """Decode prompts of ``lengths`` tokens; whatever happens, every block is back in the pool afterwards.

        Raises:
            OutOfBlocksError: the budget does not hold what the next step needs.
            NumericalError: nothing can be chosen for some prompt.
        """
        try:
            seqs, step = self._prefill(np.array(lengths, dtype=np.int64))
            while len(seqs):
                seqs, step = self._step(seqs, step)
        finally:
            self._cache.close()
        return self._search.results()

    def _prefill(self, lengths: Ids) -> tuple[Ids, Step]:
        seqs = self._cache.open(len(lengths))
        logits = self._model.prefill(self._cache.append(seqs, lengths))
        self._cache.stats.prefill_tokens += int(lengths.sum())
        self._after_forward(seqs, self._search.width)
        # Each prompt's row stands for all its lanes until the first choice forks it.
        step = self._choose(logits.repeat_interleave(self._search.width, dim=0), np.arange(len(lengths)))
        return self._cache.reorder(seqs, step.parents // self._search.width), step

    def _step(self, seqs: Ids, step: Step) -> tuple[Ids, Step]:
        writes = self._cache.append(seqs, np.ones(len(seqs), dtype=np.int64))
        logits = self._model.step(step.tokens, step.prompts, writes)
        self._after_forward(seqs, 1)
        step = self._choose(logits, np.unique(step.prompts))
        return self._cache.reorder(seqs, step.parents), step

    def _choose(self, logits: torch.Tensor, before: Ids) -> Step:
        step = self._search.advance(logits)
        prompts = np.unique(step.prompts)
        if len(prompts) < len(before):
            self._model.keep(prompts)
        if self._on_step is not None:
            self._on_step(step)
        return step

    def _after_forward(self, seqs: Ids, lanes: int) -> None:
        self._cache.copies_done()
        self._cache.observe(np.full(len(seqs), lanes, dtype=np.int64))
        self._cache.trim(seqs)
