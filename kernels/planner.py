"""Plans of consecutive steps: what the step before has found out about the tables is kept where they did not change."""

from __future__ import annotations

import numpy as np
import torch

from branchkv.kernels.plan import AttentionPlan, make_sequences
from branchkv.kernels.tree import Ints, Nodes, Sequences, Table, find_nodes, join_nodes, sort_rows

__all__ = ["Planner"]


class Planner:
    """Makes the plan of each step of one layer kind.

    Three cases: the blocks are those of the step before (most steps: the last block fills), and only lengths are new;
    the rows are the same and some last columns changed, and only these are looked at; anything else is made anew.

    Args:
        block_size: slots per block.
        null_slot: slot that reads as zero.
        window: how many of the newest tokens a row sees; None for all.
        device: where the plan's tensors go.
    """

    def __init__(self, block_size: int, null_slot: int, window: int | None, device: torch.device | None) -> None:
        self._block_size, self._null_slot = block_size, null_slot
        self._window, self._device = window, device
        self._last: AttentionPlan | None = None

    def plan(self, tables: Ints, lengths: Ints, queries: Ints | None = None) -> AttentionPlan:
        """Arguments and errors as for ``make_plan``."""
        sequences = make_sequences(tables, lengths, queries, self._block_size, self._window)
        last = self._last
        if last is None or not _same_rows(last.sequences, sequences):
            order = sort_rows(sequences.tables)
            nodes = find_nodes(sequences.tables[order])
        else:
            column = _first_change(last.sequences.tables, sequences.tables)
            if column is None:
                self._last = last.with_ends(sequences.ends)
                return self._last
            order, nodes = _extend(last, sequences.tables, column)
        self._last = AttentionPlan(sequences, order, nodes, self._null_slot, self._device)
        return self._last


def _same_rows(before: Sequences, now: Sequences) -> bool:
    return len(before.ends) == len(now.ends) and np.array_equal(before.queries, now.queries)


def _first_change(before: Table, now: Table) -> int | None:
    """First column in which any row differs; columns of one table only hold -1 at the beginning of their lives."""
    columns = min(before.shape[1], now.shape[1])
    differs = (before[:, :columns] != now[:, :columns]).any(axis=0)
    if differs.any():
        return int(np.argmax(differs))
    more = before if before.shape[1] > columns else now
    return columns if bool((more[:, columns:] >= 0).any()) else None


def _extend(last: AttentionPlan, tables: Table, column: int) -> tuple[Ints, Nodes]:
    """Order and nodes of tables that are those of ``last`` up to ``column``.

    Rows that hold the same blocks up to ``column`` may change places; the nodes there do not see that. A node that
    ended or was cut at ``column`` and one that begins there are one if they span the same rows.
    """
    nodes, order = last.nodes, last.sequence_order
    if column == 0:
        order = sort_rows(tables)
        return order, find_nodes(tables[order])
    old = nodes.block_start < column
    edge = np.zeros(len(order) + 1, dtype=np.int32)
    edge[nodes.row_start[old]] = edge[nodes.row_stop[old]] = 1
    group = np.cumsum(edge[:-1], dtype=np.int32)  # rows are of one group if no node parts them
    right = tables[order, column:]
    inner = sort_rows(np.concatenate([group[:, None], right], axis=1))
    fresh = find_nodes(right[inner])
    return order[inner], join_nodes(nodes, fresh, column)
