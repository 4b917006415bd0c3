"""Work items against the tables they come from: every token once, every shared block as seldom as can be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from branchkv.kernels.cost import GPU_COST, CostModel, makespan
from branchkv.kernels.packing import Packing
from branchkv.kernels.plan import AttentionPlan, make_plan
from branchkv.kernels.sharing import plain_runs, shared_runs
from branchkv.kernels.tree import Ints, find_nodes, sort_rows
from branchkv.kernels.work import WorkItems, alignment, best_cut, durations, make_work
from branchkv.tests.kernels.forked_tables import forked_tables
from branchkv.tests.kernels.test_tree import trie

# Sharing always pays, and there is one processor, so that nothing is cut.
SHARE_ALL = CostModel(processors=1, fixed=0.0, bandwidth=1.0, rate=1e12, merge=0.0, reread=1.0)
PACKINGS = [Packing(2, 1, 16, 64, 32), Packing(1, 4, 16, 32, 16), Packing(3, 8, 16, 64, 64)]


def plan_of(given: dict[str, Any], cost: CostModel = SHARE_ALL, window: int | None = None) -> AttentionPlan:
    plan = make_plan(**given, null_slot=10**6, window=window)
    return AttentionPlan(plan.sequences, plan.sequence_order, plan.nodes, 10**6, None, cost)


def random_plan(seed: int, cost: CostModel = SHARE_ALL) -> tuple[dict[str, Any], AttentionPlan]:
    rng = np.random.default_rng(seed)
    sizes: dict[str, int] = {"rows": int(rng.integers(1, 14)), "columns": int(rng.integers(1, 9))}
    given = forked_tables(rng, **sizes, block_size=int(rng.choice([1, 3, 16, 32])), queries=int(rng.integers(1, 4)))
    return given, plan_of(given, cost, window=None if seed % 3 else int(rng.integers(1, 40)))


def assert_every_token_once(plan: AttentionPlan, work: WorkItems, packing: Packing) -> None:
    """Each (query row, head of the group) sees each of its tokens in exactly one item, from its own block."""
    sequence, size = plan.sequence.numpy(), plan.block_size
    tables, order = plan.tables.numpy(), plan.order.numpy()
    seen: Counter[tuple[int, int, int]] = Counter()
    for first, count, m_start, start, stop, _ in work.items.tolist():
        tile = packing.narrow if count * packing.group <= packing.narrow else packing.wide
        for packed in range(m_start, min(m_start + tile, count * packing.group)):
            row, head = int(order[first + packed // packing.group]), packed % packing.group
            length = int(plan.row_lengths[row])
            visible_from = 0 if plan.window is None else max(0, length - plan.window)
            for token in range(max(start, visible_from), min(stop, length)):
                block = tables[sequence[order[first]], token // size]
                assert block == tables[sequence[row], token // size]
                assert block >= 0
                seen[row, head, token] += 1
    assert set(seen.values()) <= {1}
    lengths = plan.row_lengths
    visible = lengths if plan.window is None else np.minimum(lengths, plan.window)
    assert len(seen) == visible.sum() * packing.group


def assert_results_add_up(plan: AttentionPlan, work: WorkItems) -> None:
    """A row's partial results are those of its items, each named once; a row without any is written by one item."""
    order, offsets = plan.order.tolist(), work.offsets.tolist()
    partials: dict[int, set[int]] = {row: set() for row in range(plan.rows)}
    direct: dict[int, set[tuple[int, int]]] = {row: set() for row in range(plan.rows)}
    for first, count, _, start, stop, partial in work.items.tolist():
        for number in range(count):
            if partial >= 0:
                partials[order[first + number]].add(partial + number)
            else:
                direct[order[first + number]].add((start, stop))
    for row in range(plan.rows):
        slots = work.slots[offsets[row] : offsets[row + 1]].tolist()
        assert len(slots) == len(set(slots))
        assert set(slots) == partials[row]
        assert len(direct[row]) == (0 if slots else 1)
    assert sorted(work.slots.tolist()) == list(range(work.partials))


