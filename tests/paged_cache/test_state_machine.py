"""CacheManager against a model that knows no counts, no ids and no arrays: texts are lists, sharing is identity.

Every call goes to both. Then everything that can be seen is compared: which blocks are the same block, what a storage
that did as told would read back, what is held, what was refused, and the statistics. Calls come from hypothesis, which
shrinks a failure to a few lines, and from a long random run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from branchkv.errors import OutOfBlocksError
from branchkv.paged_cache.block_pool import Ids
from branchkv.paged_cache.budget import BlockBudget
from branchkv.paged_cache.manager import CacheManager
from branchkv.paged_cache.stats import KindStats, KVStats
from branchkv.paged_cache.views import Writes

Kinds = Mapping[str, int | None]

KINDS: tuple[Kinds, ...] = ({"full": None}, {"window-5": 5}, {"full": None, "window-5": 5})
POISON = -7  # what a storage holds where nothing was written, or what was written has been freed
MOST_SEQUENCES = 10


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Block:
    """What is written where in a block. Two sequences share it when they hold the same object."""

    tokens: dict[int, int] = field(default_factory=dict)


@dataclass
class Text:
    """A sequence: its tokens, and per kind its blocks in logical order, None where nothing is held."""

    tokens: list[int]
    blocks: dict[str, list[Block | None]]

    def fork(self) -> Text:
        return Text(list(self.tokens), {kind: list(blocks) for kind, blocks in self.blocks.items()})


class Model:
    """The rules of paged_cache, token by token and sequence by sequence."""

    def __init__(self, block_size: int, kinds: Kinds) -> None:
        self.block_size = block_size
        self.kinds = kinds
        self.texts: dict[int, Text] = {}
        self.pinned: dict[str, list[Block]] = {kind: [] for kind in kinds}  # both ends of copies that have not run

    def open(self, handle: int) -> None:
        self.texts[handle] = Text([], {kind: [] for kind in self.kinds})

    def holders(self, kind: str, block: Block) -> int:
        return sum(mine is block for text in self.texts.values() for mine in text.blocks[kind])

    def held(self, kind: str) -> set[Block]:
        named = {block for text in self.texts.values() for block in text.blocks[kind] if block is not None}
        return named | set(self.pinned[kind])

    def touched(self, kind: str, length: int) -> set[int]:
        """Logical blocks that hold a token which the newest of ``length`` tokens sees."""
        window = self.kinds[kind]
        start = 0 if window is None else max(0, length - window)
        return {position // self.block_size for position in range(start, length)}

    def need(self, kind: str, amounts: Mapping[int, int]) -> int:
        """One per new block; of r sharers of a part-filled block one per writer, but at most r - 1."""
        new, writers = 0, dict[Block, int]()
        for handle, amount in amounts.items():
            text = self.texts[handle]
            length = len(text.tokens)
            new += len([b for b in self.touched(kind, length + amount) if b * self.block_size >= length])
            tail = text.blocks[kind][-1] if length % self.block_size and amount else None
            if tail is not None:
                writers[tail] = writers.get(tail, 0) + 1
        return new + sum(min(count, self.holders(kind, tail) - 1) for tail, count in writers.items())

    def append(self, handle: int, new: Sequence[int]) -> None:
        text = self.texts[handle]
        first = len(text.tokens)
        text.tokens += new
        for kind, blocks in text.blocks.items():
            kept = self.touched(kind, len(text.tokens))
            for position in range(first, len(text.tokens)):
                logical, offset = divmod(position, self.block_size)
                if offset == 0:
                    blocks.append(Block() if logical in kept else None)
                block = blocks[logical]
                if block is None:
                    continue
                if self.holders(kind, block) > 1:
                    source, block = block, Block(dict(block.tokens))
                    blocks[logical] = block
                    self.pinned[kind] += [source, block]
                block.tokens[offset] = text.tokens[position]

    def copies(self, kind: str) -> int:
        """Copies that have not run."""
        return len(self.pinned[kind]) // 2

    def copies_done(self) -> None:
        for blocks in self.pinned.values():
            blocks.clear()

    def reorder(self, handles: Sequence[int], parents: Sequence[int], children: Sequence[int]) -> None:
        forks = [self.texts[handles[parent]].fork() for parent in parents]
        self.free(handles)
        self.texts |= dict(zip(children, forks, strict=True))

    def free(self, handles: Sequence[int]) -> None:
        for handle in handles:
            del self.texts[handle]

    def trim(self, handles: Sequence[int]) -> None:
        for handle in handles:
            text = self.texts[handle]
            for kind, blocks in text.blocks.items():
                seen = self.touched(kind, len(text.tokens) + 1)  # by the next token
                text.blocks[kind] = [block if i in seen else None for i, block in enumerate(blocks)]


# -- both together ----------------------------------------------------------------------------------------------------


class CheckedCache:
    """A CacheManager, its model, and a storage: a plain array of slots that does what the manager says."""

    def __init__(self, block_size: int, kinds: Kinds, limit: int | None) -> None:
        self.limit = limit
        self.kinds = kinds
        self.manager = CacheManager(block_size, kinds, BlockBudget(limit))
        if limit is not None:
            for kind in kinds:
                self.manager.set_capacity(kind, limit)
        self.model = Model(block_size, kinds)
        self.slots: dict[str, npt.NDArray[np.int64]] = {kind: np.empty(0, np.int64) for kind in kinds}
        self.pending: tuple[list[int], dict[str, Writes]] | None = None
        self.ids = itertools.count()
        self.refused = self.copied = self.forks = 0
        self.samples: list[dict[str, tuple[int, int, int]]] = []  # per step and kind: held, unshared, slots written

    @property
    def live(self) -> list[int]:
        return sorted(self.model.texts)

    def open(self, count: int) -> None:
        handles = self.manager.open(count).tolist()
        assert len(set(handles)) == count
        assert not self.model.texts.keys() & handles
        for handle in handles:
            self.model.open(handle)

    def append(self, amounts: Mapping[int, int]) -> None:
        """Begin a step; ``finish`` ends it. Checks that a step which does not fit changes nothing."""
        seqs, tokens = _ids(amounts), _ids(amounts.values())
        need = {kind: self.model.need(kind, amounts) for kind in self.kinds}
        assert self.manager.need(seqs, tokens) == need
        held = sum(self.manager.held.values())
        if self.limit is not None and held + sum(need.values()) > self.limit:
            before = self._visible()
            with pytest.raises(OutOfBlocksError) as error:
                self.manager.append(seqs, tokens)
            assert (error.value.needed, error.value.free, error.value.total) == (
                sum(need.values()),
                self.limit - held,
                self.limit,
            )
            assert self._visible() == before
            self.refused += 1
            return
        writes = self.manager.append(seqs, tokens)
        new = {handle: [next(self.ids) for _ in range(amount)] for handle, amount in amounts.items()}
        for handle, ids in new.items():
            self.model.append(handle, ids)
        for kind, write in writes.items():
            assert len(write.copies.source) == len(write.copies.target) == self.model.copies(kind)
            assert len(write.slots) == sum(amounts.values())
            self.copied += self.model.copies(kind)
        assert sum(self.manager.held.values()) == held + sum(need.values())
        self.pending = [token for ids in new.values() for token in ids], writes

    def finish(self) -> None:
        """Run the copies, write the tokens, take the statistics."""
        assert self.pending is not None
        tokens, writes = self.pending
        for kind, write in writes.items():
            slots = self._grown(kind)
            blocks = slots.reshape(-1, self.model.block_size)
            blocks[write.copies.target] = blocks[write.copies.source]
            kept = write.slots >= 0
            slots[write.slots[kept]] = np.array(tokens, dtype=np.int64)[kept]
        self.manager.copies_done()
        self.model.copies_done()
        self.pending = None
        self._observe()

    def reorder(self, handles: Sequence[int], parents: Sequence[int]) -> None:
        held = self.manager.held
        children = self.manager.reorder(_ids(handles), _ids(parents)).tolist()
        assert len(set(children)) == len(parents)
        self.model.reorder(handles, parents, children)
        self.forks += len(parents) - len(set(parents))
        assert all(self.manager.held[kind] <= held[kind] for kind in self.kinds)

    def free(self, handles: Sequence[int]) -> None:
        self.manager.free(_ids(handles))
        self.model.free(handles)

    def trim(self, handles: Sequence[int]) -> None:
        self.manager.trim(_ids(handles))
        self.model.trim(handles)

    def close(self) -> None:
        self.manager.close()
        self.model.free(self.live)
        self.model.copies_done()
        self.pending = None
        assert self.manager.held == dict.fromkeys(self.kinds, 0)

    def check(self) -> None:
        """Compare all that can be seen."""
        self.manager.check_integrity()
        live = self.manager.live
        assert live.tolist() == self.live
        assert self.manager.lengths(live).tolist() == [len(self.model.texts[handle].tokens) for handle in self.live]
        held = {kind: len(self.model.held(kind)) for kind in self.kinds}
        assert self.manager.held == held
        assert self.limit is None or sum(held.values()) <= self.limit
        for kind in self.kinds:
            assert self.limit is None or self.manager.tables[kind].pool.high <= self.limit
            self._check_kind(kind)

    def check_stats(self) -> None:
        stats = self.manager.stats.result()
        assert (stats.forks, stats.blocks_copied) == (self.forks, self.copied)
        _check_series(stats, [_sum(sample.values()) for sample in self.samples], self.model.block_size)
        for kind, part in stats.by_kind.items():
            _check_series(part, [sample[kind] for sample in self.samples], self.model.block_size)

    def _check_kind(self, kind: str) -> None:
        """The tables name the model's blocks, one id per object; the slots hold what the model says, poison aside."""
        size, tables = self.model.block_size, self.manager.tables[kind]
        slots = self._grown(kind)
        slots.reshape(-1, size)[: tables.pool.high][tables.pool.counts == 0] = POISON
        view = tables.view(self.manager.live)
        objects, names = dict[int, Block](), dict[Block, int]()
        for handle, row in zip(self.live, view.blocks.tolist(), strict=True):
            text = self.model.texts[handle]
            blocks = text.blocks[kind]
            assert row[len(blocks) :] == [-1] * (len(row) - len(blocks))
            for logical, (block, name) in enumerate(zip(blocks, row[: len(blocks)], strict=True)):
                assert (block is None) == (name < 0)
                if block is None:
                    continue
                assert objects.setdefault(name, block) is block
                assert names.setdefault(block, name) == name
                if self.pending is None:
                    tokens = text.tokens[logical * size : (logical + 1) * size]
                    assert slots[name * size : name * size + len(tokens)].tolist() == tokens
            # The model itself: whatever the next token sees is held.
            assert all(blocks[i] is not None for i in self.model.touched(kind, len(text.tokens) + 1) if i < len(blocks))

    def _observe(self) -> None:
        sample = {}
        weights = {handle: 1 + handle % 3 for handle in self.live}
        for kind in self.kinds:
            held = self.model.held(kind)
            alone = {handle: self.model.texts[handle].blocks[kind] for handle in self.live}
            unshared = sum(weights[handle] * sum(block is not None for block in alone[handle]) for handle in self.live)
            sample[kind] = len(held), unshared, sum(len(block.tokens) for block in held)
        self.samples.append(sample)
        self.manager.observe(_ids(weights.values()))

    def _grown(self, kind: str) -> npt.NDArray[np.int64]:
        """The slots of a kind, enough for every id given out."""
        missing = self.manager.tables[kind].pool.high * self.model.block_size - len(self.slots[kind])
        if missing > 0:
            self.slots[kind] = np.append(self.slots[kind], np.full(missing, POISON))
        return self.slots[kind]

    def _visible(self) -> object:
        live = self.manager.live
        tables = {
            kind: (t.view(live).blocks.tolist(), t.pool.counts.tolist()) for kind, t in self.manager.tables.items()
        }
        return live.tolist(), self.manager.lengths(live).tolist(), tables, self.manager.stats.result()


