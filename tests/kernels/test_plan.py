"""A plan's own view of its input, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from branchkv.errors import InvalidArgumentError
from branchkv.kernels.plan import make_plan
from branchkv.tests.kernels.forked_tables import forked_tables
from branchkv.tests.kernels.random_tables import random_tables

GOOD: dict[str, Any] = {
    "tables": np.array([[0, 1, -1], [0, 2, 3]]),
    "lengths": np.array([7, 9]),
    "block_size": 4,
    "null_slot": 99,
}


@pytest.mark.parametrize("window", [None, 1, 6])
def test_query_rows_are_numbered_sequence_by_sequence(window: int | None) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        made = forked_tables(rng, rows=6, columns=5, block_size=3, queries=4)
        plan = make_plan(**made, null_slot=999, window=window)
        rows = [
            (sequence, end - count + 1 + number, end)
            for sequence, (end, count) in enumerate(zip(made["lengths"], made["queries"], strict=True))
            for number in range(count)
        ]
        got = zip(plan.sequence.tolist(), plan.lengths.tolist(), plan.ends.tolist(), strict=True)
        assert list(got) == rows
        assert plan.rows == len(rows)
        assert sorted(plan.order.tolist()) == list(range(len(rows)))
        ordered = [rows[row][0] for row in plan.order.tolist()]
        assert ordered == np.repeat(plan.sequence_order, made["queries"][plan.sequence_order]).tolist()
        seen = [end - max(0, end - count + 1 - (window or end)) for end, count in zip(*_pair(made), strict=True)]
        assert plan.most == max(seen)


def _pair(made: dict[str, Any]) -> tuple[Any, Any]:
    return made["lengths"], made["queries"]


@pytest.mark.parametrize(
    ("change", "argument", "expected", "got"),
    [
        ({"tables": np.array([0, 1])}, "tables", "a matrix [sequences, columns]", "[2]"),
        ({"lengths": np.array([7])}, "lengths", "shape [2]", "[1]"),
        ({"lengths": np.array([7.0, 9.0])}, "lengths", "integers", "float64"),
        ({"lengths": np.array([0, 9])}, "lengths", "at least 1", "0"),
        ({"lengths": np.array([7, 13])}, "lengths", "at most 12, the slots of 3 columns of tables", "13"),
        ({"queries": np.array([1, 0])}, "queries", "at least 1", "0"),
        ({"queries": np.array([8, 1])}, "queries", "no more than the sequence has tokens", "8"),
        ({"block_size": 0}, "block_size", "a whole number of at least 1", "0"),
        ({"block_size": 2.5}, "block_size", "a whole number of at least 1", "2.5"),
        ({"window": 0}, "window", "a whole number of at least 1, or None", "0"),
        ({"window": 2.5}, "window", "a whole number of at least 1, or None", "2.5"),
        ({"null_slot": -1}, "null_slot", "at least 0", "-1"),
        ({"tables": [[0, 1, 2], [0, 1, 3]]}, "tables", "a numpy array", "list"),
        ({"tables": np.array([[0, 1, 2.5], [0, 1, 3]])}, "tables", "integers", "float64"),
        ({"tables": np.array([[0, 1, 2**32], [0, 1, 3]])}, "tables", "block ids below 2**31", "4294967296"),
        ({"tables": np.array([[True] * 3] * 2)}, "tables", "integers", "bool"),
        ({"lengths": [7, 9]}, "lengths", "a numpy array", "list"),
        ({"lengths": np.array([9, 9])}, "tables", "a block id of at least 0 for every block that a row sees", "1 wi"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], argument: str, expected: str, got: str) -> None:
    make_plan(**GOOD)
    with pytest.raises(InvalidArgumentError) as raised:
        make_plan(**{**GOOD, **change})
    assert (raised.value.argument, raised.value.expected) == (argument, expected)
    assert raised.value.got.startswith(got)


def test_blocks_that_left_the_window_may_be_gone() -> None:
    plan = make_plan(np.array([[-1, 5, 6]]), np.array([11]), block_size=4, null_slot=99, window=6)
    assert plan.tables.tolist() == [[-1, 5, 6]]
    assert (plan.most, plan.largest_block) == (6, 6)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64, np.int32])
def test_lengths_of_any_integer_dtype(dtype: type) -> None:
    plan = make_plan(**{**GOOD, "lengths": GOOD["lengths"].astype(dtype)})
    assert plan.lengths.tolist() == GOOD["lengths"].tolist()


def test_a_plan_does_not_see_what_becomes_of_the_arrays() -> None:
    given = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in GOOD.items()}
    plan = make_plan(**given)
    for name in ("tables", "lengths", "queries"):
        if isinstance(given.get(name), np.ndarray):
            given[name] += 1
    assert plan.lengths.tolist() == make_plan(**GOOD).lengths.tolist()
    assert plan.tables.tolist() == make_plan(**GOOD).tables.tolist()


def test_no_sequences() -> None:
    plan = make_plan(np.empty((0, 0), dtype=np.int64), np.empty(0, dtype=np.int64), block_size=4, null_slot=99)
    assert (plan.rows, plan.most, plan.largest_block) == (0, 0, -1)
    assert plan.cpu_layout.tail.shape == (0, 0)


def test_the_tables_stay_as_they_are() -> None:
    tables = random_tables(np.random.default_rng(0), block_size=2, window=9)
    before = tables.blocks.copy(), tables.lengths.copy()
    plan = make_plan(tables.blocks, tables.lengths, block_size=2, null_slot=tables.null_slot, window=9)
    assert plan.cpu_layout.tail.shape[0] == len(tables.lengths)
    assert (tables.blocks == before[0]).all()
    assert (tables.lengths == before[1]).all()
