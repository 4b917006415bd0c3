"""The packed forward: all tokens of all rows in one row [1, tokens], with explicit positions.

For decoder-only models whose attention goes through HF's interface; no padding exists anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from branchkv.kernels.attention import attention
from branchkv.kernels.dense import causal_attention
from branchkv.kernels.implementations import Implementation
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan
from branchkv.models.blocks import BlockStore
from branchkv.models.handles import LazyKV
from branchkv.models.planning import Planners, StepPlans
from branchkv.paged_cache.views import Writes

__all__ = ["NeedsRectangular", "PackedForward", "PackedPass"]


class NeedsRectangular(Exception):
    """The model computes with K/V outside the attention interface, which the packed layout cannot serve."""


class PackedForward:
    """Runs a model in the packed layout.

    Args:
        model: the HF model.
        cache_name: the forward's keyword for the cache.
        store: the blocks.
        run: attention implementation.
        prompts: each prompt's token ids [tokens].
    """

    def __init__(
        self, model: Any, cache_name: str, store: BlockStore, run: Implementation, prompts: list[torch.Tensor]
    ):
        self._model, self._cache_name = model, cache_name
        self._store, self._run, self._prompts = store, run, prompts
        self._planners = Planners(store)

    def prefill(self, cache: Any, writes: Mapping[str, Writes]) -> torch.Tensor:
        """[prompts, vocabulary] logits of the prompts' last tokens."""
        lengths = [len(prompt) for prompt in self._prompts]
        positions = torch.cat([torch.arange(length) for length in lengths])
        last = torch.tensor(np.cumsum(lengths) - 1)
        packed = PackedPass(self._store, self._run, writes, lengths, self._planners)
        return self._forward(cache, packed, torch.cat(self._prompts), positions, last)

    def step(self, cache: Any, tokens: torch.Tensor, writes: Mapping[str, Writes]) -> torch.Tensor:
        """[rows, vocabulary] logits of one new token per row."""
        lengths = next(iter(writes.values())).tables.lengths
        packed = PackedPass(self._store, self._run, writes, [1] * len(tokens), self._planners)
        return self._forward(cache, packed, tokens, torch.from_numpy(lengths - 1), None)

    def _forward(
        self, cache: Any, packed: PackedPass, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        inputs: dict[str, Any] = {self._cache_name: cache, "input_ids": tokens[None]}
        inputs["position_ids"] = positions[None].to(tokens.device)
        if keep is not None:
            inputs["logits_to_keep"] = keep.to(tokens.device)
        with cache.during(packed):
            logits: torch.Tensor = self._model(**inputs, use_cache=True, return_dict=True).logits[0]
        return logits


class PackedPass:
    """K/V of one packed forward; see ``branchkv.models.cache.ForwardPass``.

    Args:
        store: the blocks.
        run: attention implementation.
        writes: per kind, copies, slots and tables of this step.
        lengths: new tokens of each row.
        planners: those of the steps before.
    """

    def __init__(
        self,
        store: BlockStore,
        run: Implementation,
        writes: Mapping[str, Writes],
        lengths: list[int],
        planners: Planners,
    ) -> None:
        self._store, self._run, self._lengths = store, run, lengths
        self._plans = StepPlans(store, writes, planners)
        self._decode = all(length == 1 for length in lengths) and self._plans.longest > 1

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V [1, kv_heads, tokens, head_dim]: write them, return handles that only the attention function can read."""
        self._plans.write(layer, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        source = _PackedSource(self, layer, keys, values)
        return LazyKV(source, tuple(keys.shape), keys), LazyKV(source, tuple(values.shape), values)

    def cached(self, layer: int) -> int:
        """Nothing comes before: positions are explicit and there is no mask."""
        return 0

    def mask_sizes(self, layer: int, queries: int) -> tuple[int, int]:
        """The row itself."""
        return queries, 0

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        fresh: tuple[torch.Tensor, torch.Tensor],
        options: AttentionOptions,
        window: int | None,
    ) -> torch.Tensor:
        """[1, tokens, query_heads, value_dim]; see ``SelfSource.attend``."""
        window = self._plans.window(layer, window)
        if self._decode:
            pool = self._store.pool(layer)
            plan: AttentionPlan = self._plans.plan(layer, window)
            out, _ = attention(query[0].transpose(0, 1), pool.keys, pool.values, plan, options, self._run)
            return out[None]
        return self._prompts(query, fresh, options, window)

    def _prompts(
        self,
        query: torch.Tensor,
        fresh: tuple[torch.Tensor, torch.Tensor],
        options: AttentionOptions,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention within each prompt, over the K/V just computed."""
        outputs = []
        for start, length in zip(np.cumsum([0, *self._lengths]), self._lengths, strict=False):
            part = slice(int(start), int(start) + length)
            keys, values = (tensor[:, :, part] for tensor in fresh)
            out = causal_attention(query[:, :, part], keys, values, options, window)
            outputs.append(out.transpose(1, 2))
        return torch.cat(outputs, dim=1)


class _PackedSource:
    def __init__(self, packed: PackedPass, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._packed, self._layer, self._fresh = packed, layer, (keys, values)

    def gather(self) -> torch.Tensor:
        raise NeedsRectangular

    def attend(self, query: torch.Tensor, options: AttentionOptions, window: int | None) -> torch.Tensor:
        if options.bias is not None:
            raise NeedsRectangular
        return self._packed.attend(self._layer, query, self._fresh, options, window)
