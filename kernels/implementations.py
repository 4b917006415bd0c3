"""The implementations of the operator by name, and which of them a device gets. None falls back to another."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from branchkv.errors import InvalidArgumentError, UnsupportedOptionError
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan
from branchkv.kernels.reference import reference_attention
from branchkv.kernels.torch_forked import torch_attention
from branchkv.kernels.triton_configs import BLOCK_STEP

if TYPE_CHECKING:
    from branchkv.kernels.triton_ops import TritonMoves

__all__ = ["Implementation", "check_implementation", "implementation", "moves", "resolve"]

Implementation = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan, AttentionOptions], tuple[torch.Tensor, torch.Tensor]
]


def resolve(name: str, device: torch.device) -> str:
    """``"auto"`` as what is fast on ``device``: ``"triton"`` on CUDA and ROCm, else ``"torch"``; other names stay."""
    if name != "auto":
        return name
    return "triton" if device.type == "cuda" else "torch"


def implementation(name: str) -> Implementation:
    """The implementation called ``name``: ``"reference"``, ``"torch"`` or ``"triton"``.

    Raises:
        UnsupportedOptionError: there is no such implementation, or triton is not installed.
    """
    match name:
        case "reference":
            return reference_attention
        case "torch":
            return torch_attention
        case "triton":
            if importlib.util.find_spec("triton") is None:
                raise UnsupportedOptionError("attention='triton'", "triton is not installed; pip install triton")
            # Not at the top: importing the package must not need triton, nor load it.
            from branchkv.kernels.triton_ops import triton_attention

            return triton_attention
        case _:
            raise UnsupportedOptionError(
                f"attention={name!r}",
                "the implementations are 'triton', 'torch' and 'reference', or 'auto' for one of them",
            )


def moves(name: str) -> TritonMoves | None:
    """How K/V are written and copied with the implementation called ``name``; None for torch's indexing."""
    if name != "triton":
        return None
    from branchkv.kernels.triton_ops import TritonMoves

    return TritonMoves()


def check_implementation(name: str, device: torch.device, block_size: int) -> None:
    """Refuse what an implementation cannot do on a device, before anything runs.

    Args:
        name: as in ``KVConfig.attention``.
        device: of the K/V.
        block_size: slots per block.

    Raises:
        UnsupportedOptionError: no such implementation, or none for the device.
        InvalidArgumentError: a block size that the Triton kernel does not take.
    """
    chosen = resolve(name, device)
    implementation(chosen)
    if chosen != "triton":
        return
    from branchkv.kernels.triton_kernels import INTERPRETED

    if device.type != "cuda" and not INTERPRETED.value:
        raise UnsupportedOptionError(
            f"attention={name!r}",
            f"Triton has no compiler for {device.type!r}; use 'torch', or set TRITON_INTERPRET=1 to try the kernels",
        )
    if block_size % BLOCK_STEP:
        expected = f"a multiple of {BLOCK_STEP} with attention='triton'; other sizes run with attention='torch'"
        raise InvalidArgumentError("block_size", expected, str(block_size))
