"""Which options of generate are honoured. Every other one is refused by name; none is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode

from branchkv.config import KVConfig
from branchkv.errors import UnsupportedOptionError
from branchkv.kernels.implementations import check_implementation

__all__ = ["check_kv", "check_options"]

_MODES = {
    GenerationMode.CONTRASTIVE_SEARCH: ("penalty_alpha", "contrastive search is not implemented"),
    GenerationMode.ASSISTED_GENERATION: ("assistant_model", "assisted decoding is not implemented"),
    GenerationMode.DOLA_GENERATION: ("dola_layers", "DoLa is not implemented"),
    GenerationMode.GROUP_BEAM_SEARCH: ("num_beam_groups", "group beam search is not implemented"),
    GenerationMode.CONSTRAINED_BEAM_SEARCH: ("constraints", "constrained beam search is not implemented"),
}
_CONFIG_FIELDS = {
    "output_attentions": "attention over shared blocks yields no weights",
    "output_hidden_states": "prompts are computed once, not once per row",
    "prefill_chunk_size": "prompts are computed in one forward",
    "force_words_ids": "constrained beam search is not implemented",
    "compile_config": "compiled forwards are not implemented",
    "continuous_batching_config": "it configures HF's own paged engine",
    "cache_config": "the K/V cache is configured by kv=KVConfig(...)",
    "use_mtp": "multi-token prediction is not implemented",
    "prompt_lookup_num_tokens": "assisted decoding is not implemented",
    "assistant_early_exit": "assisted decoding is not implemented",
}
_ARGUMENTS = {
    "cache": "a cache filled beforehand is not paged",
    "past_key_values": "a cache filled beforehand is not paged",
    "cache_params": "a cache filled beforehand is not paged",
    "assistant_model": "assisted decoding is not implemented",
    "synced_gpus": "ranks that step in lock-step are not implemented",
    "custom_generate": "branchkv is the decoding method",
}


def check_kv(kv: KVConfig, device: torch.device) -> None:
    """Refuse what a single call cannot honour.

    Args:
        kv: the cache settings.
        device: of the model.

    Raises:
        UnsupportedOptionError: names the field of KVConfig.
        InvalidArgumentError: a block size that the attention kernel does not take.
    """
    if not isinstance(kv, KVConfig):
        raise TypeError(f"kv: expected a KVConfig, got {kv!r}")
    check_implementation(kv.attention, device, kv.block_size)
    if kv.prefix_caching:
        raise UnsupportedOptionError("prefix_caching", "blocks are given back at the end of a generate call")
    if kv.preemption == "swap":
        raise UnsupportedOptionError("preemption='swap'", "a generate call never preempts; it raises OutOfBlocksError")


def check_options(config: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what the decoding loop does not implement, before anything runs.

    Args:
        config: the resolved GenerationConfig.
        arguments: further arguments of the call.

    Raises:
        UnsupportedOptionError: names the option.
        ValueError: a combination that HF refuses with ValueError.
    """
    for name, reason in _ARGUMENTS.items():
        if arguments.get(name) is not None and arguments[name] is not False:
            raise UnsupportedOptionError(name, reason)
    for name, reason in _CONFIG_FIELDS.items():
        if getattr(config, name, None) not in (None, False):
            raise UnsupportedOptionError(name, reason)
    mode = config.get_generation_mode(None)
    if mode in _MODES:
        raise UnsupportedOptionError(*_MODES[mode])
    if config.cache_implementation not in (None, "dynamic"):
        raise UnsupportedOptionError("cache_implementation", "the cache is always branchkv's paged one")
    for name in ("num_beams", "num_return_sequences"):
        count = getattr(config, name)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"{name}: expected an integer of at least 1, got {count!r}")
    beams = config.num_beams or 1
    if beams > 1:
        _check_beams(config, arguments)
    elif not config.do_sample and (config.num_return_sequences or 1) > 1:
        raise ValueError(
            f"num_return_sequences: expected 1 for greedy decoding, got {config.num_return_sequences}; "
            "use do_sample=True or num_beams"
        )


def _check_beams(config: Any, arguments: Mapping[str, Any]) -> None:
    if (config.num_return_sequences or 1) > config.num_beams:
        raise ValueError(
            f"num_return_sequences: expected at most num_beams = {config.num_beams}, got {config.num_return_sequences}"
        )
    if arguments.get("streamer") is not None:
        raise ValueError("streamer: expected None with num_beams > 1, since beams are not final until the end")
    if getattr(config, "low_memory", None):
        raise ValueError("low_memory: expected None or False with num_beams > 1, as in transformers")
    if config.guidance_scale not in (None, 1, 1.0):
        raise UnsupportedOptionError(
            "guidance_scale", "with beams, HF's processor keeps a cache of its own that does not follow the beams"
        )
