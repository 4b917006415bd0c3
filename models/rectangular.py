"""The rectangular forward: one row per sequence [rows, tokens], inputs prepared by the model's own methods.

For every model that the packed layout does not fit: encoder-decoders, models with attention of their own, models with
further inputs. Prompts are computed once, left-padded as HF has them; pads are never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.utils.generic import ModelOutput

from branchkv.kernels.attention import attention
from branchkv.kernels.implementations import Implementation
from branchkv.kernels.options import AttentionOptions
from branchkv.models.blocks import BlockStore
from branchkv.models.handles import LazyKV
from branchkv.models.planning import Planners, StepPlans
from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.views import Writes

__all__ = ["RectangularForward", "RectangularPass"]


class RectangularForward:
    """Runs a model in the rectangular layout.

    Args:
        model: the HF model.
        generation_config: as prepared by ``generate``.
        input_ids: [prompts, tokens] (decoder) ids, left-padded.
        model_kwargs: HF's model kwargs for the prompts, not expanded; holds the cache.
        store: the blocks.
        run: attention implementation.
        masked: whether layers are restricted by their mask only, so that the model's own attention has to run.
    """

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        store: BlockStore,
        run: Implementation,
        *,
        masked: bool,
    ) -> None:
        self._model, self._generation_config = model, generation_config
        self._input_ids, self._kwargs = input_ids, model_kwargs
        self._store, self._run, self._masked = store, run, masked
        self._planners = Planners(store)
        self._padded = input_ids.shape[1]  # tokens cached so far, padding included
        self._selected: tuple[Ids, Any] | None = None

    def prefill(self, cache: Any, lengths: list[int], writes: Mapping[str, Writes]) -> torch.Tensor:
        """[prompts, vocabulary] logits of the prompts' last tokens; ``lengths`` are their real tokens."""
        width = self._prompt_width()
        rows = RectangularPass(self._store, self._run, writes, 0, lengths, self._planners, masked=True)
        with cache.during(rows):
            output = self._model._prefill(self._input_ids, self._generation_config, self._kwargs)
        self._padded = width
        self._after(output)
        self._kwargs.pop("inputs_embeds", None)  # only the prefill reads them
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def step(self, cache: Any, tokens: torch.Tensor, prompts: Ids, writes: Mapping[str, Writes]) -> torch.Tensor:
        """[rows, vocabulary] logits of one new token per row."""
        ones = [1] * len(tokens)
        cached, planners = self._padded, self._planners
        rows = RectangularPass(self._store, self._run, writes, cached, ones, planners, masked=self._masked)
        ids = tokens.new_zeros((len(tokens), self._padded + 1))
        ids[:, -1] = tokens
        kwargs = self._rows(prompts)
        with cache.during(rows):
            inputs = self._model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
            output = self._model(**inputs, return_dict=True)
        self._padded += 1
        self._after(output)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _prompt_width(self) -> int:
        embeds = self._kwargs.get("inputs_embeds")
        if embeds is not None and not self._model.config.is_encoder_decoder:
            return int(embeds.shape[1])
        return int(self._input_ids.shape[1])

    def _after(self, output: Any) -> None:
        """Let HF advance masks and positions of all prompts; rows are picked from them in the next step."""
        self._kwargs = self._model._update_model_kwargs_for_generation(
            output, self._kwargs, is_encoder_decoder=self._model.config.is_encoder_decoder
        )

    def _rows(self, prompts: Ids) -> dict[str, Any]:
        """The kwargs of the prompts, repeated for their rows."""
        count = len(self._input_ids)
        encoder = self._kwargs.get("encoder_outputs")
        if encoder is not None and (self._selected is None or not np.array_equal(self._selected[0], prompts)):
            self._selected = prompts, _select(encoder, prompts, count)
        rows = {
            name: _select(value, prompts, count, dim=1 if name == "position_ids" and value.ndim == 3 else 0)
            for name, value in self._kwargs.items()
            if name != "encoder_outputs"
        }
        if encoder is not None and self._selected is not None:
            rows["encoder_outputs"] = self._selected[1]
        return rows


