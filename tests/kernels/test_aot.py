"""What the compilers make of the Triton kernels, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from branchkv.errors import CompilationError, InvalidArgumentError

pytest.importorskip("triton", reason="triton cannot be imported, so there is nothing to compile with")

from branchkv.kernels import aot
from branchkv.kernels.triton_configs import BLOCK_SIZES, DTYPES, HEAD_DIMS


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
def test_bf16_uses_matrix_instructions_and_spills_nothing(target: str) -> None:
    """Attention in every production configuration; of what copies and adds up, the largest heads and blocks."""
    chosen = [aot.Variant("attention", torch.bfloat16, dim, size) for dim in HEAD_DIMS for size in BLOCK_SIZES]
    chosen += [aot.Variant(kernel, torch.bfloat16, 256, 128) for kernel in ("merge", "write", "copy")]
    found = aot.compile_all(target, 2, chosen)
    assert [(kernel.kernel, kernel.head_dim, kernel.block_size) for kernel in found] == [
        (variant.kernel, variant.head_dim, variant.block_size) for variant in chosen
    ]
    assert {kernel for kernel in found if kernel.spills} == set()
    assert {kernel for kernel in found if not kernel.matrix_instructions and kernel.kernel == "attention"} == set()
    assert all(0 < kernel.registers <= 255 and kernel.target == target for kernel in found)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
def test_fp32_products_are_not_rounded_to_tf32(target: str) -> None:
    (found,) = aot.compile_all(target, 1, [aot.Variant("attention", torch.float32, 64, 16)])  # raises where they are
    assert not found.matrix_instructions


@pytest.mark.slow
def test_the_interpreters_switch_does_not_reach_the_compiling_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    variant = aot.Variant("merge", torch.bfloat16, 64, 16)
    with pytest.raises(CompilationError, match="TRITON_INTERPRET"):
        aot.report(variant, "cuda:90")
    (found,) = aot.compile_all("cuda:90", 1, [variant])
    assert found.to_dict()["dtype"] == "bf16"


@pytest.mark.slow
def test_spilled_registers_are_counted() -> None:
    """In a process of its own, where nothing is interpreted and the tiles can be exchanged: too many rows per warp."""
    code = (
        "import torch\n"
        "from branchkv.kernels import aot\n"
        "aot.tiles = lambda *shape: aot.Tiles(16, 128, 64, num_warps=4, num_stages=1)\n"
        "print(aot.report(aot.Variant('attention', torch.bfloat16, 128, 16), 'cuda:90').spills)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert int(run.stdout) > 0, run.stderr


@pytest.mark.parametrize("target", ["cuda:70", "cuda", "hip:gfx90a", ""])
def test_other_targets_are_refused(target: str) -> None:
    with pytest.raises(InvalidArgumentError, match="cuda:80, cuda:90, cuda:100 or hip:gfx942") as caught:
        aot.compile_all(target, 1)
    assert (caught.value.argument, caught.value.got) == ("target", target)


def test_every_configuration_is_listed_once() -> None:
    found = aot.variants()
    assert len(set(found)) == len(found)
    assert {variant.kernel for variant in found} == {"attention", "merge", "write", "copy"}
    for kernel in ("attention", "copy"):
        shapes = {(item.dtype, item.head_dim, item.block_size) for item in found if item.kernel == kernel}
        assert shapes == set(product(DTYPES, HEAD_DIMS, BLOCK_SIZES))
    for kernel in ("merge", "write"):
        assert {(item.dtype, item.head_dim) for item in found if item.kernel == kernel} == set(
            product(DTYPES, HEAD_DIMS)
        )
