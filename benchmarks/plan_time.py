"""Time to make the plan of a step on the host, and when the launch it describes would end on a modelled GPU.

    python benchmarks/plan_time.py [--rounds 50]

One thread. `anew`: sorted, tree, work items, from tables nobody has seen. `blocks changed`: every row has got a new
last block since the step before. `same blocks`: only the lengths are new, as in most steps.

Modelled on 132 processors with `branchkv.kernels.cost.GPU_COST`, bf16, heads of 128: when the launch ends, over the
ideal, and the end of the plan that shares nothing over it. Ideal: the time of all tokens spread evenly, merging, and
each processor's share of one program per run, which even uncut work needs, at least one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from parts.decoding_cases import BLOCK, Case, Level, lengths_of, tables_of

from branchkv.kernels.cost import GPU_COST, makespan
from branchkv.kernels.packing import Packing
from branchkv.kernels.plan import AttentionPlan, make_plan
from branchkv.kernels.planner import Planner
from branchkv.kernels.sharing import Runs, plain_runs, shared_runs
from branchkv.kernels.work import alignment, best_cut, durations, make_work

NULL = 10**8
HEADS = {"32/32": (32, 1), "32/8": (8, 4), "64/8": (8, 8)}


CASES = (
    Case("64 x 4,096 unshared", (Level(64, 4096),)),
    Case("64 x (3,840 + 256)", (Level(1, 3840), Level(64, 256))),
    Case("1,024 x 2,048 unshared", (Level(1024, 2048),)),
    Case("1,024 x (2,048 + 32)", (Level(1, 2048), Level(1024, 32))),
    Case("10 x (4,096 + 416)", (Level(1, 4096), Level(10, 416))),
    Case("tree 1, 4, 8, 256 of 2,048, 256, 256, 64", (Level(1, 2048), Level(4, 256), Level(8, 256), Level(256, 64))),
    Case("256 x 1,024 unshared", (Level(256, 1024),)),
    Case("128 x (303..4,099) unshared", (Level(128, 4099),), shortest=303),
)


@dataclass(frozen=True)
class Shape:
    """A case with its tables [rows, columns] and lengths [rows]."""

    name: str
    tables: np.ndarray
    lengths: np.ndarray


def packing(heads: str) -> Packing:
    kv_heads, group = HEADS[heads]
    return Packing(kv_heads, group, narrow=16, wide=64, kv_tile=64, token_bytes=512)


def median(run: Callable[[], object], rounds: int) -> float:
    """Milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def step(given: Shape, rounds: int, tables: np.ndarray | None = None, more: np.ndarray | int = 0) -> float:
    """Milliseconds of a step that follows another one; ``tables`` and ``more`` tokens are what is new."""
    tiles, times = packing("32/8"), []
    for _ in range(rounds):
        planner = Planner(BLOCK, NULL, None, None)
        planner.plan(given.tables, given.lengths).work(tiles)
        start = time.perf_counter()
        planner.plan(given.tables if tables is None else tables, given.lengths + more).work(tiles)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def times_of(given: Shape, rounds: int) -> str:
    def anew() -> object:
        return make_plan(given.tables, given.lengths, block_size=BLOCK, null_slot=NULL).work(packing("32/8"))

    changed = given.tables.copy()
    last = (changed >= 0).sum(axis=1) - 1
    changed[np.arange(len(changed)), last] += int(changed.max()) + 1
    within = np.where(given.lengths % BLOCK == 0, -1, 1)  # lengths that end in the same blocks
    parts = (median(anew, rounds), step(given, rounds, changed), step(given, rounds, more=within))
    return f"| {given.name} | {parts[0]:.2f} | {parts[1]:.2f} | {parts[2]:.2f} |"


def modelled(plan: AttentionPlan, tiles: Packing, runs: Runs) -> tuple[float, float]:
    """Microseconds until the last processor is done, merging included; and the ideal."""
    cut, _ = best_cut(runs, tiles, GPU_COST, alignment(BLOCK))
    work = make_work(runs, plan.row_order, tiles, GPU_COST, cut)
    items = work.items.numpy().astype(np.int64)
    lengths = plan.row_lengths[plan.row_order]
    longest = np.array([lengths[first : first + count].max() for first, count in items[:, :2]])
    tokens = np.minimum(items[:, 4], longest) - items[:, 3]
    each = np.repeat(durations(items[:, 1], tokens, tiles, GPU_COST), tiles.kv_heads)
    merging = work.partials * tiles.group * tiles.kv_heads * GPU_COST.merge / GPU_COST.processors
    busy = (tokens * GPU_COST.token(tiles.tile_rows(items[:, 1]), tiles.token_bytes)).sum() * tiles.kv_heads
    uncut = (tiles.tiles(runs.count) * tiles.kv_heads).sum()
    fixed = max(GPU_COST.fixed, uncut * GPU_COST.fixed / GPU_COST.processors)
    ideal = busy / GPU_COST.processors + fixed + merging
    return makespan(each.tolist(), GPU_COST.processors) + merging, float(ideal)


def makespans_of(given: Shape) -> str:
    plan = make_plan(given.tables, given.lengths, block_size=BLOCK, null_slot=NULL)
    cells = []
    for heads in HEADS:
        tiles = packing(heads)
        sharing = shared_runs(plan.sequences, plan.sequence_order, plan.nodes, tiles, GPU_COST)
        alone = plain_runs(plan.sequences, plan.sequence_order)
        ends = [modelled(plan, tiles, runs) for runs in (sharing, alone)]
        end, ideal = min(ends)
        cells.append(f"{end:,.0f} | {end / ideal:.2f} | {ends[1][0] / end:.2f}")
    return f"| {given.name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    shapes = [Shape(case.name, tables_of(case), lengths_of(case)) for case in CASES]
    print(f"numpy {np.__version__}, blocks of {BLOCK}, 32/8 heads; milliseconds, medians of {rounds}")
    print("| rows x tokens | anew | blocks changed | same blocks |\n|---|--:|--:|--:|")
    for given in shapes:
        print(times_of(given, rounds), flush=True)
    names = " | ".join(f"{heads} us | over ideal | plain over it" for heads in HEADS)
    print(f"\n| modelled | {names} |\n|---|{'--:|' * 3 * len(HEADS)}")
    for given in shapes:
        print(makespans_of(given), flush=True)


if __name__ == "__main__":
    main()
