"""What one step needs of the block tables, per layer kind, made once and used by all layers of the kind."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from branchkv.kernels.plan import AttentionPlan
from branchkv.kernels.planner import Planner
from branchkv.kernels.row_slots import RowSlots, row_slots
from branchkv.models.blocks import BlockStore
from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.views import TableView, Writes

__all__ = ["Planners", "StepPlans"]


class Planners:
    """One planner per layer kind and window, kept from step to step: each plan starts from the one before.

    Args:
        store: the blocks.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._planners: dict[tuple[str, int | None], Planner] = {}

    def plan(self, layer: int, window: int | None, tables: TableView) -> AttentionPlan:
        """What the newest token of each sequence reads in ``layer``."""
        kind = self._store.kind(layer)
        if (kind, window) not in self._planners:
            device = self._store.pool(layer).keys.device
            self._planners[kind, window] = Planner(tables.block_size, self._store.null_slot(kind), window, device)
        return self._planners[kind, window].plan(tables.blocks, tables.lengths)


class StepPlans:
    """Slots to write and slots to read in one step.

    Args:
        store: the blocks.
        writes: per kind, from the manager.
        planners: those of the steps before.
    """

    def __init__(self, store: BlockStore, writes: Mapping[str, Writes], planners: Planners) -> None:
        self._store, self._planners = store, planners
        self._writes = writes
        self._slots: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._plans: dict[tuple[str, int | None], AttentionPlan] = {}
        self._row_slots: dict[str, RowSlots] = {}

    @property
    def lengths(self) -> Ids:
        """[rows] tokens of each row, this step's included."""
        return next(iter(self._writes.values())).tables.lengths

    @property
    def longest(self) -> int:
        """Most tokens of any row."""
        return int(self.lengths.max(initial=0))

    def window(self, layer: int, asked: int | None) -> int | None:
        """The narrower of the layer's own window and the one the module asks for."""
        own = self._writes[self._store.kind(layer)].tables.window
        windows = [window for window in (own, asked) if window is not None]
        return min(windows) if windows else None

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's new tokens of a layer, [tokens, kv_heads, head_dim], sequence by sequence."""
        kind = self._store.kind(layer)
        if kind not in self._slots:
            every = self._writes[kind].slots
            kept = np.flatnonzero(every >= 0)
            all_kept = len(kept) == len(every)
            self._slots[kind] = (
                torch.from_numpy(every[kept]).to(keys.device),
                None if all_kept else torch.from_numpy(kept).to(keys.device),
            )
        slots, index = self._slots[kind]
        if index is not None:
            keys, values = keys[index], values[index]
        self._store.write(layer, keys, values, slots, self._writes[kind].copies)

    def plan(self, layer: int, window: int | None) -> AttentionPlan:
        """What each row's newest token reads."""
        kind = self._store.kind(layer)
        if (kind, window) not in self._plans:
            self._plans[kind, window] = self._planners.plan(layer, window, self._writes[kind].tables)
        return self._plans[kind, window]

    def row_slots(self, layer: int) -> RowSlots:
        """Every slot that each row sees in a layer, for code that wants dense K/V."""
        kind = self._store.kind(layer)
        if kind not in self._row_slots:
            tables = self._writes[kind].tables
            first = np.maximum(tables.lengths - (tables.window or tables.lengths), 0)
            self._row_slots[kind] = row_slots(
                tables.blocks,
                tables.lengths,
                first,
                block_size=tables.block_size,
                null_slot=self._store.null_slot(kind),
                device=self._store.pool(layer).keys.device,
            )
        return self._row_slots[kind]
