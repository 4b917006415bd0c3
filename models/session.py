"""``branchkv.paged(model)``: inside, ``model.generate`` decodes by forking, whoever calls it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from branchkv.config import KVConfig
from branchkv.errors import UnsupportedOptionError
from branchkv.models.generate import generate
from branchkv.models.options import check_kv
from branchkv.models.support import check_model
from branchkv.paged_cache.stats import KVStats

__all__ = ["PagedSession", "paged"]


class PagedSession:
    """What a ``paged`` block did.

    Attributes:
        stats: counters summed and peaks taken over the calls that were paged.
        calls: how many calls were paged.
        unpaged: how many went to HF's own generate because of an option.
    """

    def __init__(self, block_size: int) -> None:
        self.stats = KVStats(block_size=block_size)
        self.calls = 0
        self.unpaged = 0


@contextmanager
def paged(model: Any, kv: KVConfig | None = None) -> Iterator[PagedSession]:
    """Make ``model.generate`` paged for the time of the block: pipelines and trainers run unmodified.

    A call with an option that branchkv does not support goes to HF's own generate, with one warning per option.

    Args:
        model: a transformers model; its generate is restored afterwards, also after an exception.
        kv: layout and budget of the K/V cache of every call.

    Raises:
        UnsupportedModelError, UnsupportedOptionError: on entering, for the model or a field of ``kv``.
    """
    kv = kv if kv is not None else KVConfig()
    check_model(model)
    check_kv(kv, model.device)
    session = PagedSession(kv.block_size)
    warned: set[str] = set()

    def paged_generate(*args: Any, **kwargs: Any) -> Any:
        seed = kwargs.pop("seed", None)
        collect: list[KVStats] = []
        try:
            output = generate(model, *args, kv=kwargs.pop("kv", kv), seed=seed, on_stats=collect.append, **kwargs)
        except UnsupportedOptionError as error:
            session.unpaged += 1
            if error.option not in warned:
                warned.add(error.option)
                warnings.warn(f"{error}; this call runs HF's own generate, not paged", UserWarning, stacklevel=2)
            return type(model).generate(model, *args, **kwargs)
        session.calls += 1
        for stats in collect:
            session.stats = session.stats.merged(stats)
        return output

    before = model.__dict__.get("generate")
    model.__dict__["generate"] = paged_generate
    try:
        yield session
    finally:
        if before is None:
            model.__dict__.pop("generate", None)
        else:
            model.__dict__["generate"] = before
