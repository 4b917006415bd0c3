"""The same call by HF's own generate and by branchkv, timed and measured side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from branchkv.config import KVConfig
from branchkv.models.generate import generate
from branchkv.paged_cache.stats import KVStats

__all__ = ["Comparison", "Side", "compare", "run_branchkv", "run_hf"]


@dataclass(frozen=True)
class Side:
    """One engine's part.

    Attributes:
        seconds: wall time of the call.
        tokens: tokens returned, over all rows, padding left out.
        kv_bytes: self-attention K/V held at the peak; for HF the size of its cache at the end, without the second
            copy that reordering makes.
        sequences: [rows, tokens] what came out.
    """

    seconds: float
    tokens: int
    kv_bytes: int
    sequences: torch.Tensor

    @property
    def tokens_per_second(self) -> float:
        """Returned tokens over wall time."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Comparison:
    """Both sides of one call, and what the paged cache did."""

    hf: Side
    branchkv: Side
    kv: KVStats

    @property
    def same_tokens(self) -> bool:
        """Whether both returned the same tokens."""
        a, b = self.hf.sequences, self.branchkv.sequences
        return a.shape == b.shape and bool((a == b).all())

    @property
    def speedup(self) -> float:
        """HF's seconds over branchkv's."""
        return self.hf.seconds / self.branchkv.seconds


def compare(
    model: Any, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any], *, kv: KVConfig, seed: int = 0
) -> Comparison:
    """Run ``model.generate(**inputs, **options)`` both ways, from the same state of torch's generator."""
    branchkv, stats = run_branchkv(model, inputs, options, kv=kv, seed=seed)
    return Comparison(run_hf(model, inputs, options, seed=seed), branchkv, stats)


def run_hf(model: Any, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any], *, seed: int = 0) -> Side:
    """HF's own generate."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    output = model.generate(**inputs, **options, return_dict_in_generate=True)
    seconds = time.perf_counter() - start
    cache = output.past_key_values
    cache = getattr(cache, "self_attention_cache", cache)
    kv_bytes = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    return Side(seconds, _generated(model, inputs, output.sequences), kv_bytes, output.sequences)


def run_branchkv(
    model: Any, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any], *, kv: KVConfig, seed: int = 0
) -> tuple[Side, KVStats]:
    """Branchkv on the same call, drawing from the same generator."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    arguments: dict[str, Any] = {**inputs, **options, "return_dict_in_generate": True}
    output = generate(model, **arguments, kv=kv)
    seconds = time.perf_counter() - start
    side = Side(seconds, _generated(model, inputs, output.sequences), output.kv.peak_bytes, output.sequences)
    return side, output.kv


def _generated(model: Any, inputs: Mapping[str, torch.Tensor], sequences: torch.Tensor) -> int:
    start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    pad = model.generation_config.pad_token_id
    generated = sequences[:, start:]
    return int(generated.numel() if pad is None else (generated != pad).sum())