@pytest.mark.parametrize("seed", range(60))
def test_every_token_is_read_once(seed: int) -> None:
    cheap_cuts = replace(SHARE_ALL, processors=[1, 4, 60][seed % 3])
    for cost in (SHARE_ALL, cheap_cuts, GPU_COST):
        _, plan = random_plan(seed, cost)
        for packing in PACKINGS:
            work = plan.work(packing)
            assert_every_token_once(plan, work, packing)
            assert_results_add_up(plan, work)
            assert (work.items.dtype, work.offsets.dtype, work.slots.dtype) == (work.items.dtype,) * 3


@pytest.mark.parametrize("seed", range(200))
def test_the_items_are_the_nodes_of_a_brute_force_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 3, 16]))
    given = forked_tables(rng, rows=int(rng.integers(1, 14)), columns=int(rng.integers(1, 9)), block_size=size)
    packing = replace(PACKINGS[seed % 3], wide=256)
    plan = plan_of(given)
    loads: Counter[tuple[frozenset[int], int, int]] = Counter()
    for first, count, _, start, stop, _ in plan.work(packing).items.tolist():
        assert start % size == 0
        assert stop % size == 0
        rows = frozenset(plan.order[first : first + count].tolist())
        loads[rows, start // size, stop // size] += 1
    want = {}
    for rows, blocks, first in trie(given["tables"]):
        packed = len(rows) * packing.group
        want[rows, first, first + len(blocks)] = -(
            -packed // (packing.narrow if packed <= packing.narrow else packing.wide)
        )
    assert loads == want


@pytest.mark.parametrize("processors", [1, 20, 132])
def test_every_shared_block_is_loaded_once_per_tile(processors: int) -> None:
    """However runs are cut: loads of a (block, KV head) are ceil(rows x group / tile)."""
    for seed in range(40):
        given, plan = random_plan(3 * seed + 1)
        assert plan.window is None
        for packing in PACKINGS:
            cost = replace(SHARE_ALL, processors=processors)
            runs = shared_runs(plan.sequences, plan.sequence_order, plan.nodes, packing, cost)
            cut, _ = best_cut(runs, packing, cost, alignment(plan.block_size))
            work = make_work(runs, plan.row_order, packing, cost, cut)
            loads: Counter[tuple[int, int]] = Counter()
            for first, _, _, start, stop, _ in work.items.tolist():
                table = plan.tables[plan.sequence[plan.order[first]]].tolist()
                for token in range(start, stop):
                    loads[table[token // plan.block_size], token % plan.block_size] += 1
            for block in {block for block, _ in loads}:
                rows = int(given["queries"][(given["tables"] == block).any(axis=1)].sum())
                tile = packing.narrow if rows * packing.group <= packing.narrow else packing.wide
                slots = {loads[block, slot] for slot in range(plan.block_size)}
                assert slots == {-(-rows * packing.group // tile)}


def test_cuts_lie_between_blocks_and_tiles() -> None:
    assert [alignment(size) for size in (1, 3, 16, 32, 24, 128, 99)] == [16, 48, 16, 32, 48, 128, 99]
    plan = plan_of(shape([(4, 3000, 0)]), replace(SHARE_ALL, processors=50))
    items = plan.work(PACKINGS[0]).items
    items = items[items[:, 1] == 4]
    assert len(items) > 10
    assert all(start % 16 == 0 for start in items[:, 3].tolist())
    spans = (items[:, 4] - items[:, 3]).tolist()
    assert max(spans) - min(spans) <= 16


def test_a_short_run_is_not_worth_a_program() -> None:
    """Two rows and one shared block of 16: reading it twice is cheaper than a third program and its merge."""
    plan = plan_of(shape([(2, 16, 300)]), replace(GPU_COST, processors=1))
    assert plan.work(PACKINGS[0]).items[:, 1].tolist() == [1, 1]
    plan = plan_of(shape([(64, 2048, 32)]), GPU_COST)
    assert int(plan.work(PACKINGS[0]).items[:, 1].max()) == 64


def test_what_is_not_shared_goes_with_the_children() -> None:
    """4 rows share 5 blocks; two of them share 60 more; sharing only the long part leaves the 5 blocks to its run."""
    tables = np.full((4, 70), -1, dtype=np.int64)
    tables[:, :1] = 0
    tables[:2, 1:61] = np.arange(1, 61)
    tables[:, 61] = -1
    tables[2, 1], tables[3, 1] = 100, 101
    tables[0, 61], tables[1, 61] = 102, 103
    given = {"tables": tables, "lengths": np.array([62, 62, 2, 2]) * 16, "block_size": 16}
    cost = replace(GPU_COST, processors=1, fixed=2.0, merge=0.0)
    plan = plan_of(given, cost)
    items = {tuple(item[i] for i in (1, 3, 4)) for item in plan.work(Packing(1, 1, 16, 16, 16)).items.tolist()}
    assert items == {(2, 0, 61 * 16), (1, 61 * 16, 62 * 16), (1, 0, 2 * 16)}


def test_items_of_a_launch_start_with_the_longest() -> None:
    plan = plan_of(shape([(3, 500, 20), (1, 0, 3000), (9, 100, 7)]), GPU_COST)
    items = plan.work(PACKINGS[0]).items
    time = durations(
        items[:, 1].numpy().astype(np.int64),
        (items[:, 4] - items[:, 3]).numpy().astype(np.int64),
        PACKINGS[0],
        GPU_COST,
    )
    assert (np.diff(time) <= 1e-9).all()


def shape(trees: list[tuple[int, int, int]], block_size: int = 16) -> dict[str, Any]:
    """Arguments of make_plan for trees (rows, shared tokens, private tokens); shared tokens in whole blocks."""
    rows, used = [], 0
    for count, shared, private in trees:
        prompt = list(range(used, used + shared // block_size))
        used += len(prompt)
        own = -(-(shared % block_size + private) // block_size)
        for _ in range(count):
            rows.append((prompt + list(range(used, used + own)), shared + private))
            used += own
    tables = np.full((len(rows), max(len(blocks) for blocks, _ in rows)), -1, dtype=np.int64)
    for number, (blocks, _) in enumerate(rows):
        tables[number, : len(blocks)] = blocks
    return {"tables": tables, "lengths": np.array([length for _, length in rows]), "block_size": block_size}


def levels(widths: list[int], tokens: list[int], block_size: int = 16) -> dict[str, Any]:
    """Arguments of make_plan for one tree with ``widths`` nodes of ``tokens`` tokens on each level."""
    leaves, columns, used = widths[-1], [], 0
    for width, length in zip(widths, tokens, strict=True):
        blocks = np.arange(width * (length // block_size)).reshape(width, -1) + used
        used += blocks.size
        columns.append(np.repeat(blocks, leaves // width, axis=0))
    tables = np.concatenate(columns, axis=1)
    return {"tables": tables, "lengths": np.full(leaves, sum(tokens)), "block_size": block_size}


RNG = np.random.default_rng(0)
SHAPES: dict[str, dict[str, Any]] = {
    "10 x (4096 + 416)": shape([(10, 4096, 416)]),
    "1024 x (2048 + 32)": shape([(1024, 2048, 32)]),
    "tree 1, 4, 8, 256": levels([1, 4, 8, 256], [32, 256, 256, 32]),
    "256 x 1024 unshared": shape([(1, 0, 1024)] * 256),
    "128 x (300..4096) + 3": shape([(1, 0, int(tokens) + 3) for tokens in RNG.integers(300, 4097, 128)]),
}


@pytest.mark.parametrize("heads", [(32, 1), (8, 4), (8, 8)], ids=["32/32", "32/8", "64/8"])
@pytest.mark.parametrize("name", SHAPES)
def test_no_processor_is_late(name: str, heads: tuple[int, int]) -> None:
    """The modelled end of the launch is at most 1.15 times the ideal, and not later than that of the plain plan.

    Ideal: all the time of the uncut runs' tokens, spread evenly; and each processor's share of one program per run,
    which even uncut work needs, at least one.
    """
    packing = Packing(heads[0], heads[1], 16, 64, 64, token_bytes=512)
    plan = plan_of(SHAPES[name], GPU_COST)
    shared, ideal = modelled(plan, packing, plan.work(packing))
    assert shared <= 1.15 * ideal
    runs = plain_runs(plan.sequences, plan.sequence_order)
    cut, _ = best_cut(runs, packing, GPU_COST, alignment(16))
    plain, _ = modelled(plan, packing, make_work(runs, plan.row_order, packing, GPU_COST, cut))
    assert shared <= plain * (1 + 1e-9)


def modelled(plan: AttentionPlan, packing: Packing, work: WorkItems) -> tuple[float, float]:
    """(end of the last program and the merge, ideal) in microseconds."""
    items = work.items.numpy().astype(np.int64)
    lengths = plan.row_lengths[plan.row_order]
    longest: Ints = np.array([lengths[first : first + count].max() for first, count in items[:, :2]])
    tokens = np.minimum(items[:, 4], longest) - items[:, 3]
    each = durations(items[:, 1], tokens, packing, GPU_COST)
    end = makespan(np.repeat(each, packing.kv_heads).tolist(), GPU_COST.processors)
    merge = work.partials * packing.kv_heads * packing.group * GPU_COST.merge / GPU_COST.processors
    rate = GPU_COST.token(packing.tile_rows(items[:, 1]), packing.token_bytes)
    busy = float((tokens * rate).sum()) * packing.kv_heads
    uncut = len({(first, count, m) for first, count, m in items[:, :3].tolist()}) * packing.kv_heads
    fixed = max(GPU_COST.fixed, uncut * GPU_COST.fixed / GPU_COST.processors)
    return end + merge, busy / GPU_COST.processors + fixed + merge


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_modelled_slower_than_the_plain_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given = forked_tables(rng, rows=int(rng.integers(1, 60)), columns=int(rng.integers(1, 40)), block_size=16)
    plan = plan_of(given, GPU_COST)
    for packing in PACKINGS:
        shared, _ = modelled(plan, packing, plan.work(packing))
        runs = plain_runs(plan.sequences, plan.sequence_order)
        cut, _ = best_cut(runs, packing, GPU_COST, alignment(16))
        plain, _ = modelled(plan, packing, make_work(runs, plan.row_order, packing, GPU_COST, cut))
        assert shared <= plain * 1.02


def test_one_long_prompt_does_not_hide_that_sharing_does_not_pay() -> None:
    """11 rows share a little, one sequence has 16 new tokens: the plain plan is the faster one for either."""
    shared = np.concatenate([np.tile(np.arange(11), (11, 1)), 11 + np.arange(33).reshape(11, 3)], axis=1)
    tables = np.concatenate([shared, 1000 + np.arange(14)[None]])
    packing = Packing(1, 1, 16, 64, 64)
    for last in (1, 16):
        queries = np.array([1] * 11 + [last])
        given = {"tables": tables, "lengths": np.full(12, 223), "block_size": 16, "queries": queries}
        plan = plan_of(given, GPU_COST)
        runs = plain_runs(plan.sequences, plan.sequence_order)
        _, plain = best_cut(runs, packing, GPU_COST, alignment(16))
        assert modelled(plan, packing, plan.work(packing))[0] <= 1.02 * plain


def test_programs_start_where_a_processor_is_free_first() -> None:
    assert makespan([3.0, 3.0, 2.0, 2.0, 2.0], 2) == 7.0
    assert makespan([5.0], 3) == 5.0
    assert makespan([], 3) == 0.0


def test_rows_that_share_are_neighbours() -> None:
    given = shape([(3, 32, 5), (2, 48, 9)])
    mixed = np.array([0, 3, 1, 4, 2])
    plan = plan_of({**given, "tables": given["tables"][mixed], "lengths": given["lengths"][mixed]})
    order = sort_rows(plan.sequences.tables)
    assert sorted(order[:3].tolist()) == [0, 2, 4]
    assert len(find_nodes(plan.sequences.tables[order])) == 7
