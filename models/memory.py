"""How much memory a cache may take."""

from __future__ import annotations

from pathlib import Path

import torch

from branchkv.config import KVConfig, parse_bytes
from branchkv.paged_cache.budget import BlockBudget, ByteBudget

__all__ = ["free_bytes", "make_budget"]

DEFAULT_FRACTION = 0.8


def make_budget(config: KVConfig, device: torch.device) -> BlockBudget | ByteBudget:
    """The budget that ``config`` asks for; by default 80 % of the device's free memory."""
    if config.num_blocks is not None:
        return BlockBudget(config.num_blocks)
    if isinstance(config.memory, str):
        return ByteBudget(parse_bytes(config.memory))
    return ByteBudget(int(free_bytes(device) * (config.memory or DEFAULT_FRACTION)))


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _available_on_host()
    limit, used = (_read_int(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else min(available, limit - used)


def _available_on_host() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 8 * 2**30  # no way to ask this system; pages are only taken when written


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