def _sum(parts: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    held, unshared, slots = zip(*parts, strict=True)
    return sum(held), sum(unshared), sum(slots)


def _check_series(stats: KVStats | KindStats, samples: Sequence[tuple[int, int, int]], block_size: int) -> None:
    steps = [sample for sample in samples if sample[0]]
    assert stats.peak_blocks == max((held for held, _, _ in steps), default=0)
    assert stats.peak_blocks_unshared == max((unshared for _, unshared, _ in steps), default=0)
    saved = [1 - held / unshared for held, unshared, _ in steps]
    used = [slots / (held * block_size) for held, _, slots in steps]
    assert stats.saved_mean == pytest.approx(sum(saved) / max(len(steps), 1))
    assert stats.utilisation == pytest.approx(sum(used) / max(len(steps), 1))
    assert all(0 < share <= 1 for share in used)


def _ids(values: Iterable[int]) -> Ids:
    return np.array(list(values), dtype=np.int64)


# -- random calls -----------------------------------------------------------------------------------------------------


class CacheMachine(RuleBasedStateMachine):
    """Calls in any order, also between an append and its copies."""

    cache: CheckedCache
    calls_since_close: int

    @initialize(
        block_size=st.sampled_from([1, 3, 4]), kinds=st.sampled_from(KINDS), limit=st.sampled_from([None, None, 5, 25])
    )
    def make(self, block_size: int, kinds: Kinds, limit: int | None) -> None:
        self.cache = CheckedCache(block_size, kinds, limit)
        self.calls_since_close = 0

    def some(self, data: st.DataObject) -> list[int]:
        """A few live sequences, in any order."""
        live = self.cache.live
        return data.draw(st.lists(st.sampled_from(live), unique=True)) if live else []

    @precondition(lambda self: len(self.cache.live) + 2 <= MOST_SEQUENCES)
    @rule(count=st.integers(1, 2))
    def open(self, count: int) -> None:
        self.cache.open(count)

    @precondition(lambda self: self.cache.pending is None and self.cache.live)
    @rule(data=st.data(), tokens=st.sampled_from([1, 1, 1, 2, 9]))
    def append_to_all(self, data: st.DataObject, tokens: int) -> None:
        order = data.draw(st.permutations(self.cache.live))
        self.cache.append(dict.fromkeys(order, tokens))

    @precondition(lambda self: self.cache.pending is None)
    @rule(data=st.data())
    def append_to_some(self, data: st.DataObject) -> None:
        self.cache.append({handle: data.draw(st.integers(0, 13)) for handle in self.some(data)})

    @precondition(lambda self: self.cache.pending is not None)
    @rule()
    def finish(self) -> None:
        self.cache.finish()

    @precondition(lambda self: self.cache.live)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        handles = self.some(data) or self.cache.live
        most = MOST_SEQUENCES - len(self.cache.live) + len(handles)
        self.cache.reorder(handles, data.draw(st.lists(st.integers(0, len(handles) - 1), min_size=1, max_size=most)))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.cache.free(self.some(data))

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        self.cache.trim(self.some(data))

    # Without the pause most runs would be closed before they get anywhere.
    @precondition(lambda self: self.calls_since_close > 15)
    @rule()
    def close(self) -> None:
        self.cache.close()
        self.calls_since_close = 0

    @invariant()
    def check(self) -> None:
        self.calls_since_close += 1
        self.cache.check()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            self.cache.check()
            self.cache.check_stats()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def random_call(cache: CheckedCache, rng: np.random.Generator) -> str:
    """Make one call of those that are possible now; its name."""
    live, waiting = cache.live, cache.pending is not None
    some = [int(handle) for handle in rng.permutation(live)[: rng.integers(0, len(live) + 1)]]
    chances = {
        "open": 1 if len(live) < MOST_SEQUENCES else 0,
        "append to all": 0 if waiting else 6,
        "append to some": 0 if waiting else 1,
        "finish": 20 if waiting else 0,
        "reorder": 4 if live else 0,
        "free": 1,
        "trim": 2,
        "close": 0.02,
    }
    call = str(rng.choice(list(chances), p=np.array(list(chances.values())) / sum(chances.values())))
    match call:
        case "open":
            cache.open(1)
        case "append to all":
            cache.append(dict.fromkeys(live, 1))
        case "append to some":
            cache.append({handle: int(rng.integers(0, 14)) for handle in some})
        case "finish":
            cache.finish()
        case "reorder":
            handles = some or live
            most = MOST_SEQUENCES - len(live) + len(handles)
            cache.reorder(handles, rng.integers(0, len(handles), size=rng.integers(1, most + 1)).tolist())
        case "free":
            cache.free(some[:2])
        case "trim":
            cache.trim(some)
        case "close":
            cache.close()
    return call


@pytest.mark.parametrize("kinds", KINDS, ids=" and ".join)
def test_ten_thousand_random_calls(kinds: Kinds) -> None:
    rng = np.random.default_rng(0)
    cache = CheckedCache(3, kinds, limit=20)
    done = Counter[str]()
    for _ in range(10_000):
        done[random_call(cache, rng)] += 1
        cache.check()
    assert len(done) == 8
    assert min(cache.refused, cache.copied, cache.forks) > 50, "the run did not reach what it is for"
    cache.close()
    cache.check_stats()
