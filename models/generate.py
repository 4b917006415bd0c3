"""``branchkv.generate`` and ``branchkv.decode``: HF's generate with the decoding done by forking."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from branchkv.config import KVConfig
from branchkv.decoding.step import Step
from branchkv.errors import UnsupportedOptionError
from branchkv.models.call import DecodingCall, Settings
from branchkv.models.options import check_kv, check_options
from branchkv.models.prompts import clean_prompts, unexpand
from branchkv.models.support import check_model
from branchkv.paged_cache.stats import KVStats

__all__ = ["decode", "generate"]


def generate(
    model: Any,
    *args: Any,
    kv: KVConfig | None = None,
    seed: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_stats: Callable[[KVStats], None] | None = None,
    **kwargs: Any,
) -> Any:
    """``model.generate`` with each prompt computed once and its beams or samples forked from it.

    Every argument and return type is that of ``model.generate``. With ``return_dict_in_generate=True`` the output is a
    subclass of HF's own and has one more attribute, ``kv`` (KVStats).

    Args:
        model: a transformers model; unchanged afterwards.
        args, kwargs: as for ``model.generate``.
        kv: layout and budget of the K/V cache.
        seed: draw samples from streams of their own, one per (seed, prompt, sample), instead of torch's generator.
        on_step: called after each choice of tokens, for progress.
        on_stats: called with the KVStats of each decoding; models with a generate of their own may decode repeatedly.

    Raises:
        ValueError: what HF refuses with ValueError; an empty prompt; a prompt past the position table.
        UnsupportedModelError, UnsupportedOptionError: named, before anything runs.
        OutOfBlocksError: the K/V budget is too small for the call.
        NumericalError: NaN logits, or all continuations banned, with prompt and step.
    """
    kv = kv if kv is not None else KVConfig()
    check_model(model)
    check_kv(kv, model.device)
    _check_seed(seed)
    names = list(inspect.signature(type(model).generate).parameters)[1:]
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    _check_call(model, kwargs)
    _start_empty(model, kwargs)
    prompt_ids = _left_pad(model, kwargs)
    watchers = Watchers(on_step, on_stats, kwargs.get("streamer"))
    runner = _Runner(kv, seed, watchers, given_length=_given_length(model, kwargs), prompt_ids=prompt_ids)
    with _prepared_for_us(model, kwargs.get("tokenizer")):
        # type(model), since an instance attribute may be our own (branchkv.paged)
        output = type(model).generate(model, custom_generate=runner, **kwargs)
    if runner.stats is not None and hasattr(output, "keys") and not hasattr(output, "kv"):
        object.__setattr__(output, "kv", runner.stats)  # own generate methods (Whisper) rebuild the output
    return output


def decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    kv: KVConfig | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """HF's own hook: ``model.generate(**inputs, num_beams=4, custom_generate=branchkv.decode)``.

    Takes ``kv=`` and ``seed=`` as ``generate`` does. HF has expanded the inputs by then; they are un-expanded, which
    works for text and encoder-decoder models. For others, and for stop strings (HF loses the tokenizer on the way),
    call ``branchkv.generate``.
    """
    kv = kv if kv is not None else KVConfig()
    check_model(model)
    check_kv(kv, model.device)
    _check_seed(seed)
    copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    ids, plain = unexpand(input_ids, model_kwargs, copies)
    runner = _Runner(kv, seed, Watchers(), given_length=False)
    return runner(model, ids, logits_processor, stopping_criteria, generation_config, **plain)


@dataclass(frozen=True)
class Watchers:
    """Who is told what: each step, the statistics at the end, and HF's streamer the tokens of a single row."""

    on_step: Callable[[Step], None] | None = None
    on_stats: Callable[[KVStats], None] | None = None
    streamer: Any = None

    def step(self, step: Step, fill: int) -> None:
        """A step was chosen; rows that have ended stream ``fill``, as in HF."""
        if self.on_step is not None:
            self.on_step(step)
        if self.streamer is not None and step.chosen is not None:
            self.streamer.put(step.chosen.masked_fill(step.chosen < 0, fill).cpu())
            if len(step.parents) == 0:
                self.streamer.end()

    def stats(self, stats: KVStats) -> None:
        """A decoding has ended."""
        if self.on_stats is not None:
            self.on_stats(stats)


