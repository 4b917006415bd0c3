"""What one step reads: made on the host from block tables and lengths alone, used by all layers of one kind."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch

from branchkv.kernels.checks import check
from branchkv.kernels.cost import GPU_COST, CostModel
from branchkv.kernels.cpu_batches import CPUBatch, make_batches
from branchkv.kernels.cpu_layout import CPULayout, cpu_layout
from branchkv.kernels.packing import Packing
from branchkv.kernels.sharing import plain_runs, shared_runs
from branchkv.kernels.tree import Ints, Nodes, Sequences, find_nodes, sort_rows, visible
from branchkv.kernels.work import WorkItems, alignment, best_cut, make_work, shortest_time

__all__ = ["AttentionPlan", "make_plan", "make_sequences"]


class AttentionPlan:
    """Which tokens the query rows of a step read, and which of them several rows read together.

    A sequence, a row of the block table, has one or more new tokens; each is a query row. Rows are numbered sequence by
    sequence, oldest first. A row of length L sees the positions [max(0, L - window), L).

    Args:
        sequences: the tables, with -1 where nothing is seen.
        order: [sequences] sorted place -> sequence.
        nodes: the tree of the sorted tables.
        null_slot: slot that reads as zero.
        device: where the tensors go.
        cost: the device's cost model.

    Attributes:
        sequences, order, nodes, null_slot, device: as given.
        block_size, window: of the sequences.
        accepted: shapes, strides, dtypes and devices of tensors that have been found to fit the plan.
    """

    def __init__(
        self,
        sequences: Sequences,
        order: Ints,
        nodes: Nodes,
        null_slot: int,
        device: torch.device | None = None,
        cost: CostModel = GPU_COST,
    ) -> None:
        self.sequences, self.sequence_order, self.nodes = sequences, order, nodes
        self.null_slot, self.device, self._cost = null_slot, device, cost
        self.block_size, self.window = sequences.block_size, sequences.window
        self._work: dict[Packing, WorkItems] = {}
        self.accepted: set[tuple[Any, ...]] = set()

    @property
    def rows(self) -> int:
        """Number of query rows."""
        return len(self.row_lengths)

    @cached_property
    def row_lengths(self) -> Ints:
        """[rows] tokens up to each row's own, on the host."""
        queries = self.sequences.queries
        last = np.cumsum(queries)
        lengths: Ints = np.repeat(self.sequences.ends - last, queries) + np.arange(1, int(queries.sum()) + 1)
        return lengths

    @cached_property
    def row_order(self) -> Ints:
        """[rows] sorted place -> query row, on the host; the rows of a sequence stay together."""
        queries = self.sequences.queries
        starts = np.cumsum(queries) - queries
        sizes = queries[self.sequence_order]
        before = np.cumsum(sizes) - sizes
        rows: Ints = np.repeat(starts[self.sequence_order] - before, sizes) + np.arange(int(sizes.sum()))
        return rows

    @cached_property
    def most(self) -> int:
        """Most positions from the first that any row of a sequence sees to the end of the sequence."""
        return int((self.sequences.ends - self.sequences.firsts).max(initial=0))

    @cached_property
    def largest_block(self) -> int:
        """Largest block id that is read; -1 where nothing is."""
        return int(self.sequences.tables.max(initial=-1))

    @cached_property
    def tables(self) -> torch.Tensor:
        """[sequences, columns] int32 block ids, -1 where nothing is seen."""
        return self._upload(self.sequences.tables)

    @cached_property
    def sequence(self) -> torch.Tensor:
        """[rows] int32 sequence of each query row."""
        queries = self.sequences.queries
        return self._upload(np.repeat(np.arange(len(queries)), queries))

    @cached_property
    def lengths(self) -> torch.Tensor:
        """[rows] int32 tokens up to each row's own."""
        return self._upload(self.row_lengths)

    @cached_property
    def ends(self) -> torch.Tensor:
        """[rows] int32 tokens of each row's sequence."""
        return self._upload(np.repeat(self.sequences.ends, self.sequences.queries))

    @cached_property
    def order(self) -> torch.Tensor:
        """[rows] int32 sorted place -> query row."""
        return self._upload(self.row_order)

    @cached_property
    def cpu_layout(self) -> CPULayout:
        """The plan as the CPU implementation reads it."""
        return cpu_layout(self.sequences, self.sequence_order, self.nodes, null_slot=self.null_slot, device=self.device)

    @cached_property
    def cpu_batches(self) -> tuple[CPUBatch, ...]:
        """The runs of ``cpu_layout``, those of one shape and spacing together."""
        return make_batches(self.cpu_layout.runs, self.device)

    @property
    def cost(self) -> CostModel:
        """The device's cost model."""
        return self._cost

    def work(self, packing: Packing) -> WorkItems:
        """The work items of a kernel: shared where that is modelled to end earlier, else as if nothing were shared."""
        if packing not in self._work:
            align = alignment(self.block_size)
            runs = shared_runs(self.sequences, self.sequence_order, self.nodes, packing, self._cost)
            cut, time = best_cut(runs, packing, self._cost, align)
            if bool((self.nodes.rows > 1).any()):
                alone = plain_runs(self.sequences, self.sequence_order)
                if shortest_time(alone, packing, self._cost) < time:
                    plain_cut, plain_time = best_cut(alone, packing, self._cost, align)
                    if plain_time <= time:
                        runs, cut = alone, plain_cut
            work = make_work(runs, self.row_order, packing, self._cost, cut)
            self._work[packing] = work.to(self.device)
        return self._work[packing]

    def with_ends(self, ends: Ints) -> AttentionPlan:
        """The plan for other lengths in the same blocks: items end at block ends, so they stay as they are."""
        old = self.sequences
        sequences = Sequences(old.tables, ends, old.queries, old.block_size, old.window)
        plan = AttentionPlan(sequences, self.sequence_order, self.nodes, self.null_slot, self.device, self._cost)
        plan._work = self._work
        for name in ("tables", "sequence", "order", "row_order", "largest_block"):
            if name in self.__dict__:
                plan.__dict__[name] = self.__dict__[name]
        return plan

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self.device)


