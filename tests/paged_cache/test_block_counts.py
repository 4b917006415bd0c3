"""Blocks held, step by step, against counts that know nothing of blocks: prefixes for beams, ancestry for samples."""

from __future__ import annotations

import numpy as np
import pytest

from branchkv.errors import OutOfBlocksError
from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.budget import BlockBudget
from branchkv.paged_cache.manager import CacheManager


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


def append(cache: CacheManager, seqs: Ids, tokens: int) -> int:
    """Append to every sequence; the number of copies."""
    writes = cache.append(seqs, np.full(len(seqs), tokens))
    cache.copies_done()
    cache.check_integrity()
    return sum(len(write.copies.source) for write in writes.values())


def beam_search(cache: CacheManager, prompt: int, beams: int, steps: int, seed: int) -> list[tuple[int, int, int]]:
    """Random beams over a vocabulary of 3; per step (blocks held, distinct prefixes, blocks without sharing).

    No two live beams hold the same tokens, as in a real search.
    """
    rng = np.random.default_rng(seed)
    size = cache.block_size
    seqs, texts = cache.open(1), [tuple(range(100, 100 + prompt))]
    append(cache, seqs, prompt)
    counts = []
    for _ in range(steps):
        candidates = [(parent, token) for parent in range(len(texts)) for token in range(3)]
        chosen = rng.permutation(len(candidates))[: min(beams, len(candidates))]
        parents = np.array([candidates[i][0] for i in chosen])
        texts = [texts[candidates[i][0]] + (candidates[i][1],) for i in chosen]
        seqs = cache.reorder(seqs, parents)
        append(cache, seqs, 1)
        prefixes = {(start, text[: start + size]) for text in texts for start in range(0, len(text), size)}
        counts.append((cache.held["full"], len(prefixes), sum(-(-len(text) // size) for text in texts)))
    return counts


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 512])
@pytest.mark.parametrize("prompt", [1, 7, 8, 9])
def test_beams_hold_one_block_per_distinct_prefix(block_size: int, prompt: int) -> None:
    cache = CacheManager(block_size, {"full": None}, BlockBudget(None))
    counts = beam_search(cache, prompt, beams=5, steps=30, seed=prompt)
    assert [held for held, _, _ in counts] == [prefixes for _, prefixes, _ in counts]
    assert all(held <= unshared for held, _, unshared in counts)
    if block_size == 512:
        assert counts[-1] == (5, 5, 5)  # a block longer than everything shares nothing
    if block_size <= 4:
        assert counts[-1][0] < counts[-1][2]  # the generated tokens are shared as well


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_samples_share_their_full_prompt_blocks_only(block_size: int) -> None:
    cache = CacheManager(block_size, {"full": None}, BlockBudget(None))
    seqs = cache.open(1)
    append(cache, seqs, 9)
    seqs = cache.reorder(seqs, np.zeros(6, dtype=np.int64))
    for step in range(1, 20):
        append(cache, seqs, 1)
        full = 9 // block_size
        assert cache.held["full"] == full + 6 * (-(-(9 + step) // block_size) - full)


@pytest.mark.parametrize(("block_size", "held", "unshared"), [(16, 4, 4), (4, 10, 16), (1, 40, 64)])
def test_four_samples_of_eight_and_eight_tokens(block_size: int, held: int, unshared: int) -> None:
    cache = CacheManager(block_size, {"full": None}, BlockBudget(None))
    seqs = cache.open(1)
    append(cache, seqs, 8)
    seqs = cache.reorder(seqs, np.zeros(4, dtype=np.int64))
    append(cache, seqs, 8)
    cache.observe(np.ones(4, dtype=np.int64))
    stats = cache.stats.result()
    assert (stats.peak_blocks, stats.peak_blocks_unshared) == (held, unshared)
    assert stats.saved == pytest.approx(1 - held / unshared)


def test_prompts_do_not_share_and_leave_alone() -> None:
    cache = CacheManager(4, {"full": None}, BlockBudget(None))
    prompts = cache.open(3)
    cache.append(prompts, ids(8, 5, 3))
    cache.copies_done()
    beams = [cache.reorder(prompts[[i]], np.zeros(2, dtype=np.int64)) for i in range(3)]
    everyone = np.concatenate(beams)
    append(cache, everyone, 1)
    assert cache.held["full"] == (2 + 2) + (1 + 2) + 2
    cache.free(beams[1])
    cache.check_integrity()
    assert cache.held["full"] == (2 + 2) + 2
    cache.free(np.concatenate([beams[0], beams[2]]))
    assert cache.held["full"] == 0


def test_every_pool_size_gives_the_same_blocks_or_an_error_with_numbers() -> None:
    def run(limit: int | None) -> list[tuple[int, int, int]]:
        return beam_search(CacheManager(3, {"full": None}, BlockBudget(limit)), prompt=7, beams=4, steps=12, seed=0)

    unlimited = run(None)
    peak = max(held for held, _, _ in unlimited)
    for limit in range(1, peak + 3):
        if limit >= peak:
            assert run(limit) == unlimited
        else:
            with pytest.raises(OutOfBlocksError) as error:
                run(limit)
            assert error.value.total == limit
            assert error.value.needed > error.value.free >= 0


def test_window_blocks_are_freed_once_by_three_beams() -> None:
    """Window 4, block 2, 3 beams, 30 steps: blocks are recycled while other beams still see them."""
    rng = np.random.default_rng(0)
    cache = CacheManager(2, {"window-4": 4}, BlockBudget(None))
    seqs = cache.open(1)
    append(cache, seqs, 9)
    seqs = cache.reorder(seqs, np.zeros(3, dtype=np.int64))
    for _ in range(30):
        append(cache, seqs, 1)
        seqs = cache.reorder(seqs, rng.integers(0, 3, size=3))
        cache.trim(seqs)
        cache.check_integrity()
        assert 1 <= cache.held["window-4"] <= 3 * 3
    assert cache.tables["window-4"].pool.high <= 12
    cache.free(seqs)
    assert cache.held["window-4"] == 0
