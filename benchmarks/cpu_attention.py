"""Time of the attention operator on the CPU, against SDPA over dense copies of the same K/V, paired in one run.

    python benchmarks/cpu_attention.py [--threads 2] [--rounds 100] [--layers 8]

SmolLM2-135M's shapes: 9 query heads, 3 K/V heads of 64, fp32. As in a step of a model, a side goes through several
layers, each with K/V of its own, before it is the other side's turn. Prints medians in microseconds a layer, the ratio
(above 1: the operator is faster) as the median of paired ratios, and the largest difference of the two results.

The last column is the operator's time less that of its arithmetic alone: the fused kernel on the shared run, and two
products and a softmax for the rest, on operands that lie ready.
"""

from __future__ import annotations

import argparse
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


@dataclass(frozen=True)
class Layer:
    """Pools [slots, kv_heads, dim], the same K/V densely [rows, kv_heads, tokens, dim], and [K and V of rows' own]."""

    keys: torch.Tensor
    values: torch.Tensor
    dense_keys: torch.Tensor
    dense_values: torch.Tensor
    own: torch.Tensor


def layer_of(case: Case, slots: int, gathered: torch.Tensor) -> Layer:
    keys, values = (torch.randn(KV_HEADS, slots + 1, DIM).transpose(0, 1) for _ in range(2))
    own = torch.randn(2, KV_HEADS * case.rows, case.private, DIM)
    return Layer(keys, values, *(pool[gathered].transpose(1, 2).contiguous() for pool in (keys, values)), own)


def arithmetic(case: Case, query: torch.Tensor) -> Callable[[Layer], object]:
    """What has to be computed at least where rows share the first slots of the pools."""
    rows, group = case.rows, HEADS // KV_HEADS
    packed = query.view(rows, KV_HEADS, group, DIM).transpose(0, 1).reshape(1, KV_HEADS, rows * group, DIM)
    folded = packed.view(KV_HEADS * rows, group, DIM)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def run(layer: Layer) -> object:
        keys, values = (pool[: case.shared].transpose(0, 1)[None] for pool in (layer.keys, layer.values))
        weights = torch.bmm(folded, layer.own[0].transpose(1, 2)).softmax(dim=-1)
        return fused(packed, keys, values, scale=DIM**-0.5), torch.bmm(weights, layer.own[1])

    return run


def in_turns(sides: list[Callable[[Layer], object]], layers: list[Layer], rounds: int) -> np.ndarray:
    """[rounds, sides] microseconds a layer."""
    times = np.empty((rounds, len(sides)))
    for turn in range(rounds):
        for number, side in enumerate(sides):
            start = time.perf_counter()
            for layer in layers:
                side(layer)
            times[turn, number] = (time.perf_counter() - start) * 1e6 / len(layers)
    return times[rounds // 10 :]


def measure(case: Case, args: argparse.Namespace) -> str:
    tables, length = tables_of(case), case.shared + case.private
    slots, position = (int(tables.max()) + 1) * BLOCK, np.arange(length)
    torch.manual_seed(0)
    gathered = torch.from_numpy(tables[:, position // BLOCK] * BLOCK + position % BLOCK)
    layers = [layer_of(case, slots, gathered) for _ in range(args.layers)]
    query = torch.randn(case.rows, HEADS, DIM)
    plan: AttentionPlan = make_plan(tables, np.full(case.rows, length), block_size=BLOCK, null_slot=slots)
    options = AttentionOptions(scale=DIM**-0.5)

    def theirs(layer: Layer) -> torch.Tensor:
        return F.scaled_dot_product_attention(query[:, :, None], layer.dense_keys, layer.dense_values, enable_gqa=True)

    def ours(layer: Layer) -> torch.Tensor:
        return attention(query, layer.keys, layer.values, plan, options)[0]

    off = max(float((ours(layer) - theirs(layer)[:, :, 0]).abs().max()) for layer in layers)
    sides: list[Callable[[Layer], object]] = [theirs, ours]
    if case.shared:
        sides.append(arithmetic(case, query))
    times = in_turns(sides, layers, args.rounds)
    ratio = np.median(times[:, 0] / times[:, 1])
    extra = f"{np.median(times[:, 1] - times[:, 2]):,.0f}" if case.shared else "-"
    other, mine = np.median(times[:, :2], axis=0)
    return f"| {case.name} | {other:,.0f} | {mine:,.0f} | {ratio:.2f} | {off:.1e} | {extra} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    setting = f"{args.layers} layers, {HEADS}/{KV_HEADS} heads of {DIM}, fp32, blocks of {BLOCK}"
    print(f"torch {torch.__version__}, {args.threads} threads, {setting}")
    print("| case | SDPA us | branchkv us | times faster | largest difference | overhead us |")
    print("|---|--:|--:|--:|--:|--:|")
    with torch.inference_mode():
        for case in CASES:
            print(measure(case, args), flush=True)


if __name__ == "__main__":
    main()
