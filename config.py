"""User settings of the K/V cache. Imports nothing of ours, so every room may import it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["KVConfig", "parse_bytes"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_ATTENTION = ("auto", "triton", "torch", "reference")
_PREEMPTION = ("recompute", "swap")


def parse_bytes(text: str) -> int:
    """Bytes named by a string such as ``"8GiB"``, ``"500MB"`` or ``"4096"``.

    Raises:
        ValueError: the text is not a positive number with a known unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if size <= 0:
        raise ValueError(f"memory: expected a positive size such as '8GiB' or '500MB', got {text!r}")
    return size


@dataclass(frozen=True)
class KVConfig:
    """How the K/V cache is laid out, how large it may grow and who computes attention over it.

    Attributes:
        block_size: token slots per block.
        num_blocks: most blocks held at once, over all layer kinds; None for no such limit.
        memory: most bytes held at once: a string (``"8GiB"``) or a fraction of the free memory, in (0, 1].
            Without ``num_blocks`` and ``memory`` the cache may take 80 % of what is free.
        dtype: dtype of the stored K/V; None keeps the model's.
        attention: implementation that reads the blocks, by name; ``"auto"`` is the fast one of the device.
        prefix_caching: keep full prompt blocks for later prompts.
        preemption: what happens to a group that has to give its blocks back.
        trace: True records every change of a block in ``KVStats.events``; a path writes them there as JSON lines.

    Raises:
        ValueError, TypeError: a field out of its range, named with what was expected and got.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory: str | float | None = None
    dtype: torch.dtype | None = None
    attention: str = "auto"
    prefix_caching: bool = False
    preemption: str = "recompute"
    trace: str | os.PathLike[str] | bool | None = None

    def __post_init__(self) -> None:
        _positive_int("block_size", self.block_size)
        if self.num_blocks is not None:
            _positive_int("num_blocks", self.num_blocks)
        if isinstance(self.memory, str):
            parse_bytes(self.memory)
        elif self.memory is not None:
            if isinstance(self.memory, bool) or not isinstance(self.memory, (int, float)):
                raise TypeError(f"memory: expected a string such as '8GiB' or a fraction, got {self.memory!r}")
            if not 0 < self.memory <= 1:
                raise ValueError(f"memory: expected a fraction in (0, 1] or a string such as '8GiB', got {self.memory}")
        _one_of("attention", self.attention, _ATTENTION)
        _one_of("preemption", self.preemption, _PREEMPTION)
        if self.num_blocks is not None and self.memory is not None:
            raise ValueError(f"memory: expected None beside num_blocks = {self.num_blocks}, got {self.memory!r}")
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise ValueError(f"dtype: expected a floating point torch.dtype, got {self.dtype!r}")
        if not isinstance(self.prefix_caching, bool):
            raise TypeError(f"prefix_caching: expected True or False, got {self.prefix_caching!r}")
        if not isinstance(self.trace, (str, os.PathLike, bool, type(None))):
            raise TypeError(f"trace: expected a path, True or None, got {self.trace!r}")


def _positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
