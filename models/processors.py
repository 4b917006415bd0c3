"""HF's logits processors, called so that each prompt gets what it would get alone.

A processor that looks at one row at a time sees the row's real tokens, without padding. One that counts rows or keeps
state sees HF's whole row layout, ended rows included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers.generation import logits_process as hf

from branchkv.decoding.history import History
from branchkv.decoding.protocol import Processor

__all__ = ["adapt_processors"]

_ROW_BY_ROW: frozenset[type] = frozenset({
    hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.ExponentialDecayLengthPenalty, hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor, hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization,
    hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor, hf.MinPLogitsWarper,
    hf.NoBadWordsLogitsProcessor, hf.NoRepeatNGramLogitsProcessor, hf.SequenceBiasLogitsProcessor,
    hf.SuppressTokensAtBeginLogitsProcessor, hf.SuppressTokensLogitsProcessor, hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.TypicalLogitsWarper, hf.WatermarkLogitsProcessor,
})  # fmt: skip


def adapt_processors(
    processors: Sequence[Any], limits: Sequence[int], source_mask: torch.Tensor | None, fill: int
) -> list[Processor]:
    """Processors of the decoding loop that do what HF's ``processors`` do, in the same order.

    Args:
        processors: HF's prepared list, the user's own included.
        limits: most new tokens of each prompt.
        source_mask: [prompts, tokens] which tokens of the prompts (of an encoder's input) are real; None for all.
        fill: token that stands after the end of a row in HF's layout.
    """
    adapted: list[Processor] = []
    plain = [_without_padding(processor, source_mask, fill) for processor in _without_repeats(processors)]
    for row_by_row, group in groupby(plain, key=_is_row_by_row):
        if row_by_row:
            adapted.append(_RowByRow(list(group), limits))
        else:
            adapted.extend(
                _Prefix(p) if type(p) is hf.PrefixConstrainedLogitsProcessor else _WholeLayout(p, fill) for p in group
            )
    return adapted


def _is_row_by_row(processor: Any) -> bool:
    if type(processor) is hf.RepetitionPenaltyLogitsProcessor:
        return processor.prompt_ignore_length is None  # a tensor of it has one entry per row of the layout
    return type(processor) in _ROW_BY_ROW


def _without_repeats(processors: Sequence[Any]) -> list[Any]:
    """Leave out the minimum length that HF derives from min_new_tokens: it counts padding, and says nothing more."""
    derived = {
        p.prompt_length_to_skip + p.min_new_tokens
        for p in processors
        if type(p) is hf.MinNewTokensLengthLogitsProcessor
    }
    return [p for p in processors if type(p) is not hf.MinLengthLogitsProcessor or p.min_length not in derived]


def _without_padding(processor: Any, mask: torch.Tensor | None, pad: int) -> Any:
    """A processor that knows the prompts' (an encoder's) tokens, without their padding."""
    if mask is None or bool(mask.all()):
        return processor
    if type(processor) is hf.RepetitionPenaltyLogitsProcessor:
        # HF has it ignore each prompt's padding; rows come without padding here.
        ignored: Any = processor.prompt_ignore_length
        padding = mask.long().argmax(dim=1)
        per_prompt = isinstance(ignored, torch.Tensor) and ignored.shape == padding.shape
        if per_prompt and torch.equal(torch.where(ignored == 0, padding, ignored), padding):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = None
    elif type(processor) is hf.EncoderRepetitionPenaltyLogitsProcessor:
        ids = processor.encoder_input_ids
        processor = copy.copy(processor)
        # Every token of a row counts once, so its padding may repeat its first real token.
        first = ids.gather(1, mask.long().argmax(dim=1, keepdim=True))
        processor.encoder_input_ids = torch.where(mask.bool(), ids, first)
    elif type(processor) is hf.EncoderNoRepeatNGramLogitsProcessor:
        processor = copy.copy(processor)
        processor.generated_ngrams = [
            {head: [token for token in tails if token != pad] for head, tails in ngrams.items() if pad not in head}
            for ngrams in processor.generated_ngrams
        ]
    return processor


class _RowByRow:
    """Calls processors once per prompt length, with the real tokens of the rows."""

    def __init__(self, processors: list[Any], limits: Sequence[int]) -> None:
        self._processors = processors
        self._limits = limits

    def __call__(self, history: History, scores: torch.Tensor) -> torch.Tensor:
        for rows, ids in history.cohorts():
            whole = len(rows) == len(scores)
            part = scores if whole else scores[rows]
            for processor in self._at_length(history, ids, int(history.prompts[rows[0]])):
                part = processor(ids, part)
            if whole:
                return part
            scores = scores.index_copy(0, rows, part)
        return scores

    def _at_length(self, history: History, ids: torch.Tensor, prompt: int) -> list[Any]:
        """The processors as HF would have built them for this prompt alone."""
        padded = history.prompt_tokens.longest
        real = ids.shape[1] - history.generated.shape[1]
        return self._processors if real == padded else [self._shift(p, padded, real, prompt) for p in self._processors]

    def _shift(self, processor: Any, padded: int, real: int, prompt: int) -> Any:
        attribute = {
            hf.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
            hf.ExponentialDecayLengthPenalty: "regulation_start",
            hf.SuppressTokensAtBeginLogitsProcessor: "begin_index",
            hf.ForcedEOSTokenLogitsProcessor: "max_length",
        }.get(type(processor))
        if attribute is None:
            return processor
        shifted = copy.copy(processor)
        if attribute == "max_length":
            shifted.max_length = real + self._limits[prompt]
        else:
            setattr(shifted, attribute, getattr(processor, attribute) - (padded - real))
        return shifted


class _Prefix:
    """``prefix_allowed_tokens_fn``: called for each row that runs, with its prompt's number and its real tokens."""

    def __init__(self, processor: Any) -> None:
        self._allowed: Callable[[int, torch.Tensor], list[int]] = processor._prefix_allowed_tokens_fn

    def __call__(self, history: History, scores: torch.Tensor) -> torch.Tensor:
        mask = torch.full_like(scores, float("-inf"))
        for rows, ids in history.cohorts():
            for row, tokens in zip(rows.tolist(), ids, strict=True):
                prompt = int(history.prompts[row])
                allowed = self._allowed(prompt, tokens)
                if len(allowed) == 0:
                    raise ValueError(f"prefix_allowed_tokens_fn: expected token ids for prompt {prompt}, got none")
                mask[row, allowed] = 0
        processed = scores + mask
        # As in HF: where all that is allowed is banned already in every row of a prompt, the constraint wins.
        banned = processed.amax(dim=-1).isneginf()
        free = torch.ones(len(history.prompt_tokens), dtype=torch.bool, device=scores.device)
        free[history.prompts[~banned]] = False
        return torch.where(free[history.prompts][:, None], mask, processed)


class _WholeLayout:
    """Calls a processor once a step with every row of HF's layout [prompts * width, ...], left-padded."""

    def __init__(self, processor: Any, fill: int) -> None:
        self._processor = processor
        self._fill = fill

    def __call__(self, history: History, scores: torch.Tensor) -> torch.Tensor:
        ids = history.full(self._fill)
        full = scores.new_zeros((len(ids), scores.shape[1]))
        full[history.layout] = scores
        processed: torch.Tensor = self._processor(ids, full)
        return processed[history.layout]
