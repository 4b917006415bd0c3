"""Per-step scores and logits of a call in HF's row layout, kept only when asked for."""

from __future__ import annotations

import torch

__all__ = ["Recorder"]


class Recorder:
    """Collects one tensor [places, vocabulary] a step; places without a live row are -inf.

    Args:
        places: prompts * width.
        keep_scores, keep_logits: which of the two are kept; the other stays None.
    """

    def __init__(self, places: int, *, keep_scores: bool, keep_logits: bool) -> None:
        self._places = places
        self.scores: tuple[torch.Tensor, ...] | None = () if keep_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if keep_logits else None

    def add_logits(self, logits: torch.Tensor, layout: torch.Tensor) -> None:
        """Keep raw logits; ``layout`` [rows] is each row's place."""
        if self.logits is not None:
            self.logits += (self._spread(logits, layout),)

    def add_scores(self, scores: torch.Tensor, layout: torch.Tensor) -> None:
        """Keep processed scores."""
        if self.scores is not None:
            self.scores += (self._spread(scores, layout),)

    def _spread(self, values: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        full = values.new_full((self._places, values.shape[1]), float("-inf"))
        full[layout] = values
        return full
