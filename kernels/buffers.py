"""A plan in memory that never moves, for launches that are recorded once and replayed with other plans."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from branchkv.kernels.checks import check
from branchkv.kernels.packing import Packing
from branchkv.kernels.plan import AttentionPlan
from branchkv.kernels.work import WorkItems

__all__ = ["PlanBuffers", "PlanCapacity"]


@dataclass(frozen=True)
class PlanCapacity:
    """The largest plan that buffers hold.

    Attributes:
        sequences: block tables.
        columns: blocks of a table.
        rows: query rows.
        items: work items.
        partials: partial results; 0 means that no plan may have any.
        slots: of the pools that will be read.
    """

    sequences: int
    columns: int
    rows: int
    items: int
    partials: int
    slots: int


class PlanBuffers:
    """Takes the place of an ``AttentionPlan`` in the Triton implementation; its tensors keep their addresses.

    A CUDA graph that was captured with these buffers reads whatever plan was loaded last: lengths and tables are read
    on the device, items beyond those of the plan are marked as padding (``count`` 0) and end at once, and so are rows
    without partial results in the merge. Query rows beyond the plan's are not written. Loading is one copy of one
    piece of memory, from page-locked memory on CUDA.

    Args:
        capacity: the largest plan to come.
        packing: the tiles of the kernel that will read it.
        block_size: slots per block, the same in all plans.
        window: as in ``AttentionPlan``, the same in all plans.
        device: where the kernel runs.

    Attributes:
        tables: [sequences, columns] int32.
        sequence, lengths, ends, order: [rows] int32; see ``AttentionPlan``.
        block_size, window: as given.
    """

    def __init__(
        self,
        capacity: PlanCapacity,
        packing: Packing,
        block_size: int,
        window: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.block_size, self.window = block_size, window
        self._capacity, self._packing = capacity, packing
        rows = capacity.rows
        sizes = [capacity.sequences * capacity.columns, rows, rows, rows, rows, capacity.items * 6, rows + 1]
        sizes.append(capacity.partials)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=self._device.is_cuda)
        self._copied = torch.cuda.Event() if self._device.is_cuda else None
        stops = list(accumulate(sizes))
        parts, self._staged = (
            [flat[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
            for flat in (self._device, self._host)
        )
        self.tables = parts[0].view(capacity.sequences, capacity.columns)
        self.sequence, self.lengths, self.ends, self.order = parts[1:5]
        self._work = WorkItems(parts[5].view(capacity.items, 6), parts[6], parts[7], capacity.partials)

    @property
    def slots(self) -> int:
        """Slots that the pools must have."""
        return self._capacity.slots

    @property
    def rows(self) -> int:
        """Query rows of a launch, those without a meaning included."""
        return self._capacity.rows

    def work(self, packing: Packing) -> WorkItems:
        """The work items, padded.

        Raises:
            InvalidArgumentError: other tiles than those of the buffers.
        """
        check("packing", packing == self._packing, f"{self._packing}, that of the buffers", packing)
        return self._work

    def load(self, plan: AttentionPlan) -> None:
        """Put a plan into the buffers; the copy is ordered with the launches on the current stream.

        Args:
            plan: made on the host (``device`` None), of the buffers' block size and window.

        Raises:
            InvalidArgumentError: the plan does not fit; the buffers stay as they were.
        """
        work = plan.work(self._packing)
        self._check(plan, work)
        if self._copied is not None:
            self._copied.synchronize()  # the copy before may still be reading the page-locked memory
        tables, sequence, lengths, ends, order, items, offsets, slots = self._staged
        sequences, columns = plan.tables.shape
        tables.view(self.tables.shape)[:sequences, :columns] = plan.tables
        for target, values in ((sequence, plan.sequence), (lengths, plan.lengths), (ends, plan.ends)):
            target[: plan.rows] = values
        order[: plan.rows] = plan.order
        items.zero_()
        items.view(-1, 6)[: len(work.items)] = work.items
        offsets[: plan.rows + 1] = work.offsets
        offsets[plan.rows + 1 :] = work.offsets[-1]
        slots[: work.partials] = work.slots
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))

    def _check(self, plan: AttentionPlan, work: WorkItems) -> None:
        most, (sequences, columns) = self._capacity, plan.tables.shape
        for name, got, limit in (
            ("sequences", sequences, most.sequences),
            ("columns", columns, most.columns),
            ("rows", plan.rows, most.rows),
            ("items", len(work.items), most.items),
            ("partials", work.partials, most.partials),
            ("slots", (plan.largest_block + 1) * plan.block_size, most.slots),
        ):
            check("plan", got <= limit, f"at most {limit} {name}, the capacity of the buffers", got)
        for name in ("block_size", "window"):
            mine, got = getattr(self, name), getattr(plan, name)
            check("plan", got == mine, f"{name} {mine}", got)
        device = plan.tables.device
        check("plan", device.type == "cpu", "a plan on the host, device None", device)
