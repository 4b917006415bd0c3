"""K/V tensors: slots, block copies, and the bookkeeping and the storage together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.budget import BlockBudget
from branchkv.paged_cache.manager import CacheManager
from branchkv.paged_cache.storage import KVStorage
from branchkv.paged_cache.views import BlockCopies


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


def kv(tokens: int, heads: int = 2, dim: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    """[tokens, heads, dim], every number different."""
    return torch.arange(1, tokens * heads * dim + 1, dtype=dtype).view(tokens, heads, dim)


def prepared(block_size: int = 4, capacity: int = 5, layers: int = 1, dtype: torch.dtype | None = None) -> KVStorage:
    storage = KVStorage(block_size, capacity, dtype)
    for layer in range(layers):
        assert storage.prepare(layer, torch.empty(1, 2, 7, 3), torch.empty(1, 2, 7, 3))
    return storage


def test_prepare_once_per_layer() -> None:
    storage = prepared()
    pool = storage.layer(0)
    assert not storage.prepare(0, torch.empty(1, 2, 1, 3), torch.empty(1, 2, 1, 3))
    assert storage.layer(0) is pool
    assert storage.prepare(7, torch.empty(1, 2, 1, 3), torch.empty(1, 2, 1, 3))


def test_shapes_are_those_of_each_layer_and_of_k_and_v() -> None:
    storage = KVStorage(4, 5, None)
    storage.prepare(0, torch.empty(1, 8, 9, 64), torch.empty(1, 8, 9, 32))
    storage.prepare(1, torch.empty(2, 1, 9, 16, dtype=torch.float16), torch.empty(2, 3, 9, 16, dtype=torch.float16))
    assert storage.layer(0).keys.shape == (21, 8, 64)
    assert storage.layer(0).values.shape == (21, 8, 32)
    assert storage.layer(1).keys.shape == (21, 1, 16)
    assert storage.layer(1).values.shape == (21, 3, 16)
    assert storage.block_bytes(0) == 4 * 8 * (64 + 32) * 4
    assert storage.block_bytes(1) == 4 * (1 + 3) * 16 * 2


def test_bytes_of_the_tensors_are_the_blocks_and_one_null_slot() -> None:
    storage = prepared(capacity=6)
    pool = storage.layer(0)
    assert pool.keys.nbytes + pool.values.nbytes == 6 * storage.block_bytes(0) + storage.block_bytes(0) // 4


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float64])
def test_dtype(dtype: torch.dtype | None) -> None:
    storage = prepared(dtype=dtype)
    storage.write(0, torch.tensor([3]), kv(1), kv(1))
    stored = storage.layer(0).keys
    assert stored.dtype == (dtype or torch.float32)
    assert torch.equal(stored[3].float(), kv(1)[0])


def test_write_reaches_its_slots_and_no_others() -> None:
    storage = prepared(layers=2)
    for tensor in (storage.layer(0).keys, storage.layer(0).values, storage.layer(1).keys):
        tensor[: storage.null_slot] = -1
    storage.write(0, torch.tensor([19, 0, 7]), kv(3), 10 * kv(3))
    keys, values = storage.layer(0).keys, storage.layer(0).values
    assert torch.equal(keys[[19, 0, 7]], kv(3))
    assert torch.equal(values[[19, 0, 7]], 10 * kv(3))
    others = [slot for slot in range(20) if slot not in (19, 0, 7)]
    assert bool((keys[others] == -1).all())
    assert bool((values[others] == -1).all())
    assert bool((storage.layer(1).keys[:20] == -1).all())


def test_the_null_slot_reads_as_zero_whatever_happens() -> None:
    storage = prepared(capacity=3)
    assert storage.null_slot == 12
    storage.write(0, torch.arange(12), kv(12), kv(12))
    storage.copy(0, BlockCopies(ids(0), ids(2)))
    assert not storage.layer(0).keys[storage.null_slot].any()
    assert not storage.layer(0).values[storage.null_slot].any()


def test_copy_moves_whole_blocks_of_k_and_v_of_one_layer() -> None:
    storage = prepared(layers=2)
    for layer in (0, 1):
        storage.write(layer, torch.arange(20), kv(20), 10 * kv(20))
    storage.copy(0, BlockCopies(ids(1, 1, 4), ids(0, 3, 2)))
    order = [*range(4, 8), *range(4, 8), *range(16, 20), *range(4, 8), *range(16, 20)]
    assert torch.equal(storage.layer(0).keys[:20], kv(20)[order])
    assert torch.equal(storage.layer(0).values[:20], 10 * kv(20)[order])
    assert torch.equal(storage.layer(1).keys[:20], kv(20))


def test_sources_are_read_before_targets_are_written() -> None:
    storage = prepared()
    storage.write(0, torch.arange(20), kv(20), kv(20))
    storage.copy(0, BlockCopies(ids(0, 1, 2), ids(1, 2, 0)))
    order = [*range(8, 12), *range(4), *range(4, 8), *range(12, 20)]
    assert torch.equal(storage.layer(0).keys[:20], kv(20)[order])


def test_copy_of_nothing() -> None:
    storage = prepared()
    storage.write(0, torch.arange(20), kv(20), kv(20))
    storage.copy(0, BlockCopies(ids(), ids()))
    assert torch.equal(storage.layer(0).keys[:20], kv(20))


def test_pools_never_move() -> None:
    storage = prepared()
    address = storage.layer(0).keys.data_ptr()
    storage.write(0, torch.arange(20), kv(20), kv(20))
    storage.copy(0, BlockCopies(ids(0), ids(1)))
    assert storage.layer(0).keys.data_ptr() == address


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_beams_read_back_what_their_ancestors_wrote(block_size: int) -> None:
    """Tables and tensors together, two layers of different shape: each token's K is its own number."""
    rng = np.random.default_rng(0)
    cache = CacheManager(block_size, {"full": None}, BlockBudget(None))
    storage = KVStorage(block_size, 200, None)
    storage.prepare(0, torch.empty(1, 2, 1, 3), torch.empty(1, 2, 1, 3))
    storage.prepare(1, torch.empty(1, 1, 1, 4), torch.empty(1, 1, 1, 2))
    beams, texts, made = cache.open(1), [list[int]()], 0
    for turn in range(25):
        tokens = np.full(len(beams), 7 if turn == 0 else 1)
        writes = cache.append(beams, tokens)["full"]
        new = np.arange(made, made + tokens.sum())
        made += len(new)
        numbers = torch.from_numpy(new).float()[:, None, None]
        for layer, (heads, key_dim, value_dim) in enumerate([(2, 3, 3), (1, 4, 2)]):
            storage.copy(layer, writes.copies)
            keys, values = numbers.expand(-1, heads, key_dim), -numbers.expand(-1, heads, value_dim)
            storage.write(layer, torch.from_numpy(writes.slots), keys, values)
        cache.copies_done()
        texts = [text + part.tolist() for text, part in zip(texts, np.split(new, np.cumsum(tokens)[:-1]), strict=True)]
        for text, blocks in zip(texts, writes.tables.blocks, strict=True):
            slots = (blocks[:, None] * block_size + np.arange(block_size)).ravel()[: len(text)]
            for layer in (0, 1):
                keys = storage.layer(layer).keys[torch.from_numpy(slots)]
                values = storage.layer(layer).values[torch.from_numpy(slots)]
                expected = torch.tensor(text, dtype=torch.float32)[:, None, None]
                assert torch.equal(keys, expected.expand_as(keys))
                assert torch.equal(values, -expected.expand_as(values))
        parents = rng.integers(0, len(beams), size=4)
        beams, texts = cache.reorder(beams, parents), [texts[parent] for parent in parents]
