"""The bookkeeping of a paged cache: sequences over all layer kinds, copy-on-write, and the budget."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from branchkv.errors import OutOfBlocksError
from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.budget import BlockBudget, ByteBudget
from branchkv.paged_cache.events import EventLog
from branchkv.paged_cache.stats import KindSample, StatsCollector
from branchkv.paged_cache.tables import BlockTables
from branchkv.paged_cache.views import Writes

__all__ = ["CacheManager"]


class CacheManager:
    """Sequences that fork, grow and end over shared blocks. Plain integers; knows no tensors.

    A sequence is a handle (an integer). It has one block table per layer kind, all of the same length. The cycle of a
    step is ``append`` (returns slots and copies), the copies and writes by the storage, ``copies_done``, ``observe``,
    then ``reorder`` and ``free``.

    Args:
        block_size: token slots per block.
        kinds: name -> sliding window in tokens, or None for full attention.
        budget: what may be held at once.
        log: records every event when given.
    """

    def __init__(
        self,
        block_size: int,
        kinds: Mapping[str, int | None],
        budget: BlockBudget | ByteBudget,
        log: EventLog | None = None,
    ) -> None:
        self.block_size = block_size
        self.budget = budget
        self.log = log
        self.tables = {kind: BlockTables(block_size, window, log, kind) for kind, window in kinds.items()}
        self.stats = StatsCollector(block_size, tuple(kinds))
        self._live = np.zeros(8, dtype=bool)
        self._pending: list[dict[str, Writes]] = []

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def live(self) -> Ids:
        """Handles of all open sequences, ascending."""
        return np.flatnonzero(self._live)

    @property
    def held(self) -> dict[str, int]:
        """Physical blocks held, per kind."""
        return {kind: tables.pool.held for kind, tables in self.tables.items()}

    def lengths(self, seqs: Ids) -> Ids:
        """Tokens written per sequence, shape [seqs]."""
        return next(iter(self.tables.values())).lengths(seqs)

    def need(self, seqs: Ids, tokens: Ids) -> dict[str, int]:
        """Blocks per kind that ``append`` would take."""
        return {kind: tables.need(seqs, tokens) for kind, tables in self.tables.items()}

    # -- changing -----------------------------------------------------------------------------------------------

    def open(self, count: int) -> Ids:
        """``count`` new empty sequences; they hold no blocks yet."""
        seqs = self._take_handles(count)
        for tables in self.tables.values():
            tables.open(seqs)
        return seqs

    def append(self, seqs: Ids, tokens: Ids) -> dict[str, Writes]:
        """Make room for ``tokens[i]`` more tokens in sequence i, in every kind; all or nothing.

        Raises:
            OutOfBlocksError: the budget does not hold what this needs; nothing has changed then.
        """
        if self._pending:
            raise RuntimeError("append before copies_done: the copies of the last step have not run")
        self._check_open(seqs)
        need, held = self.need(seqs, tokens), self.held
        self.budget.check(need, held)
        for kind, tables in self.tables.items():
            if tables.pool.capacity is not None and need[kind] > tables.pool.capacity - held[kind]:
                raise OutOfBlocksError(need[kind], tables.pool.capacity - held[kind], tables.pool.capacity)
        writes = {kind: tables.append(seqs, tokens) for kind, tables in self.tables.items()}
        self._pending.append(writes)
        self.stats.copied({kind: len(write.copies.source) for kind, write in writes.items()})
        return writes

    def copies_done(self) -> None:
        """The storage has run the copies of the last ``append``."""
        for writes in self._pending:
            for kind, write in writes.items():
                self.tables[kind].release_copies(write.copies)
        self._pending.clear()

    def reorder(self, seqs: Ids, parents: Ids) -> Ids:
        """Replace ``seqs`` by forks: child i continues ``seqs[parents[i]]``; those without a child are freed.

        Returns the children's handles. Moves no bytes and takes no blocks.
        """
        self._check_open(seqs)
        if np.any((parents < 0) | (parents >= len(seqs))):
            raise RuntimeError(f"reorder: expected parents below {len(seqs)}, got {parents.tolist()[:8]}")
        used, first = np.unique(parents, return_index=True)
        children = np.empty(len(parents), dtype=np.int64)
        others = np.ones(len(parents), dtype=bool)
        others[first] = False
        children[first] = seqs[used]  # the first child of each parent keeps its handle
        self._live[np.delete(seqs, used)] = False
        children[others] = self._take_handles(int(others.sum()))
        for tables in self.tables.values():
            tables.reorder(seqs, parents, children)
        self.stats.forked(int(others.sum()))
        return children

    def free(self, seqs: Ids) -> None:
        """Close sequences and give back their blocks.

        Raises:
            RuntimeError: a handle is not open (freed twice, or never opened); nothing is changed then.
        """
        self._check_open(seqs)
        for tables in self.tables.values():
            tables.free(seqs)
        self._live[seqs] = False

    def trim(self, seqs: Ids) -> None:
        """Free the blocks of window kinds that have left the window of ``seqs``."""
        for tables in self.tables.values():
            tables.trim(seqs)

    def close(self) -> None:
        """Free everything, also after a failed step; the pools are whole afterwards."""
        self.copies_done()
        self.free(self.live)

    def observe(self, weights: Ids) -> None:
        """Take the statistics of a step; call after its writes and before its frees.

        Args:
            weights: [live] how many sequences of an unshared cache each open sequence stands for, in the order of
                ``live`` (1, except after a prefill that num_beams or n sequences will fork from).
        """
        live = self.live
        samples = {}
        for kind, tables in self.tables.items():
            unshared = int((tables.unshared(live) * weights).sum())
            samples[kind] = KindSample(tables.pool.held, unshared, tables.slots_written(live))
        self.stats.observe(samples)
        if self.log is not None:
            self.log.step += 1

    def set_capacity(self, kind: str, blocks: int) -> None:
        """State how many blocks the storage of ``kind`` has room for."""
        self.tables[kind].pool.capacity = blocks

    def set_block_bytes(self, kind: str, size: int) -> None:
        """State what a block of ``kind`` occupies, once its tensors are known.

        Raises:
            OutOfBlocksError: what is held already passes a byte budget.
        """
        self.stats.block_bytes[kind] = size
        if isinstance(self.budget, ByteBudget):
            self.budget.set_block_bytes(kind, size)
            self.budget.check(self.held, {})

    # -- checking -----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Compare every count with the tables and pending copies that name the block, and what is held with the budget.

        Raises:
            RuntimeError: states the accounting equation that does not hold, with its numbers.
        """
        live = self.live
        for kind, tables in self.tables.items():
            named = tables.references(live)
            pending = np.zeros_like(named)
            for writes in self._pending:
                ends = np.concatenate([writes[kind].copies.source, writes[kind].copies.target])
                pending += np.bincount(ends, minlength=len(named))
            counts = tables.pool.counts
            wrong = np.flatnonzero(named + pending != counts)
            if len(wrong):
                block = int(wrong[0])
                raise RuntimeError(
                    f"kind {kind}: block {block} has count {counts[block]} != {named[block]} tables + {pending[block]} "
                    f"pending copies ({len(wrong)} blocks differ)"
                )
            held, capacity = tables.pool.held, tables.pool.capacity
            free = int(np.count_nonzero(counts == 0)) + (capacity or len(counts)) - len(counts)
            if free + held != (capacity or len(counts)):
                raise RuntimeError(f"kind {kind}: {free} free + {held} held != {capacity or len(counts)} in total")
        self.budget.check({}, self.held)

    # -- inside -------------------------------------------------------------------------------------------------

    def _check_open(self, seqs: Ids) -> None:
        known = (seqs >= 0) & (seqs < len(self._live))
        if not known.all() or not self._live[seqs].all() or len(np.unique(seqs)) != len(seqs):
            raise RuntimeError(f"expected distinct open sequences, got {seqs.tolist()[:8]}")

    def _take_handles(self, count: int) -> Ids:
        free = np.flatnonzero(~self._live)[:count]
        if len(free) < count:
            grown = np.zeros(2 * (len(self._live) + count), dtype=bool)
            grown[: len(self._live)] = self._live
            self._live = grown
            free = np.flatnonzero(~self._live)[:count]
        self._live[free] = True
        return free