def make_plan(
    tables: Ints,
    lengths: Ints,
    *,
    block_size: int,
    null_slot: int,
    queries: Ints | None = None,
    window: int | None = None,
    device: torch.device | None = None,
) -> AttentionPlan:
    """Plan from scratch; ``branchkv.kernels.planner.Planner`` makes one step after step from the one before.

    Args:
        tables: [sequences, columns] physical block ids in logical order; -1 where nothing is held. A block may be in
            any tables; what is shared from the first visible block on is read once.
        lengths: [sequences] tokens of each sequence, this step's included.
        block_size: slots per block.
        null_slot: slot that reads as zero.
        queries: [sequences] new tokens of each sequence; None for one each.
        window: how many of the newest tokens a row sees, itself included; None for all.
        device: where the plan's tensors go.

    Raises:
        InvalidArgumentError: the arrays do not fit together, or a block that a row sees is missing. They are copied.
    """
    sequences = make_sequences(tables, lengths, queries, block_size, window)
    check("null_slot", null_slot >= 0, "at least 0", null_slot)
    order = sort_rows(sequences.tables)
    return AttentionPlan(sequences, order, find_nodes(sequences.tables[order]), null_slot, device)


def make_sequences(tables: Ints, lengths: Ints, queries: Ints | None, block_size: int, window: int | None) -> Sequences:
    """Checked and copied input of a plan; see ``make_plan``."""
    queries = np.ones_like(lengths) if queries is None else queries
    for name, values in (("tables", tables), ("lengths", lengths), ("queries", queries)):
        check(name, isinstance(values, np.ndarray), "a numpy array", type(values).__name__)
        check(name, np.issubdtype(values.dtype, np.integer), "integers", values.dtype)
    for name, number in (("block_size", block_size), ("window", 1 if window is None else window)):
        whole = isinstance(number, (int, np.integer)) and number >= 1
        check(name, whole, f"a whole number of at least 1{', or None' * (name == 'window')}", number)
    check("tables", tables.ndim == 2, "a matrix [sequences, columns]", list(tables.shape))
    largest = tables.max(initial=-1)
    check("tables", largest <= np.iinfo(np.int32).max, "block ids below 2**31", largest)
    for name, values in (("lengths", lengths), ("queries", queries)):
        check(name, values.shape == tables.shape[:1], f"shape {list(tables.shape[:1])}", list(values.shape))
        check(name, not (values < 1).any(), "at least 1", values.min(initial=1))
    lengths, queries = lengths.astype(np.int64), queries.astype(np.int64)  # copies: the caller's may change
    check("queries", not (queries > lengths).any(), "no more than the sequence has tokens", queries.max(initial=0))
    held, most = tables.shape[1] * block_size, lengths.max(initial=0)
    check("lengths", most <= held, f"at most {held}, the slots of {tables.shape[1]} columns of tables", most)
    sequences = Sequences(tables.astype(np.int32), lengths, queries, block_size, window)
    seen = visible(sequences)
    wanted = (-(-lengths // block_size) - sequences.firsts // block_size).sum()
    missing = wanted - np.count_nonzero(seen >= 0)
    check("tables", missing == 0, "a block id of at least 0 for every block that a row sees", f"{missing} without")
    return Sequences(seen, lengths, queries, block_size, window)
