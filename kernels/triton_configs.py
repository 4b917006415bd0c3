"""Tile sizes of the Triton kernels, and for which shapes they are compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from branchkv.kernels.packing import Packing

__all__ = [
    "BLOCK_SIZES",
    "BLOCK_STEP",
    "DTYPES",
    "FP_FUSION",
    "HEAD_DIMS",
    "SLOT_TILE",
    "Tiles",
    "packing",
    "padded",
    "tiles",
]

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# The kernel's turns are whole parts of a block only if blocks hold multiples of this.
BLOCK_STEP = 16
# Slots that a program of the copy kernel moves.
SLOT_TILE = 16
# A product and a sum may become one instruction: triton's default until 3.9, which warns unless it is asked for.
FP_FUSION = {"enable_fp_fusion": True}

# Matrix instructions take rows, tokens and dims by 16.
_MATRIX = 16


@dataclass(frozen=True)
class Tiles:
    """How one program of the attention kernel is laid out.

    Attributes:
        narrow: packed rows of a tile for items with few rows.
        wide: packed rows of a tile for items with more rows.
        tokens: tokens of one turn of the loop.
        num_warps: warps of a program.
        num_stages: turns whose loads are under way at once.
    """

    narrow: int
    wide: int
    tokens: int
    num_warps: int
    num_stages: int


def tiles(dtype: torch.dtype, key_dim: int, value_dim: int, block_size: int) -> Tiles:
    """The tiles for a head: the largest tried with which nothing is spilled on sm_80 and sm_90, never timed."""
    largest = max(padded(key_dim), padded(value_dim))
    if dtype.itemsize == 4:  # no matrix instructions: operands go through registers as well
        small = largest <= 64
        rows, tokens = 32 if largest <= 32 else 16, 32 if small else 16
        return Tiles(narrow=16, wide=rows, tokens=tokens, num_warps=4 if small else 8, num_stages=2)
    if largest >= 256:
        return Tiles(narrow=16, wide=32, tokens=32, num_warps=4, num_stages=2)
    if largest == 128:  # with 32 tokens, 8 warps spill on sm_80; with 4 warps they spill for either number of tokens
        return Tiles(narrow=16, wide=64, tokens=64, num_warps=8, num_stages=2)
    return Tiles(narrow=16, wide=64, tokens=max(32, min(64, block_size)), num_warps=4, num_stages=2)


def padded(dim: int) -> int:
    """The power of two that holds ``dim``, at least what a matrix instruction takes."""
    return max(_MATRIX, 1 << (dim - 1).bit_length())


def packing(tiles: Tiles, kv_heads: int, group: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> Packing:
    """How work items have to be cut for ``tiles``."""
    return Packing(
        kv_heads=kv_heads,
        group=group,
        narrow=tiles.narrow,
        wide=tiles.wide,
        kv_tile=tiles.tokens,
        token_bytes=(key_dim + value_dim) * dtype.itemsize,
    )