class RectangularPass:
    """K/V of one rectangular forward; see ``branchkv.models.cache.ForwardPass``.

    Args:
        store: the blocks.
        run: attention implementation.
        writes: per kind, copies, slots and tables of this step.
        cached: tokens before this forward, padding included.
        lengths: new real tokens of each row.
        planners: those of the steps before.
        masked: leave attention to the model's own function, with its masks.
    """

    def __init__(
        self,
        store: BlockStore,
        run: Implementation,
        writes: Mapping[str, Writes],
        cached: int,
        lengths: list[int],
        planners: Planners,
        *,
        masked: bool,
    ) -> None:
        self._store, self._run, self._masked = store, run, masked
        self._cached, self._lengths = cached, lengths
        self._dtype: torch.dtype | None = None
        self._plans = StepPlans(store, writes, planners)
        self._windows = {kind: write.tables.window for kind, write in writes.items()}

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V [rows, kv_heads, queries, head_dim]: write the real tokens; handles of all keys, or the prompt's K/V."""
        queries = keys.shape[2]
        self._dtype = keys.dtype
        fresh = tuple(_real_tokens(tensor.transpose(1, 2), self._lengths) for tensor in (keys, values))
        self._plans.write(layer, fresh[0], fresh[1])
        if self._cached == 0:
            return keys, values
        width = self.mask_sizes(layer, queries)[0]
        handles = [
            LazyKV(_RowsSource(self, layer, part, width), (*tensor.shape[:2], width, tensor.shape[3]), tensor)
            for part, tensor in enumerate((keys, values))
        ]
        return handles[0], handles[1]

    def cached(self, layer: int) -> int:
        """Tokens before this forward, padding included."""
        return self._cached

    def mask_sizes(self, layer: int, queries: int) -> tuple[int, int]:
        """As HF's dynamic layers: all keys, or the last ``window - 1`` and the new ones."""
        window = self._windows[self._store.kind(layer)]
        total = self._cached + queries
        if window is None or self._cached < window:
            return total, 0
        return window - 1 + queries, self._cached - window + 1

    def gather(self, layer: int, part: int, width: int) -> torch.Tensor:
        """[rows, kv_heads, width, head_dim], left-padded with zeros."""
        kind = self._store.kind(layer)
        rows = self._plans.row_slots(layer)
        slots = F.pad(rows.slots, (width - rows.width, 0), value=self._store.null_slot(kind))
        pool = self._store.pool(layer)
        tensor = (pool.keys, pool.values)[part]
        return tensor[slots].to(self._dtype).transpose(1, 2).contiguous()

    def attend(
        self, layer: int, query: torch.Tensor, options: AttentionOptions, window: int | None
    ) -> torch.Tensor | None:
        """See ``SelfSource.attend``."""
        if self._masked or query.shape[2] != 1:
            return None
        pool = self._store.pool(layer)
        plan = self._plans.plan(layer, self._plans.window(layer, window))
        out, _ = attention(query[:, :, 0], pool.keys, pool.values, plan, options, self._run)
        return out[:, None]


class _RowsSource:
    def __init__(self, rows: RectangularPass, layer: int, part: int, width: int) -> None:
        self._rows, self._layer, self._part, self._width = rows, layer, part, width

    def gather(self) -> torch.Tensor:
        return self._rows.gather(self._layer, self._part, self._width)

    def attend(self, query: torch.Tensor, options: AttentionOptions, window: int | None) -> torch.Tensor | None:
        return self._rows.attend(self._layer, query, options, window)


def _real_tokens(padded: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[rows, tokens, ...] left-padded -> [sum of lengths, ...]."""
    width = padded.shape[1]
    if all(length == width for length in lengths):
        return padded.flatten(0, 1)
    return torch.cat([row[width - length :] for row, length in zip(padded, lengths, strict=True)])


def _select(value: Any, prompts: Ids, count: int, dim: int = 0) -> Any:
    """Rows of a tensor (or of the tensors of a ModelOutput) that has one entry per prompt; other values as they are.

    ``dim`` is the prompts' dimension: 1 for multimodal position ids [axes, prompts, tokens].
    """
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _select(part, prompts, count) for name, part in value.items()})
    if not isinstance(value, torch.Tensor) or value.ndim <= dim or value.shape[dim] != count:
        return value
    if count == 1:
        shape = list(value.shape)
        shape[dim] = len(prompts)
        return value.expand(shape)
    return value.index_select(dim, torch.from_numpy(prompts).to(value.device))
