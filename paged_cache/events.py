"""The event log: what happened to each block, who did it, and the count it left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from branchkv.paged_cache.block_pool import Ids

__all__ = ["BlockEvent", "EventLog"]


class BlockEvent(NamedTuple):
    """One change of one block.

    Attributes:
        step: 0 for the prefill, then one per forward.
        kind: layer kind whose pool the block belongs to.
        event: ``allocate``, ``copy`` (the block is the target of a copy-on-write), ``retain``, ``release``, ``free``.
        block: physical block id.
        sequence: sequence that caused it; -1 for ``free``.
        ref_count: reference count afterwards; for ``copy`` the id of the source block.
    """

    step: int
    kind: str
    event: str
    block: int
    sequence: int
    ref_count: int


class EventLog:
    """Collects events; one array per operation, so that recording stays cheap."""

    def __init__(self) -> None:
        self.step = 0
        self._rows: list[tuple[int, str, str, Ids, Ids, Ids]] = []

    def add(self, kind: str, event: str, blocks: Ids, seqs: Ids, counts: npt.NDArray[np.signedinteger[Any]]) -> None:
        """Record ``event`` for each of ``blocks``; empty ``seqs`` and ``counts`` stand for -1 and 0."""
        if len(blocks):
            who = seqs if len(seqs) else np.full(len(blocks), -1)
            self._rows.append(
                (self.step, kind, event, blocks.copy(), who.copy(), np.resize(counts, len(blocks)).astype(np.int64))
            )

    def events(self) -> list[BlockEvent]:
        """Every event so far, in order."""
        return [
            BlockEvent(step, kind, event, int(block), int(seq), int(count))
            for step, kind, event, blocks, seqs, counts in self._rows
            for block, seq, count in zip(blocks, seqs, counts, strict=True)
        ]

    def write(self, path: Path) -> None:
        """Write the log as JSON lines, one event a line, with the field names of ``BlockEvent``."""
        with path.open("w", encoding="utf-8") as file:
            for event in self.events():
                file.write(json.dumps(event._asdict()) + "\n")
