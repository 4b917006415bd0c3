"""Errors cross process borders (pickle) with their numbers, and their messages say what to do."""

from __future__ import annotations

import copy
import pickle

import pytest

from branchkv import errors
from branchkv.errors import (
    BranchKVError,
    CompilationError,
    InvalidArgumentError,
    NumericalError,
    OutOfBlocksError,
    UnsupportedModelError,
    UnsupportedOptionError,
)

ERRORS: list[tuple[BranchKVError, dict[str, object]]] = [
    (OutOfBlocksError(7, 2, 12), {"needed": 7, "free": 2, "total": 12}),
    (UnsupportedOptionError("penalty_alpha", "no"), {"option": "penalty_alpha", "reason": "no"}),
    (UnsupportedModelError("mamba", "no attention"), {"model": "mamba", "reason": "no attention"}),
    (NumericalError(3, 9, "NaN logits"), {"prompt": 3, "step": 9, "reason": "NaN logits"}),
    (InvalidArgumentError("query", "3 rows", "2"), {"argument": "query", "expected": "3 rows", "got": "2"}),
    (CompilationError("copy", "cuda:90", "ptxas"), {"kernel": "copy", "target": "cuda:90", "reason": "ptxas"}),
]


@pytest.mark.parametrize(("error", "attributes"), ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_type_message_and_attributes(
    error: BranchKVError, attributes: dict[str, object], protocol: int
) -> None:
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert {name: getattr(again, name) for name in attributes} == attributes


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ERRORS[0][0], ["needed 7", "free 2", "total 12", "num_blocks", "memory"]),
        (ERRORS[1][0], ["'penalty_alpha'", "no"]),
        (ERRORS[2][0], ["mamba", "no attention"]),
        (ERRORS[3][0], ["prompt 3", "step 9", "NaN logits"]),
        (ERRORS[4][0], ["query", "3 rows", "got 2"]),
        (ERRORS[5][0], ["copy", "cuda:90", "ptxas"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_messages_name_what_is_wrong(error: BranchKVError, words: list[str]) -> None:
    assert all(word in str(error) for word in words), str(error)


def test_one_except_clause_catches_all() -> None:
    public = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(error, BranchKVError) for error in public)


def test_python_families() -> None:
    assert issubclass(UnsupportedOptionError, NotImplementedError)
    assert issubclass(UnsupportedModelError, NotImplementedError)
    assert issubclass(NumericalError, ArithmeticError)
    assert not issubclass(BranchKVError, ValueError)  # a bad argument is a plain ValueError, as in HF
