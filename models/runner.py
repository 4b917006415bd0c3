"""The decoding loop's model: an HF model over paged blocks, in whichever layout fits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache

from branchkv.kernels.implementations import Implementation
from branchkv.models.attention import AttentionRouter
from branchkv.models.blocks import BlockStore
from branchkv.models.cache import CrossCache, PagedCache
from branchkv.models.cross import CrossStore
from branchkv.models.layers import LayerPlan
from branchkv.models.packed import NeedsRectangular, PackedForward, PackedPass
from branchkv.models.positions import position_limit
from branchkv.models.rectangular import RectangularForward
from branchkv.models.support import cache_argument, packs
from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.manager import CacheManager
from branchkv.paged_cache.views import Writes

__all__ = ["HFModel", "ModelInputs"]


@dataclass(frozen=True)
class ModelInputs:
    """What HF has prepared for the prompts of a call, not expanded to beams or samples.

    Attributes:
        input_ids: [prompts, tokens] decoder ids, left-padded; [prompts, 0] with ``inputs_embeds`` only.
        lengths: real tokens (or embeddings) of each prompt.
        kwargs: HF's model kwargs.
        generation_config: HF's prepared generation config.
    """

    input_ids: torch.Tensor
    lengths: tuple[int, ...]
    kwargs: dict[str, Any]
    generation_config: Any


class HFModel:
    """Implements ``branchkv.decoding.protocol.Model``.

    Args:
        model: the HF model.
        plan: its layer kinds.
        inputs: the prompts.
        manager: the bookkeeping; told the sizes of blocks and of cross-attention K/V.
        store: the blocks.
        run: attention implementation.
    """

    def __init__(
        self,
        model: Any,
        plan: LayerPlan,
        inputs: ModelInputs,
        manager: CacheManager,
        store: BlockStore,
        run: Implementation,
    ) -> None:
        self._inputs, self._manager = inputs, manager
        self._cross = CrossStore()
        self._cache = PagedCache([plan.windows.get(kind) for kind in plan.kinds])
        self._limit = position_limit(model)
        name = cache_argument(model) or "cache"
        kwargs = dict(inputs.kwargs, use_cache=True)
        kwargs[name] = (
            EncoderDecoderCache(self._cache, CrossCache(self._cross, 0))
            if model.config.is_encoder_decoder
            else self._cache
        )
        self._packed: PackedForward | None = None
        if packs(model, plan, inputs.input_ids, inputs.kwargs):
            prompts = [row[len(row) - length :] for row, length in zip(inputs.input_ids, inputs.lengths, strict=True)]
            self._packed = PackedForward(model, name, store, run, prompts)
        self._rectangular = RectangularForward(
            model, inputs.generation_config, inputs.input_ids, kwargs, store, run, masked=plan.masked
        )
        # Only our own packed forward needs none: a processor may run the model itself (guidance_scale).
        self.router = AttentionRouter(model, masks_needed=lambda: not isinstance(self._cache.forward_pass, PackedPass))

    @property
    def packed(self) -> bool:
        """Whether forwards are in the packed layout."""
        return self._packed is not None

    def prefill(self, writes: Mapping[str, Writes]) -> torch.Tensor:
        """See ``Model.prefill``."""
        if self._packed is not None:
            try:
                return self._packed.prefill(self._cache, writes)
            except NeedsRectangular:
                self._packed = None  # nothing is lost: the same slots are written again
        logits = self._rectangular.prefill(self._cache, list(self._inputs.lengths), writes)
        self._manager.stats.cross_bytes = self._cross.bytes
        return logits

    def step(self, tokens: torch.Tensor, prompts: Ids, writes: Mapping[str, Writes]) -> torch.Tensor:
        """See ``Model.step``.

        Raises:
            ValueError: the step would pass the model's learned position table.
        """
        longest = int(next(iter(writes.values())).tables.lengths.max())
        if self._limit is not None and longest > self._limit:
            raise ValueError(
                f"sequence of {longest} tokens: the model's position table has {self._limit} entries; "
                "use a shorter prompt or a smaller max_new_tokens"
            )
        if self._packed is not None:
            return self._packed.step(self._cache, tokens, writes)
        self._cross.set_rows(prompts)
        return self._rectangular.step(self._cache, tokens, prompts, writes)

    def keep(self, prompts: Ids) -> None:
        """See ``Model.keep``."""
        self._cross.keep(prompts)
