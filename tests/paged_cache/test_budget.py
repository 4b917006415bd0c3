"""What fits, and the numbers of the error where it does not."""

from __future__ import annotations

import pytest

from branchkv.errors import OutOfBlocksError
from branchkv.paged_cache.budget import BlockBudget, ByteBudget


def numbers(error: OutOfBlocksError) -> tuple[int, int, int]:
    return error.needed, error.free, error.total


def test_no_limit() -> None:
    budget = BlockBudget(None)
    budget.check({"full": 10**9}, {"full": 10**9})
    assert budget.room("full") is None


def test_blocks_of_all_kinds_count_alike() -> None:
    budget = BlockBudget(10)
    assert (budget.room("full"), budget.room("window-5")) == (10, 10)
    budget.check({"full": 2, "window-5": 1}, {"full": 4, "window-5": 3})
    with pytest.raises(OutOfBlocksError) as error:
        budget.check({"full": 2, "window-5": 2}, {"full": 4, "window-5": 3})
    assert numbers(error.value) == (4, 3, 10)


def test_needing_nothing_always_fits() -> None:
    BlockBudget(1).check({"full": 0}, {"full": 1})
    budget = ByteBudget(100)
    budget.set_block_bytes("full", 100)
    budget.check({"full": 0}, {"full": 1})


def test_bytes_to_the_last_one() -> None:
    budget = ByteBudget(1000)
    budget.set_block_bytes("full", 100)
    assert budget.room("full") == 10
    budget.check({"full": 3}, {"full": 7})
    with pytest.raises(OutOfBlocksError) as error:
        budget.check({"full": 4}, {"full": 7})
    assert numbers(error.value) == (4, 3, 10)


def test_bytes_that_do_not_divide() -> None:
    budget = ByteBudget(999)
    budget.set_block_bytes("full", 100)
    assert budget.room("full") == 9
    budget.check({"full": 9}, {})
    with pytest.raises(OutOfBlocksError) as error:
        budget.check({"full": 10}, {})
    assert numbers(error.value) == (10, 9, 9)


def test_kinds_of_different_size() -> None:
    budget = ByteBudget(1000)
    budget.set_block_bytes("full", 100)
    budget.set_block_bytes("window-5", 30)
    assert (budget.room("full"), budget.room("window-5")) == (10, 33)
    held = {"full": 5, "window-5": 5}  # 650 bytes
    budget.check({"full": 2, "window-5": 5}, held)  # to the byte
    with pytest.raises(OutOfBlocksError) as error:
        budget.check({"full": 2, "window-5": 6}, held)
    assert numbers(error.value) == (8, 3, 10)  # in blocks of the largest kind: 350 bytes free
    budget.check({"full": 0, "window-5": 11}, held)


def test_the_error_always_needs_more_than_is_free() -> None:
    budget = ByteBudget(1000)
    budget.set_block_bytes("full", 100)
    budget.set_block_bytes("window-5", 7)
    for full in range(12):
        for window in range(150):
            needed = {"full": full, "window-5": window}
            if full * 100 + window * 7 <= 1000 - 3 * 100 - 7 * 7:
                budget.check(needed, {"full": 3, "window-5": 7})
                continue
            with pytest.raises(OutOfBlocksError) as error:
                budget.check(needed, {"full": 3, "window-5": 7})
            assert error.value.needed > error.value.free


def test_a_kind_of_unknown_size_costs_nothing_yet() -> None:
    budget = ByteBudget(1000)
    budget.check({"full": 10**9}, {"full": 10**9})
    assert budget.room("full") is None
    budget.set_block_bytes("full", 300)
    budget.check({"full": 3, "window-5": 10**9}, {})
    assert (budget.room("full"), budget.room("window-5")) == (3, None)


def test_more_held_than_allowed_reports_nothing_free() -> None:
    budget = ByteBudget(100)
    budget.set_block_bytes("full", 100)
    with pytest.raises(OutOfBlocksError) as error:
        budget.check({"full": 1}, {"full": 3})
    assert numbers(error.value) == (1, 0, 1)


def test_a_block_larger_than_the_budget() -> None:
    budget = ByteBudget(100)
    budget.set_block_bytes("full", 101)
    assert budget.room("full") == 0
    with pytest.raises(OutOfBlocksError) as error:
        budget.check({"full": 1}, {})
    assert numbers(error.value) == (1, 0, 0)
