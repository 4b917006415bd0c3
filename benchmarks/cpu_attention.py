"""Time of the attention operator on the CPU, against SDPA over dense copies of the same K/V, paired in one run.

    python benchmarks/cpu_attention.py [--threads 2] [--rounds 200]

SmolLM2-135M's shapes: 9 query heads, 3 K/V heads of 64, fp32. Prints medians in microseconds, the ratio (above 1: the
operator is faster) as the median of paired ratios, and the largest difference of the two results. The two sides are
called in turn, so that each finds the caches as the other has left them.

The last column is the operator's time, called again and again, less that of its arithmetic alone: the fused kernel on
the shared run, and two products and a softmax for the rest, on operands that lie ready.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from branchkv.kernels.attention import attention
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan, make_plan

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    shared: int
    private: int
    scattered: bool = False


CASES = [
    Case("16 rows, 1,024 shared + 20", 16, 1024, 20),
    Case("8 rows, 4,096 shared + 20", 8, 4096, 20),
    Case("4 rows, 512 shared + 60", 4, 512, 60),
    Case("16 rows, nothing shared, in runs", 16, 0, 1044),
    Case("16 rows, nothing shared, scattered", 16, 0, 1044, scattered=True),
]


def tables_of(case: Case) -> np.ndarray:
    shared, own = case.shared // BLOCK, -(-case.private // BLOCK)
    used = shared + case.rows * own
    names = np.random.default_rng(0).permutation(used) if case.scattered else np.arange(used)
    rows = [[*range(shared), *range(shared + row * own, shared + (row + 1) * own)] for row in range(case.rows)]
    return names[np.array(rows)]


def median_pair(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        pair = []
        for run in (ours, theirs):
            start = time.perf_counter()
            run()
            pair.append((time.perf_counter() - start) * 1e6)
        times.append((pair[0], pair[1]))
    warm = times[rounds // 10 :]
    mine, other = (statistics.median(values) for values in zip(*warm, strict=True))
    return mine, other, statistics.median(b / a for a, b in warm)


def repeated(run: Callable[[], object], rounds: int = 300) -> float:
    """Median microseconds of a call among many of the same."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[rounds // 10 :])


def arithmetic(case: Case, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Callable[[], object]:
    """What has to be computed at least, for rows that share [1, kv_heads, tokens, dim] of ``keys`` and ``values``."""
    rows, width, group = case.rows, case.private, HEADS // KV_HEADS
    packed = query.view(rows, KV_HEADS, group, DIM).transpose(0, 1).reshape(1, KV_HEADS, rows * group, DIM)
    folded, own = packed.view(KV_HEADS * rows, group, DIM), torch.randn(2, KV_HEADS * rows, width, DIM)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def run() -> object:
        weights = torch.bmm(folded, own[0].transpose(1, 2)).softmax(dim=-1)
        return fused(packed, keys, values, scale=DIM**-0.5), torch.bmm(weights, own[1])

    return run


def measure(case: Case, rounds: int) -> str:
    tables = tables_of(case)
    slots = (int(tables.max()) + 1) * BLOCK
    length = case.shared + case.private
    torch.manual_seed(0)
    keys, values = (torch.randn(KV_HEADS, slots + 1, DIM).transpose(0, 1) for _ in range(2))
    query = torch.randn(case.rows, HEADS, DIM)
    plan: AttentionPlan = make_plan(tables, np.full(case.rows, length), block_size=BLOCK, null_slot=slots)
    options = AttentionOptions(scale=DIM**-0.5)
    position = np.arange(length)
    gathered = torch.from_numpy(tables[:, position // BLOCK] * BLOCK + position % BLOCK)
    dense_keys, dense_values = (pool[gathered].transpose(1, 2).contiguous() for pool in (keys, values))

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(query[:, :, None], dense_keys, dense_values, enable_gqa=True)

    def ours() -> torch.Tensor:
        return attention(query, keys, values, plan, options)[0]

    extra = "-"
    if case.shared:
        run = (tensor[: case.shared].transpose(0, 1)[None] for tensor in (keys, values))
        extra = f"{repeated(ours) - repeated(arithmetic(case, query, *run)):,.0f}"
    off = float((ours() - theirs()[:, :, 0]).abs().max())
    mine, other, ratio = median_pair(ours, theirs, rounds)
    return f"| {case.name} | {other:,.0f} | {mine:,.0f} | {ratio:.2f} | {off:.1e} | {extra} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.threads} threads, {HEADS}/{KV_HEADS} heads of {DIM}, fp32, blocks of {BLOCK}"
    )
    print("| case | SDPA us | branchkv us | times faster | largest difference | overhead us |")
    print("|---|--:|--:|--:|--:|--:|")
    with torch.inference_mode():
        for case in CASES:
            print(measure(case, args.rounds), flush=True)


if __name__ == "__main__":
    main()
