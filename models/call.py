"""One decoding call, assembled: settings -> search, prompts -> model over blocks, results -> HF's output."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from branchkv.config import KVConfig
from branchkv.decoding.beam_search import BeamSearcher, CandidatePicker
from branchkv.decoding.beam_step import BeamRule
from branchkv.decoding.draws import (
    Argmax,
    GlobalCandidates,
    GlobalDraws,
    Sampler,
    StreamCandidates,
    StreamDraws,
    top_picker,
)
from branchkv.decoding.history import Prompts
from branchkv.decoding.loop import DecodingLoop
from branchkv.decoding.record import Recorder
from branchkv.decoding.sampling import SampleSearcher
from branchkv.decoding.step import SearchInputs, Step
from branchkv.kernels.implementations import implementation, moves, resolve
from branchkv.models.blocks import BlockStore
from branchkv.models.criteria import Ends, split_criteria
from branchkv.models.memory import make_budget
from branchkv.models.outputs import OutputRequest, beam_output, sample_output
from branchkv.models.positions import check_positions, position_limit
from branchkv.models.processors import adapt_processors
from branchkv.models.runner import HFModel, ModelInputs
from branchkv.models.support import check_model
from branchkv.paged_cache.events import EventLog
from branchkv.paged_cache.manager import CacheManager
from branchkv.paged_cache.stats import KVStats

__all__ = ["DecodingCall", "Settings"]

UNLIMITED = 2**31


@dataclass(frozen=True)
class Settings:
    """What a call asks for.

    Attributes:
        kv: cache settings.
        seed: per-sample streams, or None for torch's generator.
        processors, criteria: HF's prepared lists.
        config: HF's prepared GenerationConfig.
        length_counts_prompt: whether max_length counts each prompt's own tokens, as for the prompt alone.
    """

    kv: KVConfig
    seed: int | None
    processors: tuple[Any, ...]
    criteria: tuple[Any, ...]
    config: Any
    length_counts_prompt: bool


class DecodingCall:
    """Decodes the prompts of one call.

    Attributes:
        fill: token after the end of a row.

    Args:
        model: the HF model.
        settings: what is asked for.
        input_ids: [prompts, tokens] decoder ids, left-padded.
        lengths: real tokens (or embeddings) of each prompt.
        kwargs: HF's model kwargs for the prompts, without a cache.
    """

    def __init__(
        self, model: Any, settings: Settings, input_ids: torch.Tensor, lengths: tuple[int, ...], kwargs: dict[str, Any]
    ) -> None:
        self._settings = settings
        config = settings.config
        self._beams = config.num_beams or 1
        self._width = self._beams if self._beams > 1 else config.num_return_sequences or 1
        self._encoder_decoder = bool(model.config.is_encoder_decoder)
        self.fill = _fill(config)
        self._recorder = Recorder(
            len(input_ids) * self._width,
            keep_scores=bool(config.return_dict_in_generate and config.output_scores),
            keep_logits=bool(config.return_dict_in_generate and config.output_logits),
        )
        ids_lengths = lengths if input_ids.shape[1] else (0,) * len(lengths)
        self._prompts = Prompts(input_ids, ids_lengths)
        self._lengths = lengths
        mask = kwargs.get("attention_mask")
        self._source_mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
        ends = split_criteria(settings.criteria, lambda: self._recorder.scores, len(lengths), self.fill)
        limits = self._limits(ends, input_ids.shape[1], ids_lengths)
        check_positions(position_limit(model), lengths, limits, max(config.min_new_tokens or 1, 1))
        self._search = self._make_search(ends, limits)
        plan = check_model(model)
        self._log = EventLog() if settings.kv.trace else None
        if isinstance(settings.kv.trace, (str, os.PathLike)):
            Path(settings.kv.trace).touch()  # an unwritable path fails now, not after the decoding
        self._manager = CacheManager(
            settings.kv.block_size, plan.windows, make_budget(settings.kv, model.device), self._log
        )
        worst = _worst_case(plan.windows, settings.kv.block_size, lengths, self._width, limits)
        name = resolve(settings.kv.attention, model.device)
        store = BlockStore(self._manager, plan.kinds, worst, settings.kv.dtype, moves(name))
        inputs = ModelInputs(input_ids, lengths, kwargs, config)
        self._model = HFModel(model, plan, inputs, self._manager, store, implementation(name))

    def run(self, prompt_ids: torch.Tensor, on_step: Callable[[Step], None] | None) -> Any:
        """Decode; ``prompt_ids`` stand in front of the returned rows."""
        config = self._settings.config
        try:
            with self._model.router.installed():
                results = DecodingLoop(self._model, self._manager, self._search, on_step).run(self._lengths)
        finally:
            self._write_trace()
        request = OutputRequest(
            prompt_ids=prompt_ids,
            fill=self.fill,
            as_dict=bool(config.return_dict_in_generate),
            scores=bool(config.output_scores),
            encoder_decoder=self._encoder_decoder,
        )
        if self._beams > 1:
            return beam_output(results, config.num_return_sequences or 1, request, self._recorder, self.stats())
        return sample_output(results, request, self._recorder, self.stats())

    def stats(self) -> KVStats:
        """What the cache did so far."""
        return self._manager.stats.result(None if self._log is None else tuple(self._log.events()))

    def _make_search(self, ends: Ends, limits: tuple[int, ...]) -> BeamSearcher | SampleSearcher:
        config, prompts = self._settings.config, len(self._lengths)
        inputs = SearchInputs(self._prompts, limits, ends.eos)
        processors = adapt_processors(self._settings.processors, limits, self._source_mask, self.fill)
        if self._beams == 1:
            sampler = self._sampler(prompts) if config.do_sample else Argmax()
            return SampleSearcher(inputs, self._width, sampler, processors, ends.criteria, self._recorder)
        eos = getattr(config, "_eos_token_tensor", None)
        rule = BeamRule(
            num_beams=self._beams,
            length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
            early_stopping=False if config.early_stopping is None else config.early_stopping,
            candidates=max(2, 1 + (0 if eos is None else len(eos))) * self._beams,
        )
        return BeamSearcher(inputs, rule, self._picker(prompts), processors, ends.criteria, self._recorder)

    def _sampler(self, prompts: int) -> Sampler:
        if self._settings.seed is None:
            return GlobalDraws(prompts * self._width)
        return StreamDraws(self._settings.seed, range(prompts), self._width)

    def _picker(self, prompts: int) -> CandidatePicker:
        if not self._settings.config.do_sample:
            return top_picker
        if self._settings.seed is None:
            return GlobalCandidates(prompts)
        return StreamCandidates(self._settings.seed, range(prompts))

    def _limits(self, ends: Ends, padded: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Most new tokens of each prompt."""
        if ends.max_length is None:
            return (UNLIMITED,) * len(lengths)
        if self._settings.length_counts_prompt and not self._encoder_decoder:
            return tuple(ends.max_length - length for length in lengths)
        return (ends.max_length - padded,) * len(lengths)

    def _write_trace(self) -> None:
        trace = self._settings.kv.trace
        if self._log is not None and not isinstance(trace, bool) and trace is not None:
            self._log.write(Path(trace))


def _fill(config: Any) -> int:
    """Token after the end of a row: the pad asked for, 0 included; else EOS, else -1, as HF has it."""
    pad, eos = getattr(config, "_pad_token_tensor", None), getattr(config, "_eos_token_tensor", None)
    if pad is not None:
        return int(pad)
    return -1 if eos is None else int(eos[0])


def _worst_case(
    windows: dict[str, int | None], block_size: int, lengths: tuple[int, ...], width: int, limits: tuple[int, ...]
) -> dict[str, int]:
    """Most blocks per kind that the call can hold: prompts once, and everything generated by every row on its own."""
    worst = {}
    for kind, window in windows.items():
        total = 0
        for length, limit in zip(lengths, limits, strict=True):
            prompt = -(-length // block_size)
            own = -(-limit // block_size) + 1
            if window is not None:
                touched = -(-window // block_size) + 1
                prompt, own = min(prompt, touched), min(own, touched + 1)
            total += prompt + width * own
        worst[kind] = total
    return worst
