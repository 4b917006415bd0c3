"""Frozen values that leave the bookkeeping: what to copy, where to write, and which blocks a step reads."""

from __future__ import annotations

from dataclasses import dataclass

from branchkv.paged_cache.block_pool import Ids

__all__ = ["BlockCopies", "TableView", "Writes"]


@dataclass(frozen=True)
class BlockCopies:
    """Copy-on-write: block ``source[i]`` is to be copied to ``target[i]`` before the step's writes. Shapes [copies]."""

    source: Ids
    target: Ids


@dataclass(frozen=True)
class TableView:
    """The block tables of some sequences of one kind, after the step's allocation.

    Attributes:
        blocks: [sequences, width] physical block ids, -1 where nothing is held (before a window, after the end).
        lengths: [sequences] tokens written, this step's included.
        block_size: slots per block.
        window: tokens that the newest query may see, itself included; None for all.
    """

    blocks: Ids
    lengths: Ids
    block_size: int
    window: int | None


@dataclass(frozen=True)
class Writes:
    """What one step does to the blocks of one kind.

    Attributes:
        slots: [tokens] physical slot of each new token, sequence by sequence; -1 where a window kind keeps none.
        copies: block copies that must run before the slots are written.
        tables: the sequences' tables as they are once the slots are written.
    """

    slots: Ids
    copies: BlockCopies
    tables: TableView
