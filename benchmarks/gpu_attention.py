"""Time of the attention operator on one GPU, against SDPA over dense copies and against itself without sharing.

    python benchmarks/gpu_attention.py [--out docs/gpu.md] [--dtype bfloat16] [--quick] [--seconds 330]

Prints a markdown table; with --out it also replaces what stands between the markers of that page. Every result is first
compared with float64 attention computed from the block tables: where one is wrong, its case is named, no time of it is
printed and the exit code is 1. Without a CUDA device the exit code is 2.

`SDPA` is PyTorch's flash kernel over dense copies of the same K/V, the copying not timed. It takes no mask: rows of
unequal length are padded to the longest and the padding is read ("padded"). `plain` is our own kernel over the same
blocks with a plan in which every row reads all of its tokens alone. Sides take turns within each round, with the L2
cache overwritten before each of them; times are medians, ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from branchkv.kernels.attention import attention
from branchkv.kernels.implementations import implementation
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.packing import Packing
from branchkv.kernels.plan import AttentionPlan, make_plan
from branchkv.kernels.sharing import plain_runs
from branchkv.kernels.triton_configs import packing, tiles
from branchkv.kernels.work import alignment, best_cut, make_work

BLOCK = 16
ROWS_CHECKED = 8
MEMORY_SHARE = 0.6  # of what is free, for the pools and for the dense copies; the rest is for buffers and the check
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEADER = (
    "| rows x tokens | heads | plan ms | SDPA us | plain us | branchkv us | over SDPA | over plain | goal | GB/s "
    "| of copy |\n|---|---|--:|--:|--:|--:|--:|--:|---|--:|--:|"
)
Run = Callable[[], torch.Tensor]
Timer = Callable[[Callable[[], object]], float]


class WrongResultError(Exception):
    """A result that float64 does not confirm; says which."""


@dataclass(frozen=True)
class Level:
    """One level of a tree: so many nodes, each of so many tokens."""

    nodes: int
    tokens: int


@dataclass(frozen=True)
class Case:
    """The nodes of the last level are the rows.

    Attributes:
        name: as printed.
        levels: from the root on. A block that two levels meet in belongs to the lower one, as after copy-on-write.
        shortest: tokens of the last level go evenly from here up to those of the level; None: all rows alike.
        goals: heads -> how many times faster than the plain plan it should be.
    """

    name: str
    levels: tuple[Level, ...]
    shortest: int | None = None
    goals: Mapping[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.levels[-1].nodes


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        return f"{self.heads}/{self.kv_heads}"

    @property
    def token_bytes(self) -> int:
        """K and V of one token, all heads."""
        return 2 * self.kv_heads * self.dim * self.dtype.itemsize


@dataclass(frozen=True)
class Problem:
    """Tensors, tables and both plans of a case.

    Attributes:
        query: [rows, heads, dim]. keys, values: pools [slots, kv_heads, dim]; slots that no row reads are NaN.
        tables: [rows, columns], -1 where nothing is held. lengths: [rows].
        plan: as decoding makes it. plain: the plan without sharing.
    """

    case: Case
    shape: Shape
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: np.ndarray
    lengths: np.ndarray
    plan: AttentionPlan
    plain: AttentionPlan

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.shape.name} heads"


@dataclass(frozen=True)
class Result:
    """What was measured: microseconds, ratios above 1 where the operator is faster; ``note`` says what SDPA did."""

    case: Case
    heads: str
    plan_ms: float
    unique_bytes: int
    ours: float
    plain: float
    over_plain: float
    sdpa: float | None
    over_sdpa: float | None
    note: str


def _equal_heads(goal: float) -> dict[str, float]:
    return dict.fromkeys(("32/32", "32/8", "64/8"), goal)


HEADS = ((32, 8), (32, 32), (64, 8))
CASES = (
    Case("10 x (4,096 + 416)", (Level(1, 4096), Level(10, 416)), goals={"32/8": 2.2, "32/32": 2.7}),
    Case("1,024 x (2,048 + 32)", (Level(1, 2048), Level(1024, 32)), goals={"32/8": 9.0, "32/32": 25.0}),
    Case("256 x 1,024, nothing shared", (Level(256, 1024),), goals=_equal_heads(0.97)),
    Case("128 x (303..4,099), nothing shared", (Level(128, 4099),), shortest=303, goals=_equal_heads(0.97)),
    Case("tree 1, 4, 8, 256 of 2,048, 256, 256, 64", (Level(1, 2048), Level(4, 256), Level(8, 256), Level(256, 64))),
    Case("128 x (300 + 3)", (Level(1, 300), Level(128, 3))),
    Case("128 x (1,024 + 3)", (Level(1, 1024), Level(128, 3))),
    Case("128 x (4,096 + 3)", (Level(1, 4096), Level(128, 3))),
)


# The block tables of a case, and its tensors.


def lengths_of(case: Case) -> np.ndarray:
    """[rows] tokens of each row."""
    *above, last = (level.tokens for level in case.levels)
    shortest = last if case.shortest is None else case.shortest
    return sum(above) + np.linspace(shortest, last, case.rows).round().astype(np.int64)


def tables_of(case: Case) -> np.ndarray:
    """[rows, columns] block ids in no order, as in a pool after some use; -1 where nothing is held."""
    lengths = lengths_of(case)
    column, row = np.arange(-(-int(lengths.max()) // BLOCK)), np.arange(case.rows)
    nodes = np.array([level.nodes for level in case.levels])
    first_own = np.cumsum([level.tokens for level in case.levels])[:-1] // BLOCK
    width = nodes[np.searchsorted(first_own, column, side="right")]
    name = (row[:, None] * width // case.rows) + column * case.rows  # of each column's nodes, no two alike
    held = column * BLOCK < lengths[:, None]
    found, block = np.unique(name[held], return_inverse=True)
    tables = np.full(name.shape, -1)
    tables[held] = np.random.default_rng(0).permutation(len(found))[block]
    return tables


def tokens_read(tables: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[blocks] how many tokens of each block any row reads."""
    most = np.zeros(int(tables.max()) + 1, dtype=np.int64)
    seen = np.clip(lengths[:, None] - np.arange(tables.shape[1]) * BLOCK, 0, BLOCK)
    np.maximum.at(most, tables[tables >= 0], seen[tables >= 0])
    return most


