"""A planner's next plan is the plan made from scratch, whatever a step changed."""

from __future__ import annotations

import numpy as np
import pytest

from branchkv.kernels.plan import AttentionPlan, make_plan
from branchkv.kernels.planner import Planner
from branchkv.kernels.tree import Ints


class Steps:
    """Tables of beams that grow, fork and leave."""

    def __init__(self, seed: int, block_size: int) -> None:
        self.rng, self.block_size = np.random.default_rng(seed), block_size
        self.used = 0
        self.rows: list[list[int]] = []
        self.lengths: list[int] = []
        for _ in range(int(self.rng.integers(1, 4))):
            length = int(self.rng.integers(1, 5 * block_size))
            blocks = [self.fresh() for _ in range(-(-length // block_size))]
            for _ in range(int(self.rng.integers(1, 5))):
                self.rows.append(list(blocks))
                self.lengths.append(length)

    def fresh(self) -> int:
        self.used += 1
        return self.used - 1

    def advance(self) -> None:
        """One token more for every row; in some steps rows are replaced by others, or one leaves."""
        event = self.rng.integers(0, 6)
        if event == 0:
            parents = self.rng.integers(0, len(self.rows), len(self.rows))
            self.rows, self.lengths = [list(self.rows[p]) for p in parents], [self.lengths[p] for p in parents]
        elif event == 1 and len(self.rows) > 1:
            place = int(self.rng.integers(0, len(self.rows)))
            del self.rows[place], self.lengths[place]
        for place, row in enumerate(self.rows):
            if self.lengths[place] % self.block_size == 0:
                row.append(self.fresh())
            elif sum(row[-1] == other[-1] for other in self.rows) > 1:
                row[-1] = self.fresh()  # a shared block is copied before it is written
            self.lengths[place] += 1

    def arrays(self) -> tuple[Ints, Ints]:
        tables = np.full((len(self.rows), max(map(len, self.rows))), -1, dtype=np.int64)
        for place, row in enumerate(self.rows):
            tables[place, : len(row)] = row
        return tables, np.array(self.lengths)


def covered(plan: AttentionPlan) -> set[tuple[frozenset[int], int, int]]:
    """The nodes by the sequences they serve, which does not depend on the order of equal rows."""
    nodes, order = plan.nodes, plan.sequence_order
    parts = zip(nodes.row_start, nodes.row_stop, nodes.block_start, nodes.block_stop, strict=True)
    return {(frozenset(order[a:b].tolist()), int(c), int(d)) for a, b, c, d in parts}


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_step_by_step_as_from_scratch(block_size: int, window: int | None) -> None:
    for seed in range(12):
        steps = Steps(seed, block_size)
        planner = Planner(block_size, 99_999, window, None)
        for _ in range(40):
            tables, lengths = steps.arrays()
            got = planner.plan(tables, lengths)
            want = make_plan(tables, lengths, block_size=block_size, null_slot=99_999, window=window)
            assert covered(got) == covered(want)
            assert got.tables.tolist() == want.tables.tolist()
            assert (got.lengths.tolist(), got.ends.tolist()) == (want.lengths.tolist(), want.ends.tolist())
            assert (got.most, got.largest_block, got.rows) == (want.most, want.largest_block, want.rows)
            for place in np.flatnonzero(got.nodes.rows > 1).tolist():
                inside = got.sequence_order[got.nodes.row_start[place] : got.nodes.row_stop[place]]
                columns = slice(int(got.nodes.block_start[place]), int(got.nodes.block_stop[place]))
                assert (got.sequences.tables[inside, columns] == got.sequences.tables[inside[0], columns]).all()
            steps.advance()


def test_a_plan_in_the_same_blocks_keeps_its_items() -> None:
    planner = Planner(16, 9999, None, None)
    tables = np.array([[0, 1, 2], [0, 1, 3]])
    first = planner.plan(tables, np.array([40, 40]))
    second = planner.plan(tables, np.array([41, 41]))
    assert second is not first
    assert second.nodes is first.nodes
    assert second.lengths.tolist() == [41, 41]
