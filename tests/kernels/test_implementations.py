"""Implementations by name: none falls back to another, and what one cannot do is said before anything runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from branchkv.errors import InvalidArgumentError, UnsupportedOptionError
from branchkv.kernels.implementations import check_implementation, implementation, moves, resolve
from branchkv.kernels.reference import reference_attention
from branchkv.kernels.torch_forked import torch_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_implementations_are_chosen_by_name() -> None:
    assert implementation("reference") is reference_attention
    assert implementation("torch") is torch_attention
    assert moves("torch") is None


@needs_triton
def test_triton_brings_its_own_moves() -> None:
    assert implementation("triton").__module__ == "branchkv.kernels.triton_ops"
    assert type(moves("triton")).__name__ == "TritonMoves"


@pytest.mark.parametrize(("device", "name"), [(CPU, "torch"), (CUDA, "triton"), (torch.device("meta"), "torch")])
def test_auto_is_the_fast_one_of_the_device(device: torch.device, name: str) -> None:
    assert resolve("auto", device) == name
    assert resolve("reference", device) == "reference"


@pytest.mark.parametrize("name", ["Torch", "eager", "auto"])
def test_an_unknown_implementation_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=name) as raised:
        implementation(name)
    assert raised.value.option == f"attention={name!r}"


def test_without_triton_its_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOptionError, match="pip install triton"):
        implementation("triton")


@needs_triton
def test_blocks_that_the_triton_kernel_does_not_take() -> None:
    for name in ("triton", "auto"):
        check_implementation(name, CUDA, 48)
        with pytest.raises(InvalidArgumentError, match="block_size: expected a multiple of 16"):
            check_implementation(name, CUDA, 24)
    check_implementation("auto", CPU, 24)
    check_implementation("torch", CUDA, 24)


@needs_triton
def test_triton_compiles_nothing_for_a_cpu() -> None:
    """In a process of its own: whether kernels are interpreted is settled when triton is imported."""
    code = (
        "import torch\n"
        "from branchkv.kernels.implementations import check_implementation\n"
        "check_implementation('triton', torch.device('cpu'), 16)\n"
    )
    run = [
        subprocess.run([sys.executable, "-c", code], env={"TRITON_INTERPRET": flag}, capture_output=True, text=True)
        for flag in ("0", "1")
    ]
    assert run[0].returncode == 1
    assert "attention='triton'" in run[0].stderr
    assert "TRITON_INTERPRET=1" in run[0].stderr
    assert run[1].returncode == 0, run[1].stderr