def pool_bytes(case: Case, shape: Shape) -> int:
    return (int(tables_of(case).max()) + 1) * BLOCK * shape.token_bytes


def prepare(case: Case, shape: Shape) -> Problem:
    tables, lengths = tables_of(case), lengths_of(case)
    slots = (int(tables.max()) + 1) * BLOCK
    torch.manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, shape.dim, dtype=shape.dtype, device=shape.device)

    keys, values = (draw(shape.kv_heads, slots + 1).transpose(0, 1) for _ in range(2))
    unread = np.flatnonzero(np.arange(BLOCK) >= tokens_read(tables, lengths)[:, None])
    for pool in (keys, values):
        pool[torch.from_numpy(unread).to(shape.device)] = math.nan
        pool[slots] = 0
    plan = make_plan(tables, lengths, block_size=BLOCK, null_slot=slots, device=shape.device)
    plain = plain_plan(plan, packing_of(shape))
    return Problem(case, shape, draw(case.rows, shape.heads), keys, values, tables, lengths, plan, plain)


def packing_of(shape: Shape) -> Packing:
    """The packing that the operator will ask the plan for."""
    chosen = tiles(shape.dtype, shape.dim, shape.dim, BLOCK)
    group = shape.heads // shape.kv_heads
    return packing(chosen, shape.kv_heads, group, shape.dim, shape.dim, shape.dtype)


