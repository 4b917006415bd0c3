"""Slots for dense K/V against the tables, token by token."""

from __future__ import annotations

import numpy as np

from branchkv.kernels.row_slots import row_slots
from branchkv.tests.kernels.random_tables import random_tables


def test_row_slots_from_any_position() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        tables = random_tables(rng, block_size=3)
        first = rng.integers(0, tables.lengths)
        got = row_slots(tables.blocks, tables.lengths, first, block_size=3, null_slot=tables.null_slot)
        assert got.width == (tables.lengths - first).max()
        for row in range(len(first)):
            want = [slot for position, slot in tables.slots(row).items() if position >= first[row]]
            start = int(got.starts[row])
            assert got.slots[row].tolist() == [tables.null_slot] * start + want