class _Runner:
    """The ``custom_generate`` callable of one call; afterwards ``stats`` holds what the cache did."""

    def __init__(
        self,
        kv: KVConfig,
        seed: int | None,
        watchers: Watchers,
        *,
        given_length: bool,
        prompt_ids: torch.Tensor | None = None,
    ) -> None:
        self._kv, self._seed, self._watchers, self._given_length = kv, seed, watchers, given_length
        self._prompt_ids = prompt_ids
        self.stats: KVStats | None = None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        check_options(generation_config, dict(model_kwargs, cache=None, past_key_values=None))
        for name in ("cache", "past_key_values"):
            model_kwargs.pop(name, None)  # HF's empty cache
        prompt_ids = input_ids if self._prompt_ids is None else self._prompt_ids
        lengths: tuple[int, ...] = (input_ids.shape[1],) * len(input_ids)
        mask = model_kwargs.get("decoder_attention_mask")
        if mask is not None and not bool(mask.all()):
            raise UnsupportedOptionError("decoder_attention_mask", "padded decoder prompts are not implemented")
        if not model.config.is_encoder_decoder:
            bos = generation_config.bos_token_id
            input_ids, lengths, model_kwargs = clean_prompts(input_ids, model_kwargs, _first(bos))
        settings = Settings(
            kv=self._kv,
            seed=self._seed,
            processors=tuple(logits_processor),
            criteria=tuple(stopping_criteria),
            config=generation_config,
            length_counts_prompt=self._given_length and generation_config.max_new_tokens is None,
        )
        call = DecodingCall(model, settings, input_ids, lengths, model_kwargs)
        output = call.run(prompt_ids, lambda step: self._watchers.step(step, call.fill))
        self.stats = call.stats()
        self._watchers.stats(self.stats)
        return output


@contextmanager
def _prepared_for_us(model: Any, tokenizer: Any) -> Iterator[None]:
    """Within, HF's generate does not repeat the inputs for beams and samples, and does not lose the tokenizer.

    HF drops ``tokenizer=`` when it calls a ``custom_generate`` callable, though its own preparations need it.
    """

    def replaced(name: str, **forced: Any) -> Callable[..., Any]:
        original = getattr(model, name)
        return lambda *args, **kwargs: original(*args, **{**kwargs, **forced})

    own = {"_expand_inputs_for_generation": replaced("_expand_inputs_for_generation", expand_size=1)}
    if tokenizer is not None:
        heal = model.heal_tokens
        own["_get_stopping_criteria"] = replaced("_get_stopping_criteria", tokenizer=tokenizer)
        own["heal_tokens"] = lambda input_ids, _=None: heal(input_ids, tokenizer)
    before = {name: model.__dict__[name] for name in own if name in model.__dict__}
    model.__dict__.update(own)
    try:
        yield
    finally:
        for name in own:
            del model.__dict__[name]
        model.__dict__.update(before)


def _check_call(model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse options before HF runs an encoder."""
    arguments = dict(kwargs)
    config, _ = model._prepare_generation_config(arguments.get("generation_config"), **_config_arguments(arguments))
    check_options(config, arguments)


def _config_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "generation_config"}


def _given_length(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether somebody set max_length; HF's default of 20 counts new tokens, a given one counts the prompt too."""
    config = kwargs.get("generation_config")
    return any(
        length is not None
        for length in (
            kwargs.get("max_length"),
            getattr(config, "max_length", None),
            model.generation_config.max_length,
        )
    )


def _start_empty(model: Any, kwargs: dict[str, Any]) -> None:
    """Give prompts without any token a BOS, in ``kwargs``; HF fails on them with an opaque error.

    Raises:
        ValueError: no prompt at all; an empty prompt, and it is an encoder's or the model has no BOS.
    """
    name = "inputs" if kwargs.get("inputs") is not None else "input_ids"
    ids = kwargs.get(name)
    if kwargs.get("inputs_embeds") is not None or not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return
    if ids.shape[0] == 0:
        raise ValueError("input_ids: expected at least one prompt, got a batch of 0")
    if ids.shape[1] > 0:
        return
    bos = _bos(model, kwargs)
    if model.config.is_encoder_decoder:
        raise ValueError("input_ids: prompt 0 is empty; an encoder needs at least one token")
    if bos is None:
        raise ValueError("input_ids: prompt 0 is empty and the model has no bos_token_id to start it with")
    kwargs[name] = ids.new_full((len(ids), 1), bos)
    kwargs.pop("attention_mask", None)


def _left_pad(model: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Repack the prompts in ``kwargs`` where a given mask is not plain left padding, before HF builds on them.

    Returns the ids as they were given, None if nothing was changed.
    """
    name = "inputs" if kwargs.get("inputs") is not None else "input_ids"
    ids = kwargs.get(name)
    if model.config.is_encoder_decoder or not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return None
    if not isinstance(kwargs.get("attention_mask"), torch.Tensor) or kwargs.get("inputs_embeds") is not None:
        return None
    bos = _bos(model, kwargs)
    others = {key: value for key, value in kwargs.items() if key != name}
    packed, _, others = clean_prompts(ids, others, bos)
    if packed is ids:
        return None
    kwargs.update(others)
    kwargs[name] = packed
    return ids


def _bos(model: Any, kwargs: dict[str, Any]) -> int | None:
    """The BOS that the call, its config or the model's own states."""
    configs = (kwargs.get("generation_config"), model.generation_config)
    candidates = (kwargs.get("bos_token_id"), *(getattr(config, "bos_token_id", None) for config in configs))
    return next((_first(token) for token in candidates if token is not None), None)


def _check_seed(seed: object) -> None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ValueError(f"seed: expected a non-negative integer or None, got {seed!r}")


def _first(token: Any) -> int | None:
    if token is None:
        return None
    return int(token[0]) if isinstance(token, (list, tuple)) else int(token)
