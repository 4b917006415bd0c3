"""Makes `tests/support` importable as `support` for every test, and holds the fixtures that rooms share.

`--import-mode=importlib` puts nothing on `sys.path`, and the repository's root must not go there: its folders
`kernels`, `models` and `eval` would become importable under bare names that belong to others. This folder goes last,
so that nothing in it can stand in for an installed module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parent)
if TESTS not in sys.path:
    sys.path.append(TESTS)

# Triton's kernels run in its interpreter, which needs no GPU, unless the caller says otherwise; triton reads this when
# it is imported. Processes that compile kernels take it out again.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute with one thread: for tiny models a team costs more than it gains, tenfold where the cores are busy.

    A module asks for it with `pytestmark = pytest.mark.usefixtures("one_thread")`.
    """
    import torch  # not at the top: most of the suite does without it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """Where converted real models are kept: once for all runs, and not in the user's own cache."""
    return Path(os.environ.get("BRANCHKV_CACHE") or Path(TESTS).parent / ".cache" / "models")
