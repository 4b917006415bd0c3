"""Time the block bookkeeping alone: 1,024 beams of 2,000 tokens, block size 16, no tensors.

    python benchmarks/bookkeeping.py

Prints the median of 20 repetitions in milliseconds, on one core. The exit code is 1 if a reorder takes 5 ms or more.

States: `one prompt` is not forked yet; `diverged` is what a search with random parents leaves behind, where beams share
all but their last tokens; `shared tails` is the same one token and one reorder later, so that an append has to copy; in
`own blocks`, the worst case, every beam holds all of its 125 blocks alone.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.budget import BlockBudget
from branchkv.paged_cache.manager import CacheManager

BEAMS, TOKENS, BLOCK_SIZE, REPETITIONS = 1024, 2000, 16, 20
GENERATED = 256  # tokens of the diverged state that were generated; random beams coalesce within far fewer
LIMIT_MS = 5.0
ONES: Ids = np.ones(BEAMS, dtype=np.int64)
RNG = np.random.default_rng(0)


class Beams:
    """The beams of one cache, and the calls to time."""

    def __init__(self, prompt: int) -> None:
        self.cache = CacheManager(BLOCK_SIZE, {"full": None}, BlockBudget(None))
        self.seqs = self.cache.open(1)
        self.grow(np.array([prompt]))

    def grow(self, tokens: Ids) -> None:
        self.cache.append(self.seqs, tokens)
        self.cache.copies_done()

    def append(self) -> None:
        self.grow(ONES)

    def fork(self) -> None:
        self.seqs = self.cache.reorder(self.seqs, np.zeros(BEAMS, dtype=np.int64))

    def reorder(self) -> None:
        self.seqs = self.cache.reorder(self.seqs, RNG.integers(0, BEAMS, size=BEAMS))

    def free(self) -> None:
        self.cache.free(self.seqs)

    def observe(self) -> None:
        self.cache.observe(ONES)


def diverged() -> Beams:
    beams = Beams(TOKENS - GENERATED)
    beams.fork()
    for _ in range(GENERATED):
        beams.reorder()
        beams.append()
    return beams


def shared_tails() -> Beams:
    beams = diverged()
    beams.append()
    beams.reorder()
    return beams


def own_blocks() -> Beams:
    beams = Beams(0)
    beams.fork()
    beams.grow(ONES * TOKENS)
    return beams


def median_ms(state: Beams, call: Callable[[Beams], None]) -> float:
    """Median time of ``call``, each time on a copy of ``state``."""
    times = []
    for _ in range(REPETITIONS):
        beams = copy.deepcopy(state)
        start = time.perf_counter()
        call(beams)
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def main() -> int:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    calls = {
        "one prompt": (Beams(TOKENS), [Beams.fork]),
        "diverged": (diverged(), [Beams.reorder, Beams.append, Beams.observe, Beams.free]),
        "shared tails": (shared_tails(), [Beams.append]),
        "own blocks": (own_blocks(), [Beams.reorder, Beams.append, Beams.observe, Beams.free]),
    }
    print(f"{BEAMS} beams of {TOKENS} tokens, block size {BLOCK_SIZE}, median of {REPETITIONS}")
    print(f"{'state':14}{'blocks held':>12}  {'call':8}{'ms':>8}")
    too_slow = False
    for name, (state, methods) in calls.items():
        for method in methods:
            took = median_ms(state, method)
            print(f"{name:14}{state.cache.held['full']:>12}  {method.__name__:8}{took:>8.2f}")
            too_slow |= method is Beams.reorder and took >= LIMIT_MS
    if too_slow:
        print(f"a reorder takes {LIMIT_MS} ms or more", file=sys.stderr)
    return int(too_slow)


if __name__ == "__main__":
    sys.exit(main())