def plain_plan(plan: AttentionPlan, pack: Packing) -> AttentionPlan:
    """The same tables, every row reading all of its tokens alone, cut for the processors as well as can be."""
    plain = AttentionPlan(plan.sequences, plan.sequence_order, plan.nodes, plan.null_slot, plan.device, plan.cost)
    runs = plain_runs(plan.sequences, plan.sequence_order)
    cut, _ = best_cut(runs, pack, plan.cost, alignment(plan.block_size))
    plain._work[pack] = make_work(runs, plan.row_order, pack, plan.cost, cut).to(plan.device)
    return plain


# The sides.


def scale_of(shape: Shape) -> float:
    return shape.dim**-0.5


def our_side(given: Problem, plan: AttentionPlan) -> Run:
    options, run = AttentionOptions(scale=scale_of(given.shape)), implementation("triton")

    def once() -> torch.Tensor:
        return attention(given.query, given.keys, given.values, plan, options, run=run)[0]

    return once


def slots_of(tables: np.ndarray, longest: int, empty: int) -> np.ndarray:
    """[rows, longest] the slot of each position; ``empty`` where a row has no block."""
    position = np.arange(longest)
    block = tables[:, position // BLOCK]
    return np.where(block >= 0, block * BLOCK + position % BLOCK, empty)


def dense_copy(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[rows, kv_heads, longest, dim]; head by head, so that no second copy is in memory at any time."""
    rows, longest = slots.shape
    dense = pool.new_empty((rows, pool.shape[1], longest, pool.shape[2]))
    for head in range(pool.shape[1]):
        dense[:, head] = pool[slots, head]
    return dense


def sdpa_side(given: Problem) -> tuple[Run | None, str]:
    """SDPA over dense copies, and what to say about it; None where there is none."""
    shape, longest = given.shape, int(given.lengths.max())
    if len(given.lengths) * longest * shape.token_bytes > MEMORY_SHARE * free_bytes(shape.device):
        return None, "does not fit"
    slots = torch.from_numpy(slots_of(given.tables, longest, given.plan.null_slot)).to(shape.device)
    keys, values = (dense_copy(pool, slots) for pool in (given.keys, given.values))
    query = given.query[:, :, None]
    backend = SDPBackend.FLASH_ATTENTION if shape.device.type == "cuda" else SDPBackend.MATH

    def once() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(query, keys, values, scale=scale_of(shape), enable_gqa=True)
        return out[:, :, 0]

    try:
        once()
    except RuntimeError as error:  # a card without a flash kernel must not cost the other columns
        print(f"SDPA, {given.name}: {error}", file=sys.stderr)
        return None, "no kernel"
    return once, "padded" if given.case.shortest is not None else ""


def free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return math.inf
    torch.cuda.empty_cache()  # what earlier cases left counts as taken otherwise
    return torch.cuda.mem_get_info(device)[0]


# The oracle.


def row_attention(given: Problem, row: int, dtype: torch.dtype) -> torch.Tensor:
    """[heads, dim] one row, eagerly, from the tables alone: products in ``dtype``, softmax at least in float32."""
    slots = slots_of(given.tables[row : row + 1], int(given.lengths[row]), given.plan.null_slot)[0]
    chosen, group = torch.from_numpy(slots).to(given.query.device), given.shape.heads // given.shape.kv_heads
    keys, values = (
        pool[chosen].to(dtype).repeat_interleave(group, dim=1).transpose(0, 1) for pool in (given.keys, given.values)
    )
    wide = torch.promote_types(dtype, torch.float32)
    scores = (keys @ given.query[row].to(dtype)[:, :, None]).squeeze(2).to(wide) * scale_of(given.shape)
    return (scores.softmax(-1).to(dtype)[:, None] @ values).squeeze(1)


def wrong_rows(given: Problem, out: torch.Tensor) -> list[int]:
    """Of a sample, the rows with an RMS error above twice that of eager in the same dtype and half an ulp."""
    found = []
    for row in np.unique(np.linspace(0, given.case.rows - 1, ROWS_CHECKED).round().astype(int)).tolist():
        right, eager = (row_attention(given, row, dtype).double() for dtype in (torch.float64, given.shape.dtype))
        limit = 2 * rms(eager - right) + torch.finfo(given.shape.dtype).eps * rms(right) / 2
        if not rms(out[row].double() - right) <= limit:  # NaN is wrong as well
            found.append(row)
    return found


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def check(given: Problem, sides: Mapping[str, Run]) -> None:
    """Raises WrongResultError where a side is wrong or did not run the plan it is named after."""
    for name, run in sides.items():
        if bad := wrong_rows(given, run()):
            raise WrongResultError(f"{given.name}: {name} differs from float64 in rows {bad}")
    if list(given.plain._work) != [packing_of(given.shape)]:
        raise WrongResultError(f"{given.name}: the operator asked the plain plan for another packing")


# Time.


class CudaTimer:
    """Microseconds of a call on the device, with a cold L2 cache and without what the host does."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __call__(self, run: Callable[[], object]) -> float:
        start, stop = self._events
        self._flush.zero_()
        torch.cuda._sleep(2_000_000)  # about 1 ms: what follows is queued before the device comes to it
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3


def in_turns(sides: Mapping[str, Run], timer: Timer, rounds: int) -> dict[str, list[float]]:
    """Side -> its time in each round; every round begins with another side."""
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names * 3:  # clocks and caches; the kernels have been compiled by the check
        timer(sides[name])
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timer(sides[name]))
    return times


def median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def plan_time(given: Problem, rounds: int = 5) -> float:
    """Milliseconds on the host to plan from scratch and send the plan to the device."""
    pack, times = packing_of(given.shape), []
    for _ in range(rounds):
        start = time.perf_counter()
        slot, device = given.plan.null_slot, given.shape.device
        plan = make_plan(given.tables, given.lengths, block_size=BLOCK, null_slot=slot, device=device)
        plan.work(pack)
        _ = (plan.order, plan.sequence, plan.lengths, plan.ends, plan.tables)  # made, and sent, when asked for
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def copy_rate(device: torch.device, timer: Timer) -> float:
    """GB/s of a device copy of 1 GiB, bytes read and bytes written together."""
    source = torch.zeros(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [timer(partial(target.copy_, source)) for _ in range(13)][3:]
    return 2 * source.numel() / statistics.median(times) / 1e3


def measure(case: Case, shape: Shape, timer: Timer, rounds: int) -> Result:
    """Checks, then times.

    Raises:
        WrongResultError: before anything is timed.
    """
    given = prepare(case, shape)
    sides: dict[str, Run] = {"branchkv": our_side(given, given.plan), "plain": our_side(given, given.plain)}
    check(given, sides)
    sdpa, note = sdpa_side(given)
    if sdpa is not None:
        if note != "padded":
            check(given, {"SDPA": sdpa})
        sides["SDPA"] = sdpa
    times = in_turns(sides, timer, rounds)
    middle = {name: statistics.median(values) for name, values in times.items()}
    return Result(
        case=case,
        heads=shape.name,
        plan_ms=plan_time(given),
        unique_bytes=int(tokens_read(given.tables, given.lengths).sum()) * shape.token_bytes,
        ours=middle["branchkv"],
        plain=middle["plain"],
        over_plain=median_ratio(times["plain"], times["branchkv"]),
        sdpa=middle.get("SDPA"),
        over_sdpa=median_ratio(times["SDPA"], times["branchkv"]) if sdpa is not None else None,
        note=note,
    )


# The report.


def row_of(result: Result, copy: float) -> str:
    rate = result.unique_bytes / result.ours / 1e3
    sdpa = result.note if result.sdpa is None else f"{result.sdpa:,.0f} {result.note}".strip()
    over_sdpa = "" if result.over_sdpa is None else f"{result.over_sdpa:.2f}"
    goal = result.case.goals.get(result.heads)
    verdict = "" if goal is None else f"{goal:g}: {'met' if result.over_plain >= goal else 'missed'}"
    cells = [result.case.name, result.heads, f"{result.plan_ms:.2f}", sdpa, f"{result.plain:,.0f}"]
    cells += [f"{result.ours:,.0f}", over_sdpa, f"{result.over_plain:.2f}", verdict]
    return f"| {' | '.join([*cells, f'{rate:,.0f}', f'{rate / copy:.0%}'])} |"


def title(shape: Shape, rounds: int, copy: float) -> str:
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    versions = f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}, {runtime}"
    card, date = torch.cuda.get_device_name(shape.device), datetime.date.today().isoformat()
    dtype = str(shape.dtype).removeprefix("torch.")
    setting = f"{dtype}, heads of {shape.dim}, blocks of {BLOCK}; medians of {rounds} rounds"
    return f"{card}, {versions}, {date}. {setting}. A device copy runs at {copy:,.0f} GB/s.\n"


def lines_of(pairs: Sequence[tuple[Case, Shape]], rows: Callable[[Case, Shape], str], seconds: float) -> Iterator[str]:
    """A line per case until the time is over; then which were left out."""
    left_out, longest, begun = [], 0.0, time.monotonic()
    for case, shape in pairs:
        name = f"{case.name} with {shape.name} heads"
        start = time.monotonic()
        if start - begun + longest > seconds:
            left_out.append(f"{name} (no time left)")
        elif pool_bytes(case, shape) > MEMORY_SHARE * free_bytes(shape.device):
            left_out.append(f"{name} (K/V do not fit)")
        else:
            yield rows(case, shape)
            longest = max(longest, time.monotonic() - start)
    if left_out:
        yield f"\nLeft out: {'; '.join(left_out)}."


def report(args: argparse.Namespace, device: torch.device, begun: float) -> Iterator[str]:
    """The lines of the page, as they are measured."""
    dtype, rounds = getattr(torch, args.dtype), 10 if args.quick else 30
    shapes = [Shape(heads, kv_heads, 128, dtype, device) for heads, kv_heads in (HEADS[:1] if args.quick else HEADS)]
    timer = CudaTimer(device)
    copy = copy_rate(device, timer)
    yield title(shapes[0], rounds, copy)
    yield HEADER

    def rows(case: Case, shape: Shape) -> str:
        return row_of(measure(case, shape, timer, rounds), copy)

    pairs = [(case, shape) for case in CASES for shape in shapes]
    yield from lines_of(pairs, rows, args.seconds - (time.monotonic() - begun))


def replaced(page: str, table: str) -> str:
    """The page with ``table`` between its markers.

    Raises:
        ValueError: it has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"expected the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table.strip()}\n\n{END}{after}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a page with markers, such as docs/gpu.md")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="32/8 heads only, fewer rounds")
    parser.add_argument("--seconds", type=float, default=330, help="no case is begun that would end later")
    args = parser.parse_args(argv)
    if args.out is not None:  # before anything is measured
        try:
            replaced(args.out.read_text(encoding="utf-8"), "")
        except (OSError, ValueError) as error:
            parser.error(f"--out {args.out}: {error}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    begun, args = time.monotonic(), arguments(argv)
    if not torch.cuda.is_available():
        print("gpu_attention.py: no CUDA device that PyTorch can use; nothing was measured", file=sys.stderr)
        return 2
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        print("gpu_attention.py: TRITON_INTERPRET is set; interpreted kernels are not timed", file=sys.stderr)
        return 2
    lines = []
    try:
        with torch.inference_mode():
            for line in report(args, torch.device("cuda", torch.cuda.current_device()), begun):
                print(line, flush=True)
                lines.append(line)
    except WrongResultError as error:
        print(f"WRONG RESULT, no times: {error}", file=sys.stderr)
        return 1
    if args.out is not None:
        args.out.write_text(replaced(args.out.read_text(encoding="utf-8"), "\n".join(lines)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
