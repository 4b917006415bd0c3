"""Block tables of all sequences of one layer kind, as integer arrays.

Every operation is vectorised over sequences: no Python loop runs over blocks or sequences.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from branchkv.paged_cache.block_pool import BlockPool, Ids
from branchkv.paged_cache.events import EventLog
from branchkv.paged_cache.views import BlockCopies, TableView, Writes

__all__ = ["BlockTables"]

_NONE = np.empty(0, dtype=np.int64)


class BlockTables:
    """Tables, lengths and copy-on-write of one kind of layers.

    Sequences are rows, named by integers that the manager hands out. A table holds physical block ids in logical
    order; -1 stands where nothing is held: past the end, and before a sliding window.

        row 3:  [ 7 | 2 | 9 | -1 ]   length 37, block size 16: block 9 is the tail, with 5 slots written

    Args:
        block_size: token slots per block.
        window: tokens that a query may see, itself included; None keeps all.
        log: event log, or None.
        kind: name of the kind in the event log.
    """

    def __init__(self, block_size: int, window: int | None, log: EventLog | None, kind: str) -> None:
        self.pool = BlockPool()
        self.block_size = block_size
        self.window = window
        self._log = log
        self._kind = kind
        self._blocks: npt.NDArray[np.int64] = np.full((8, 4), -1, dtype=np.int64)
        self._lengths: npt.NDArray[np.int64] = np.zeros(8, dtype=np.int64)

    # -- reading ------------------------------------------------------------------------------------------------

    def lengths(self, seqs: Ids) -> Ids:
        """Tokens written per sequence, shape [seqs]."""
        return self._lengths[seqs]

    def view(self, seqs: Ids) -> TableView:
        """A copy of the tables of ``seqs``, cut to the longest."""
        lengths = self._lengths[seqs]
        return TableView(self._blocks[seqs, : self._width(seqs)], lengths, self.block_size, self.window)

    def need(self, seqs: Ids, tokens: Ids) -> int:
        """Blocks that ``append(seqs, tokens)`` would take: new ones, and one per copy-on-write."""
        first, last = self._range(self._lengths[seqs], tokens)
        return int(np.maximum(last - first, 0).sum()) + len(self._to_copy(seqs, tokens))

    def unshared(self, seqs: Ids) -> Ids:
        """[seqs] blocks that each sequence would hold alone: those that its table names."""
        held: Ids = np.count_nonzero(self._blocks[seqs] >= 0, axis=1)
        return held

    def slots_written(self, seqs: Ids) -> int:
        """Distinct physical slots that the tables of ``seqs`` have written."""
        lengths = self._lengths[seqs]
        partial = lengths % self.block_size != 0
        tails = self._blocks[seqs[partial], lengths[partial] // self.block_size]
        tails, first = np.unique(tails, return_index=True)
        unwritten = self.block_size - lengths[partial][first] % self.block_size
        return self.pool.held * self.block_size - int(unwritten[tails >= 0].sum())

    # -- changing -----------------------------------------------------------------------------------------------

    def open(self, seqs: Ids) -> None:
        """Make ``seqs`` empty sequences; the rows must not be in use."""
        self._fit(int(seqs.max(initial=-1)) + 1, 0)
        self._blocks[seqs] = -1
        self._lengths[seqs] = 0

    def append(self, seqs: Ids, tokens: Ids) -> Writes:
        """Give each sequence room for ``tokens`` more tokens, copying part-filled tails that others share.

        Of ``r`` sequences that share a tail and all write, ``r - 1`` get a copy and one keeps the block. The copies
        are returned, not done; both ends carry an extra reference until ``release_copies``.
        """
        old = self._lengths[seqs]
        first, last = self._range(old, tokens)
        fresh = np.maximum(last - first, 0)
        self._fit(len(self._blocks), int(last.max(initial=0)))
        copies = self._copy_tails(seqs, tokens)
        rows = np.repeat(seqs, fresh)
        prompts = len(rows) > 0 and int(fresh.max()) > 1
        taken = self.pool.allocate_run(len(rows)) if prompts else self.pool.allocate(len(rows))
        self._blocks[rows, np.repeat(first, fresh) + _ranks(fresh)] = taken
        self._lengths[seqs] = old + tokens
        if self._log is not None:
            self._log.add(self._kind, "allocate", taken, rows, self.pool.counts[taken])
        return Writes(self._slots(seqs, old, tokens), copies, self.view(seqs))

    def release_copies(self, copies: BlockCopies) -> None:
        """The copies have run: drop the references that kept their two ends from being reused."""
        self._count(np.concatenate([copies.source, copies.target]), -1, None)

    def reorder(self, seqs: Ids, parents: Ids, children: Ids) -> None:
        """Replace ``seqs`` by ``children``, child i being a fork of ``seqs[parents[i]]``. Moves no K/V bytes.

        ``children`` may reuse the rows of ``seqs``: a parent's first child takes the parent's row, others take rows of
        ``seqs`` without children, or rows that are not in use. Needs no blocks, so it cannot fail half way.
        """
        forks = np.bincount(parents, minlength=len(seqs)).astype(np.int64) - 1
        width = self._width(seqs)
        changed = np.flatnonzero(forks)
        self._count_tables(seqs[changed], forks[changed])
        moved = np.flatnonzero(seqs[parents] != children)  # a child in its parent's row is in place already
        blocks, lengths = self._blocks[seqs[parents[moved]], :width], self._lengths[seqs[parents[moved]]]
        self._fit(int(children.max(initial=-1)) + 1, 0)
        dead = seqs[forks < 0]
        self._blocks[dead, :width], self._lengths[dead] = -1, 0
        self._blocks[children[moved], :width], self._lengths[children[moved]] = blocks, lengths

    def free(self, seqs: Ids) -> None:
        """Drop the sequences; blocks that nobody else names become free."""
        self._count_tables(seqs, np.full(len(seqs), -1, dtype=np.int64))
        self._blocks[seqs] = -1
        self._lengths[seqs] = 0

    def trim(self, seqs: Ids) -> None:
        """Free the blocks that no later query of ``seqs`` can see; does nothing without a window."""
        if self.window is None:
            return
        lengths = self._lengths[seqs]
        visible = np.maximum(lengths - self.window + 1, 0) // self.block_size
        columns = np.arange(self._blocks.shape[1])
        gone = (columns[None, :] < visible[:, None]) & (self._blocks[seqs] >= 0)
        rows, cols = np.nonzero(gone)
        self._count(self._blocks[seqs[rows], cols], -1, seqs[rows])
        self._blocks[seqs[rows], cols] = -1

    # -- checking -----------------------------------------------------------------------------------------------

    def references(self, seqs: Ids) -> Ids:
        """[high] how many tables of ``seqs`` name each block."""
        named = self._blocks[seqs]
        return np.bincount(named[named >= 0], minlength=self.pool.high)

    # -- inside -------------------------------------------------------------------------------------------------

    def _ceil(self, tokens: Ids) -> Ids:
        return -(-tokens // self.block_size)

    def _window_start(self, lengths: Ids) -> Ids:
        """First logical block that the window of the newest token touches."""
        if self.window is None:
            return np.zeros_like(lengths)
        return np.maximum(lengths - self.window, 0) // self.block_size

    def _range(self, old: Ids, tokens: Ids) -> tuple[Ids, Ids]:
        """First and one past the last logical block that an append takes; a window skips what it cannot see."""
        return np.maximum(self._ceil(old), self._window_start(old + tokens)), self._ceil(old + tokens)

    def _slots(self, seqs: Ids, old: Ids, tokens: Ids) -> Ids:
        position = np.repeat(old, tokens) + _ranks(tokens)
        block = self._blocks[np.repeat(seqs, tokens), position // self.block_size]
        return np.where(block < 0, -1, block * self.block_size + position % self.block_size)

    def _to_copy(self, seqs: Ids, tokens: Ids) -> Ids:
        """Positions in ``seqs`` whose tail must be copied before the write."""
        lengths = self._lengths[seqs]
        position = np.flatnonzero((lengths % self.block_size != 0) & (tokens > 0))
        tails = self._blocks[seqs[position], lengths[position] // self.block_size]
        shared = tails >= 0
        shared[shared] = self.pool.counts[tails[shared]] > 1
        position, tails = position[shared], tails[shared]
        _, first, writers = np.unique(tails, return_index=True, return_counts=True)
        # When every sharer writes, one of them may keep the block; a sharer that only reads keeps it for itself.
        keeper = first[writers == self.pool.counts[tails[first]]]
        return np.delete(position, keeper)

    def _copy_tails(self, seqs: Ids, tokens: Ids) -> BlockCopies:
        position = self._to_copy(seqs, tokens)
        rows = seqs[position]
        logical = self._lengths[rows] // self.block_size
        source = self._blocks[rows, logical]
        target = self.pool.allocate(len(rows))
        self._blocks[rows, logical] = target
        # The table's own reference moves from source to target, so the extra reference on the source is that one.
        self.pool.add(target, 1)
        if self._log is not None:
            self._log.add(self._kind, "copy", target, rows, source)
        return BlockCopies(source, target)

    def _count_tables(self, seqs: Ids, amounts: Ids) -> None:
        """Add ``amounts[i]`` to the count of every block of sequence i."""
        if len(seqs) == 0:
            return
        named = self._blocks[seqs, : self._width(seqs)]
        if self._log is not None:
            rows, cols = np.nonzero(named >= 0)
            self._count(named[rows, cols], amounts[rows], seqs[rows])
            return
        # Shifted by one, so that the -1 of empty places falls into a bin of its own; far faster than selecting them.
        weights = np.repeat(amounts, named.shape[1])
        self.pool.add_all(np.bincount((named + 1).ravel(), weights=weights, minlength=self.pool.high + 1)[1:])

    def _width(self, seqs: Ids) -> int:
        return int(self._ceil(self._lengths[seqs]).max(initial=0))

    def _count(self, blocks: Ids, amounts: Ids | int, seqs: Ids | None) -> None:
        if len(blocks) == 0:
            return
        self.pool.add(blocks, amounts)
        if self._log is None:
            return
        counts = self.pool.counts[blocks]
        if seqs is not None:
            grew = np.broadcast_to(np.asarray(amounts) > 0, blocks.shape)
            self._log.add(self._kind, "retain", blocks[grew], seqs[grew], counts[grew])
            self._log.add(self._kind, "release", blocks[~grew], seqs[~grew], counts[~grew])
        self._log.add(self._kind, "free", np.unique(blocks[counts == 0]), _NONE, _NONE)

    def _fit(self, rows: int, width: int) -> None:
        """Grow the arrays to at least ``rows`` x ``width``."""
        old_rows, old_width = self._blocks.shape
        if rows <= old_rows and width <= old_width:
            return
        shape = (
            max(old_rows, 2 * rows if rows > old_rows else 0),
            max(old_width, 2 * width if width > old_width else 0),
        )
        blocks = np.full(shape, -1, dtype=np.int64)
        blocks[:old_rows, :old_width] = self._blocks
        lengths = np.zeros(shape[0], dtype=np.int64)
        lengths[:old_rows] = self._lengths
        self._blocks, self._lengths = blocks, lengths


def _ranks(counts: Ids) -> Ids:
    """0 .. counts[0]-1, 0 .. counts[1]-1, ...: the place of each item within its group."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(ends - counts, counts)
