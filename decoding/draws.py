"""Where the randomness of sampling comes from: HF's own draws, or one counter-based stream per sample.

Both choose from probabilities over the vocabulary; neither changes the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

__all__ = ["Argmax", "GlobalCandidates", "GlobalDraws", "Sampler", "StreamCandidates", "StreamDraws", "top_picker"]


class Sampler(Protocol):
    """Chooses one token per row."""

    def __call__(self, scores: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Return [rows] tokens.

        Args:
            scores: [rows, vocabulary] processed logits, float32.
            layout: [rows] each row's place ``prompt * n + sample`` in the call.
        """


class Argmax:
    """The most probable token."""

    def __call__(self, scores: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        del layout
        return scores.argmax(dim=-1)


class GlobalDraws:
    """Draws from torch's global generator exactly as HF's ``torch.multinomial`` does.

    ``multinomial(p, 1)`` is ``(p / e).argmax()`` with exponential noise e of the shape of p. The noise does not depend
    on p, so it is drawn for every sample of the call, ended or not, and the live rows use their part.
    """

    def __init__(self, places: int) -> None:
        self._places = places

    def __call__(self, scores: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        noise = torch.empty((self._places, scores.shape[1]), dtype=scores.dtype, device=scores.device).exponential_(1)
        return (scores.softmax(dim=-1) / noise[layout]).argmax(dim=-1)


class StreamDraws:
    """One stream per (seed, prompt id, sample), one float64 uniform a step, inverse CDF.

    A sample's tokens depend on nothing but its own stream and the model: not on n, the batch or its order. Streams are
    numpy's Philox generators, keyed through SeedSequence.
    """

    def __init__(self, seed: int, prompt_ids: Sequence[int], n: int) -> None:
        self._streams = [_stream(seed, prompt, sample) for prompt in prompt_ids for sample in range(n)]

    def __call__(self, scores: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        uniforms = torch.tensor([self._streams[place].random() for place in layout.tolist()], dtype=torch.float64)
        mass = scores.double().softmax(dim=-1).cumsum(dim=-1)
        point = uniforms.to(scores.device)[:, None] * mass[:, -1:]
        # right=True skips tokens of probability 0 also where the point falls on a step of the CDF.
        return torch.searchsorted(mass, point, right=True).squeeze(1).clamp_(max=scores.shape[1] - 1)


def top_picker(scores: torch.Tensor, count: int, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best of each row of [prompts, n]."""
    del prompts
    best = torch.topk(scores, count, dim=1)
    return best.values, best.indices


class GlobalCandidates:
    """Beam sampling with HF's draws: ``multinomial`` without replacement is ``(p / e).topk``; ``places`` prompts."""

    def __init__(self, places: int) -> None:
        self._places = places

    def __call__(self, scores: torch.Tensor, count: int, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.empty((self._places, scores.shape[1]), dtype=scores.dtype, device=scores.device).exponential_(1)
        return _drawn(scores, noise[prompts], count)


class StreamCandidates:
    """Beam sampling with one stream per (seed, prompt id)."""

    def __init__(self, seed: int, prompt_ids: Sequence[int]) -> None:
        self._streams = [_stream(seed, prompt) for prompt in prompt_ids]

    def __call__(self, scores: torch.Tensor, count: int, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = [self._streams[p].standard_exponential(scores.shape[1]) for p in prompts.tolist()]
        return _drawn(scores, torch.from_numpy(np.stack(noise)).to(scores), count)


def _drawn(scores: torch.Tensor, noise: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` draws without replacement, best score first."""
    index = (scores.softmax(dim=-1) / noise).topk(count, dim=1).indices
    best, order = scores.gather(1, index).sort(dim=1, descending=True)
    return best, index.gather(1, order)


def _stream(seed: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))
