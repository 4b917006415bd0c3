"""branchkv: beam search and parallel sampling for HuggingFace models by forking a paged K/V cache.

Names are loaded on first use, so ``import branchkv`` costs nothing and pulls in neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from branchkv.config import KVConfig
    from branchkv.errors import (
        BranchKVError,
        InvalidArgumentError,
        NumericalError,
        OutOfBlocksError,
        UnsupportedModelError,
        UnsupportedOptionError,
    )
    from branchkv.models.generate import decode, generate
    from branchkv.models.session import paged
    from branchkv.paged_cache.stats import KVStats

__version__ = "0.1.0.dev0"

__all__ = [
    "BranchKVError",
    "InvalidArgumentError",
    "KVConfig",
    "KVStats",
    "NumericalError",
    "OutOfBlocksError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "decode",
    "generate",
    "paged",
]

_HOMES = {
    "KVConfig": "branchkv.config",
    "BranchKVError": "branchkv.errors",
    "InvalidArgumentError": "branchkv.errors",
    "NumericalError": "branchkv.errors",
    "OutOfBlocksError": "branchkv.errors",
    "UnsupportedModelError": "branchkv.errors",
    "UnsupportedOptionError": "branchkv.errors",
    "decode": "branchkv.models.generate",
    "generate": "branchkv.models.generate",
    "paged": "branchkv.models.session",
    "KVStats": "branchkv.paged_cache.stats",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'branchkv' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
