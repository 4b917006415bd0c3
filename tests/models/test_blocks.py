"""The block store: sizes of blocks and pools, who shares them, and that what is written can be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import branchkv
from branchkv.models.blocks import BlockStore
from branchkv.paged_cache.budget import BlockBudget, ByteBudget
from branchkv.paged_cache.manager import CacheManager
from branchkv.paged_cache.views import BlockCopies

BLOCK_SIZE, HEADS, KEY_DIM, VALUE_DIM = 4, 2, 6, 3
LAYER_BYTES = BLOCK_SIZE * HEADS * (KEY_DIM + VALUE_DIM) * 4
NO_COPIES = BlockCopies(np.empty(0, np.int64), np.empty(0, np.int64))
KINDS = {"full": None, "window-5": 5}


def manager(budget: BlockBudget | ByteBudget | None = None) -> CacheManager:
    return CacheManager(BLOCK_SIZE, KINDS, budget or BlockBudget(None))


def store(cache: CacheManager, dtype: torch.dtype | None = None, worst: int = 10) -> BlockStore:
    return BlockStore(cache, ["full", "window-5", "full"], dict.fromkeys(KINDS, worst), dtype)


def kv(tokens: int, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(tokens)
    dims = (KEY_DIM, VALUE_DIM)
    return torch.randn(tokens, heads, dims[0], generator=noise), torch.randn(tokens, heads, dims[1], generator=noise)


def write(blocks: BlockStore, layer: int, tokens: int = 3, heads: int = HEADS, **options: Any) -> tuple[Tensor, Tensor]:
    keys, values = kv(tokens, heads)
    slots = options.get("slots", torch.arange(tokens))
    blocks.write(layer, keys, values, slots, options.get("copies", NO_COPIES))
    return keys, values


def test_the_bytes_of_a_block_are_those_of_all_layers_of_the_kind() -> None:
    cache = manager()
    blocks = store(cache)
    write(blocks, 0)
    assert cache.stats.block_bytes == {"full": 2 * LAYER_BYTES, "window-5": 0}  # layer 2 is taken to be like layer 0
    write(blocks, 1)
    write(blocks, 2)
    assert cache.stats.block_bytes == {"full": 2 * LAYER_BYTES, "window-5": LAYER_BYTES}


def test_layers_of_different_width_are_added_up() -> None:
    cache = manager()
    blocks = store(cache)
    write(blocks, 0)
    write(blocks, 2, heads=3 * HEADS)
    assert cache.stats.block_bytes["full"] == 4 * LAYER_BYTES
    assert blocks.pool(2).keys.shape[1] == 3 * HEADS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_stored_dtype_counts(dtype: torch.dtype) -> None:
    cache = manager()
    blocks = store(cache, dtype)
    keys, _ = write(blocks, 1)
    assert cache.stats.block_bytes["window-5"] == LAYER_BYTES * dtype.itemsize // 4
    assert blocks.pool(1).keys.dtype == blocks.pool(1).values.dtype == dtype
    assert torch.equal(blocks.pool(1).keys[:3], keys.to(dtype))


def test_a_pool_has_the_slots_of_the_worst_case_and_one_that_reads_as_zero() -> None:
    blocks = store(manager(), worst=7)
    keys, values = write(blocks, 0, slots=torch.tensor([27, 0, 5]))
    pool = blocks.pool(0)
    assert pool.keys.shape == (7 * BLOCK_SIZE + 1, HEADS, KEY_DIM)
    assert pool.values.shape == (7 * BLOCK_SIZE + 1, HEADS, VALUE_DIM)
    assert torch.equal(pool.keys[[27, 0, 5]], keys)
    assert torch.equal(pool.values[[27, 0, 5]], values)
    assert blocks.null_slot("full") == 7 * BLOCK_SIZE
    assert not pool.keys[7 * BLOCK_SIZE].any()
    assert not pool.values[7 * BLOCK_SIZE].any()


@pytest.mark.parametrize(
    ("budget", "blocks"),
    [(BlockBudget(3), 3), (BlockBudget(30), 10), (ByteBudget(2 * LAYER_BYTES * 4 + 1), 4), (BlockBudget(None), 10)],
)
def test_a_pool_is_no_larger_than_the_budget(budget: BlockBudget | ByteBudget, blocks: int) -> None:
    cache = manager(budget)
    cached = store(cache)
    write(cached, 0)
    assert cached.pool(0).keys.shape[0] == blocks * BLOCK_SIZE + 1
    assert cache.tables["full"].pool.capacity == blocks


def test_a_layer_that_the_config_does_not_know_is_of_the_last_kind() -> None:
    cache = manager()
    blocks = store(cache)
    assert [blocks.kind(layer) for layer in range(5)] == ["full", "window-5", "full", "full", "full"]
    for layer in (0, 2, 3):
        write(blocks, layer)
    assert cache.stats.block_bytes["full"] == 3 * LAYER_BYTES


def test_copies_run_before_the_writes_and_in_their_layer_only() -> None:
    blocks = store(manager())
    keys, _ = write(blocks, 0, tokens=4)
    write(blocks, 2, tokens=4)
    before = blocks.pool(2).keys.clone()
    copies = BlockCopies(np.array([0]), np.array([2]))
    newer, _ = write(blocks, 0, tokens=1, slots=torch.tensor([2 * BLOCK_SIZE + 3]), copies=copies)
    pool = blocks.pool(0).keys
    assert torch.equal(pool[: 2 * BLOCK_SIZE][:BLOCK_SIZE], keys)
    assert torch.equal(pool[2 * BLOCK_SIZE : 2 * BLOCK_SIZE + 3], keys[:3])
    assert torch.equal(pool[2 * BLOCK_SIZE + 3], newer[0])
    assert torch.equal(blocks.pool(2).keys[: BLOCK_SIZE + 1], before[: BLOCK_SIZE + 1])


def test_blocks_that_are_held_already_are_checked_when_their_size_is_known() -> None:
    cache = CacheManager(BLOCK_SIZE, {"full": None}, ByteBudget(2 * LAYER_BYTES * 2))
    cache.append(cache.open(1), np.array([3 * BLOCK_SIZE]))
    with pytest.raises(branchkv.OutOfBlocksError) as error:
        write(BlockStore(cache, ["full", "full"], {"full": 10}, None), 0)
    assert (error.value.needed, error.value.free, error.value.total) == (3, 2, 2)
