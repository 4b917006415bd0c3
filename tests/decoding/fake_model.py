"""A language model without layers: its logits are a function of the tokens that its cache says a row has.

It stores token ids where a model stores K/V, does the copies it is told to do, and reads every row's history back
through the block tables. A wrong fork, copy or slot is a wrong history, and so another result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from branchkv.decoding.history import Prompts
from branchkv.decoding.loop import DecodingLoop
from branchkv.decoding.step import Hypotheses, Search, SearchInputs, Step
from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.budget import BlockBudget
from branchkv.paged_cache.manager import CacheManager
from branchkv.paged_cache.views import Writes

Tokens = tuple[int, ...]
Language = Callable[[Tokens], torch.Tensor]

PAD = 0  # stands to the left of short prompts and must never be read
POISON = -7  # what a freed slot holds
WINDOW = 3


def random_language(vocabulary: int, seed: int, spread: float = 2.0) -> Language:
    """Logits [vocabulary] that depend on every token of the history and on nothing else."""
    known: dict[Tokens, torch.Tensor] = {}

    def logits(history: Tokens) -> torch.Tensor:
        if history not in known:
            rng = np.random.default_rng([seed, *history])
            known[history] = torch.from_numpy(rng.normal(scale=spread, size=vocabulary)).float()
        return known[history]

    return logits


@dataclass(frozen=True)
class Seen:
    """One forward: the prompt of each row, each row's tokens, and the blocks of each kind held when it ran."""

    prompts: tuple[int, ...]
    histories: tuple[Tokens, ...]
    held: dict[str, int]


class FakeModel:
    """`branchkv.decoding.protocol.Model` over a `CacheManager` with a full and a sliding-window kind.

    Attributes:
        seen: every forward so far, the prefill first.
        kept: the arguments of `keep`.
    """

    def __init__(self, language: Language, prompts: Sequence[Tokens], cache: CacheManager) -> None:
        self._language, self._prompts, self._cache = language, prompts, cache
        self._memory: dict[str, npt.NDArray[np.int64]] = {}
        self.seen: list[Seen] = []
        self.kept: list[list[int]] = []

    def prefill(self, writes: Mapping[str, Writes]) -> torch.Tensor:
        self._memory = {kind: np.full(4096, POISON) for kind in writes}
        return self._forward(np.arange(len(self._prompts)), list(itertools.chain(*self._prompts)), writes)

    def step(self, tokens: torch.Tensor, prompts: Ids, writes: Mapping[str, Writes]) -> torch.Tensor:
        assert (np.diff(prompts) >= 0).all(), "rows of a prompt are not adjacent"
        return self._forward(prompts, tokens.tolist(), writes)

    def keep(self, prompts: Ids) -> None:
        self.kept.append(prompts.tolist())

    def _forward(self, prompts: Ids, tokens: list[int], writes: Mapping[str, Writes]) -> torch.Tensor:
        self._cache.check_integrity()
        histories = {kind: self._read_back(kind, tokens, write) for kind, write in writes.items()}
        for full, tail in zip(histories["full"], histories["window"], strict=True):
            assert full[-WINDOW:] == tail[-WINDOW:], "the kinds disagree about a row"
        self.seen.append(Seen(tuple(prompts.tolist()), tuple(histories["full"]), self._cache.held))
        return torch.stack([self._language(history) for history in histories["full"]])

    def _read_back(self, kind: str, tokens: list[int], write: Writes) -> list[Tokens]:
        memory, tables, size = self._memory[kind], write.tables, write.tables.block_size
        blocks = memory[: len(memory) // size * size].reshape(-1, size)  # a view
        free = np.ones(len(blocks), dtype=bool)
        free[tables.blocks[tables.blocks >= 0]] = False
        free[write.copies.source] = False
        blocks[free] = POISON
        blocks[write.copies.target] = blocks[write.copies.source]
        kept = write.slots >= 0
        memory[write.slots[kept]] = np.array(tokens)[kept]
        histories = []
        for row, length in zip(tables.blocks, tables.lengths, strict=True):
            first = 0 if tables.window is None else max(0, length - tables.window)
            position = np.arange(first, length)
            read = memory[row[position // size] * size + position % size]
            assert (read >= 0).all(), f"{kind}: a row reads a slot that holds nothing: {read}"
            histories.append(tuple(read.tolist()))
        return histories


@dataclass(frozen=True)
class Run:
    """A finished decoding and what there is to see of it."""

    results: list[Hypotheses]
    model: FakeModel
    cache: CacheManager
    steps: list[Step]


def make_cache(block_size: int = 3, limit: int | None = None) -> CacheManager:
    return CacheManager(block_size, {"full": None, "window": WINDOW}, BlockBudget(limit))


def search_inputs(prompts: Sequence[Tokens], limits: Sequence[int], eos: Sequence[int]) -> SearchInputs:
    longest = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[PAD] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    return SearchInputs(Prompts(padded, tuple(len(prompt) for prompt in prompts)), limits, tuple(eos))


def decode(language: Language, prompts: Sequence[Tokens], search: Search, cache: CacheManager | None = None) -> Run:
    """Run the loop; the pool must be whole afterwards."""
    cache = make_cache() if cache is None else cache
    model = FakeModel(language, prompts, cache)
    steps: list[Step] = []
    results = DecodingLoop(model, cache, search, steps.append).run([len(prompt) for prompt in prompts])
    assert_whole(cache)
    return Run(results, model, cache, steps)


def assert_whole(cache: CacheManager) -> None:
    """Nothing is held, and the accounts are right."""
    cache.check_integrity()
    assert set(cache.held.values()) == {0}
    assert len(cache.live) == 0
