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
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from parts.decoding_cases import BLOCK, Case, Level, tokens_read
from parts.gpu_sides import (
    MEMORY_SHARE,
    Problem,
    Run,
    Shape,
    WrongResultError,
    check,
    free_bytes,
    our_side,
    packing_of,
    pool_bytes,
    prepare,
    sdpa_side,
)

from branchkv.kernels.plan import make_plan

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEADER = (
    "| rows x tokens | heads | plan ms | SDPA us | plain us | branchkv us | over SDPA | over plain | goal | GB/s "
    "| of copy |\n|---|---|--:|--:|--:|--:|--:|--:|---|--:|--:|"
)
Timer = Callable[[Callable[[], object]], float]


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
