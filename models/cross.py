"""Cross-attention K/V of an encoder-decoder: one copy per prompt, whatever the number of beams."""

from __future__ import annotations

import numpy as np
import torch

from branchkv.kernels.dense import dense_attention
from branchkv.kernels.options import AttentionOptions
from branchkv.models.handles import LazyKV
from branchkv.paged_cache.block_pool import Ids

__all__ = ["CrossSource", "CrossStore"]


class CrossStore:
    """K and V [prompts, kv_heads, source tokens, head_dim] per layer, and which prompt each decoder row reads."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._prompts: Ids = np.empty(0, dtype=np.int64)  # prompts whose K/V are held, ascending
        self._rows: Ids = np.empty(0, dtype=np.int64)  # per decoder row, index into _prompts

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the K/V of all prompts; they come from the prefill, row i being prompt i."""
        self._layers[layer] = (keys, values)
        self._prompts = np.arange(len(keys))
        self._rows = self._prompts

    def length(self, layer: int) -> int:
        """Source tokens of a layer, 0 before the prefill."""
        return self._layers[layer][0].shape[2] if layer in self._layers else 0

    def set_rows(self, prompts: Ids) -> None:
        """The decoder rows of the coming forward; ``prompts``: [rows], rows of a prompt adjacent."""
        self._rows = np.searchsorted(self._prompts, prompts)

    def keep(self, prompts: Ids) -> None:
        """Give back the K/V of every other prompt."""
        if not self._layers or len(prompts) == len(self._prompts):
            return
        index = torch.from_numpy(np.searchsorted(self._prompts, prompts))
        for layer, pair in self._layers.items():
            keys, values = (t.index_select(0, index.to(t.device)) for t in pair)
            self._layers[layer] = (keys, values)
        self._prompts = prompts

    def handle(self, layer: int, part: int) -> LazyKV | None:
        """K (part 0) or V (part 1) as the decoder rows see them, lazily; None before the prefill."""
        if layer not in self._layers:
            return None
        tensor = self._layers[layer][part]
        return LazyKV(CrossSource(self, layer, part), (len(self._rows), *tensor.shape[1:]), tensor)

    def gather(self, layer: int, part: int) -> torch.Tensor:
        """[rows, kv_heads, source tokens, head_dim], one copy per row: for code that does not know the handle."""
        tensor = self._layers[layer][part]
        return tensor.index_select(0, torch.from_numpy(self._rows).to(tensor.device))

    def attend(
        self, layer: int, query: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
    ) -> torch.Tensor:
        """Attention of all rows, each prompt's K/V read once for its rows.

        Args:
            query: [rows, query_heads, 1, key_dim].
            mask: [rows or 1, 1, 1, source tokens], equal for all rows of a prompt, or None.
            options: with a bias that is equal for all rows.

        Returns:
            [rows, 1, query_heads, value_dim].
        """
        keys, values = self._layers[layer]
        counts = np.bincount(self._rows, minlength=len(self._prompts))
        lanes = int(counts.max())
        first = np.cumsum(counts) - counts
        place = torch.from_numpy(self._rows * lanes + np.arange(len(self._rows)) - first[self._rows]).to(query.device)
        rows, heads, _, dim = query.shape
        packed = query.new_zeros((len(keys) * lanes, heads, dim))
        packed[place] = query[:, :, 0]
        if mask is not None and mask.shape[0] > 1:
            mask = mask.index_select(0, torch.from_numpy(np.minimum(first, rows - 1)).to(mask.device))
        out = dense_attention(packed.view(-1, lanes, heads, dim).transpose(1, 2), keys, values, options, mask)
        return out.transpose(1, 2).flatten(0, 1)[place].unsqueeze(1)


class CrossSource:
    """K or V of one layer for the decoder rows of this forward."""

    def __init__(self, store: CrossStore, layer: int, part: int) -> None:
        self.store = store
        self.layer = layer
        self._part = part

    def gather(self) -> torch.Tensor:
        """See ``KVSource.gather``."""
        return self.store.gather(self.layer, self._part)
