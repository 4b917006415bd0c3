"""Inputs of the operator, and what it must return, computed row by row from the block tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.plan import AttentionPlan, make_plan
from branchkv.tests.kernels.random_tables import Tables, random_tables

NAN = float("nan")


@dataclass(frozen=True)
class Problem:
    """Inputs of the operator; what no row may read is NaN."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: Tables
    options: AttentionOptions

    @property
    def plan(self) -> AttentionPlan:
        tables = self.tables
        shape: dict[str, Any] = {"block_size": tables.block_size, "null_slot": tables.null_slot}
        return make_plan(tables.blocks, tables.lengths, **shape, window=tables.window)

    def to(self, dtype: torch.dtype) -> Problem:
        sinks, bias = (None if t is None else t.to(dtype) for t in (self.options.sinks, self.options.bias))
        options = replace(self.options, sinks=sinks, bias=bias)
        query, keys, values = (tensor.to(dtype) for tensor in (self.query, self.keys, self.values))
        return Problem(query, keys, values, self.tables, options)


def problem(
    seed: int,
    heads: tuple[int, int] = (2, 8),
    dims: tuple[int, int] = (17, 17),
    option: str = "plain",
    dtype: torch.dtype = torch.float32,
    **layout: Any,
) -> Problem:
    """Values are rounded to `dtype` and returned in float64, so that every precision starts from the same numbers."""
    rng = np.random.default_rng(seed)
    everything = option == "everything"
    window = 9 if option == "window" or everything else None
    drawn = int(rng.choice([1, 3, 16]))
    tables = random_tables(rng, **{"block_size": drawn, "window": window, **layout})
    rows, (kv_heads, query_heads) = len(tables.lengths), heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype).double()

    keys, values = (torch.full((tables.null_slot + 1, kv_heads, dim), NAN, dtype=torch.float64) for dim in dims)
    used = used_slots(tables)
    keys[used], values[used] = draw(len(used), kv_heads, dims[0]), draw(len(used), kv_heads, dims[1])
    keys[-1], values[-1] = 0, 0  # the null slot reads as zero
    bias = None
    if option == "bias" or everything:
        most = max(len(tables.slots(row)) for row in range(rows))
        bias = draw(rows if everything else 1, query_heads, 1, most + 2)
        bias[..., :2] = NAN  # columns of no token
    options = AttentionOptions(
        scale=dims[0] ** -0.5,
        softcap=1.5 if option == "softcap" or everything else None,
        sinks=draw(query_heads) if option == "sinks" or everything else None,
        bias=bias,
    )
    return Problem(draw(rows, query_heads, dims[0]), keys, values, tables, options)


def used_slots(tables: Tables) -> list[int]:
    return sorted({slot for row in range(len(tables.lengths)) for slot in tables.slots(row).values()})


def plain(given: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each row over the tokens its table names, in the dtype of the inputs, from the tables alone."""
    options, outputs, lses = given.options, [], []
    group = given.query.shape[1] // given.keys.shape[1]
    wide = torch.promote_types(given.query.dtype, torch.float32)
    for row, query in enumerate(given.query):
        slots = list(given.tables.slots(row).values())
        keys, values = (
            pool[slots].repeat_interleave(group, dim=1).transpose(0, 1) for pool in (given.keys, given.values)
        )
        scores = (keys @ query[:, :, None]).squeeze(2).to(wide) * options.scale  # [heads, tokens]
        if options.softcap is not None:
            scores = options.softcap * (scores / options.softcap).tanh()
        if options.bias is not None:
            mine = options.bias[row if len(options.bias) > 1 else 0, :, 0]
            scores = scores + mine[:, mine.shape[1] - len(slots) :]
        if options.sinks is not None:
            scores = torch.cat([scores, options.sinks.to(wide)[:, None]], dim=1)
        weights = scores.softmax(-1)[:, : len(slots)].to(values.dtype)
        outputs.append((weights[:, None] @ values).squeeze(1))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outputs), torch.stack(lses)
