"""Seconds of a whole generate call: HF's own and branchkv, in turn, in one process, on SmolLM2-135M fp32.

    python benchmarks/cpu_generate.py [--threads 2] [--repeats 3] [P:n:new:beam ...]

A case is prompt tokens : beams or samples : new tokens : ``beam`` or ``sample``. Prompts are random ids and every
sequence runs to the full length, so that both sides compute the same number of tokens. Tokens are compared first; a
case that differs prints no time. Exits with 1 when 512:8:32:beam is less than 2.5 times faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

from branchkv.config import KVConfig
from branchkv.models.compare import run_branchkv, run_hf
from branchkv.models.loading import LoadedModel, load
from branchkv.models.real_models import smollm2

CASES = ("64:4:16:beam", "512:4:16:beam", "512:8:32:beam", "512:8:32:sample")
GOAL = {"512:8:32:beam": 2.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load(str(smollm2(progress=print)), dtype="float32")
    print(f"torch {torch.__version__}, {arguments.threads} threads, median of {arguments.repeats}")
    print("| case | HF generate s | branchkv s | times faster | K/V held, of unshared |")
    print("|---|--:|--:|--:|--:|")
    missed = [case for case in arguments.cases if not measure(loaded, case, arguments.repeats)]
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


def measure(loaded: LoadedModel, case: str, repeats: int) -> bool:
    """Print one row; False where tokens differ or the goal is missed."""
    prompt, width, new, mode = case.split(":")
    ids = torch.randint(100, 40000, (1, int(prompt)), generator=torch.Generator().manual_seed(int(prompt)))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"max_new_tokens": int(new), "min_new_tokens": int(new), "num_return_sequences": int(width)}
    options |= {"num_beams": int(width)} if mode == "beam" else {"do_sample": True, "top_k": 0}
    theirs, ours, ratios = [], [], []
    for _ in range(repeats):
        side, stats = run_branchkv(loaded.model, inputs, options, kv=KVConfig())
        other = run_hf(loaded.model, inputs, options)
        if not torch.equal(side.sequences, other.sequences):
            print(f"| {case} | tokens differ | | | |")
            return False
        theirs.append(other.seconds)
        ours.append(side.seconds)
        ratios.append(other.seconds / side.seconds)
    ratio = statistics.median(ratios)
    times = f"{statistics.median(theirs):.2f} | {statistics.median(ours):.2f} | {ratio:.2f}"
    print(f"| {case} | {times} | {stats.peak_blocks / stats.peak_blocks_unshared:.3f} |", flush=True)
    return ratio >= GOAL.get(case, 0.0)


if __name__ == "__main__":
    main()
