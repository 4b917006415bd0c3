"""What the decoding loop needs of its surroundings: a model, processors, and stopping criteria."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from branchkv.decoding.history import History
from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.views import Writes

__all__ = ["Criterion", "Model", "Processor"]


class Model(Protocol):
    """A language model over a paged cache. Rows are ragged; the model chooses the layout of its forward."""

    def prefill(self, writes: Mapping[str, Writes]) -> torch.Tensor:
        """Compute every prompt once and write its K/V.

        Args:
            writes: per layer kind, where the prompts' tokens go; prompt by prompt, without padding.

        Returns:
            [prompts, vocabulary] logits of each prompt's last token.
        """

    def step(self, tokens: torch.Tensor, prompts: Ids, writes: Mapping[str, Writes]) -> torch.Tensor:
        """Compute one token per row.

        Args:
            tokens: [rows] int64 token ids.
            prompts: [rows] the prompt that each row continues; rows of a prompt are adjacent.
            writes: per layer kind, copies to run, the rows' slots and tables.

        Returns:
            [rows, vocabulary] logits.
        """

    def keep(self, prompts: Ids) -> None:
        """Only ``prompts`` (ascending) go on: give back what is held for the others."""


class Processor(Protocol):
    """Changes the scores of the next token."""

    def __call__(self, history: History, scores: torch.Tensor) -> torch.Tensor:
        """Return processed scores [rows, vocabulary] (float32); ``history`` says what each row has been so far."""


class Criterion(Protocol):
    """Says which sequences end, beyond end tokens and the length limit."""

    def __call__(self, ids: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """Return [rows] bool.

        Args:
            ids: [rows, tokens] left-padded prompt and generated tokens, the newest included.
            prompts: [rows] prompt of each row; every prompt has the same number of rows.
        """
