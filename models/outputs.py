"""Results in HF's shapes and classes, with the statistics of the cache attached."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from branchkv.decoding.record import Recorder
from branchkv.decoding.step import Hypotheses
from branchkv.paged_cache.stats import KVStats

__all__ = ["beam_output", "sample_output"]


@dataclass
class BeamDecoderOnlyOutput(GenerateBeamDecoderOnlyOutput):
    """HF's output class; ``kv`` holds the KVStats of the call and is no entry of the dict."""


@dataclass
class BeamEncoderDecoderOutput(GenerateBeamEncoderDecoderOutput):
    """HF's output class; ``kv`` holds the KVStats of the call and is no entry of the dict."""


@dataclass
class DecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """HF's output class; ``kv`` holds the KVStats of the call and is no entry of the dict."""


@dataclass
class EncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """HF's output class; ``kv`` holds the KVStats of the call and is no entry of the dict."""


@dataclass(frozen=True)
class OutputRequest:
    """What the caller wants back.

    Attributes:
        prompt_ids: [prompts, tokens] decoder prompt as given, in front of every returned row.
        fill: token after the end of shorter rows.
        as_dict, scores: HF's return_dict_in_generate and output_scores.
        encoder_decoder: which of HF's classes.
    """

    prompt_ids: torch.Tensor
    fill: int
    as_dict: bool
    scores: bool
    encoder_decoder: bool


def sample_output(results: Sequence[Hypotheses], request: OutputRequest, recorder: Recorder, kv: KVStats) -> Any:
    """[prompts * n, tokens] sequences, or HF's output object."""
    generated = torch.cat([result.tokens for result in results])
    sequences = _with_prompts(generated, len(generated) // len(results), request)
    if not request.as_dict:
        return sequences
    kind: Any = EncoderDecoderOutput if request.encoder_decoder else DecoderOnlyOutput
    return _with_stats(kind(sequences=sequences, scores=recorder.scores, logits=recorder.logits), kv)


def beam_output(
    results: Sequence[Hypotheses], wanted: int, request: OutputRequest, recorder: Recorder, kv: KVStats
) -> Any:
    """[prompts * wanted, tokens] sequences, best first, or HF's output object.

    Rows beyond the hypotheses that a prompt has are the prompt and padding, with score -inf and a warning.
    """
    beams = len(_present(results[0].scores))
    steps = max(result.tokens.shape[1] for result in results)
    device = request.prompt_ids.device
    shape = (len(results), wanted, steps)
    tokens = torch.full(shape, -1, dtype=torch.int64, device=device)
    ancestry = torch.full(shape, -1, dtype=torch.int64, device=device)
    scores = torch.stack([_present(result.scores)[:wanted] for result in results])
    for prompt, result in enumerate(results):
        width = result.tokens.shape[1]
        tokens[prompt, :, :width] = result.tokens[:wanted]
        parents = _present(result.ancestry)[:wanted]
        ancestry[prompt, :, :width] = torch.where(parents < 0, parents, parents + prompt * beams)
    missing = int(torch.isneginf(scores).sum())
    if missing:
        warnings.warn(
            f"{missing} of {scores.numel()} hypotheses asked for cannot be reached; their rows have score -inf",
            UserWarning,
            stacklevel=2,
        )
    length = int((ancestry >= 0).sum(-1).max())
    sequences = _with_prompts(tokens.flatten(0, 1)[:, :length], wanted, request)
    if not request.as_dict:
        return sequences
    kind: Any = BeamEncoderDecoderOutput if request.encoder_decoder else BeamDecoderOnlyOutput
    output = kind(
        sequences=sequences,
        sequences_scores=scores.flatten() if request.scores else None,
        scores=recorder.scores,
        logits=recorder.logits,
        beam_indices=ancestry.flatten(0, 1)[:, :length].to(torch.int32),
    )
    return _with_stats(output, kv)


def _with_prompts(generated: torch.Tensor, rows: int, request: OutputRequest) -> torch.Tensor:
    prompts = request.prompt_ids.repeat_interleave(rows, dim=0)
    return torch.cat([prompts, generated.masked_fill(generated < 0, request.fill)], dim=1)


def _with_stats(output: Any, kv: KVStats) -> Any:
    object.__setattr__(output, "kv", kv)  # past ModelOutput, which would make it a dict entry
    return output


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "beam results always have scores and ancestry"
    return tensor
