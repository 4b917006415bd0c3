"""One case of the GPU benchmark: its tensors and plans, the sides that are compared, and the oracle."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from parts.decoding_cases import BLOCK, Case, lengths_of, tables_of, tokens_read
from torch.nn.attention import SDPBackend, sdpa_kernel

from branchkv.kernels.attention import attention
from branchkv.kernels.implementations import implementation
from branchkv.kernels.options import AttentionOptions
from branchkv.kernels.packing import Packing
from branchkv.kernels.plan import AttentionPlan, make_plan
from branchkv.kernels.sharing import plain_runs
from branchkv.kernels.triton_configs import packing, tiles
from branchkv.kernels.work import alignment, best_cut, make_work

ROWS_CHECKED = 8
MEMORY_SHARE = 0.6  # of what is free, for the pools and for the dense copies; the rest is for buffers and the check
Run = Callable[[], torch.Tensor]


class WrongResultError(Exception):
    """A result that float64 does not confirm; says which."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        return f"{self.heads}/{self.kv_heads}"

    @property
    def token_bytes(self) -> int:
        """K and V of one token, all heads."""
        return 2 * self.kv_heads * self.dim * self.dtype.itemsize


@dataclass(frozen=True)
class Problem:
    """Tensors, tables and both plans of a case.

    Attributes:
        query: [rows, heads, dim]. keys, values: pools [slots, kv_heads, dim]; slots that no row reads are NaN.
        tables: [rows, columns], -1 where nothing is held. lengths: [rows].
        plan: as decoding makes it. plain: the plan without sharing.
    """

    case: Case
    shape: Shape
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: np.ndarray
    lengths: np.ndarray
    plan: AttentionPlan
    plain: AttentionPlan

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.shape.name} heads"


# The tensors of a case, and its plans.


def pool_bytes(case: Case, shape: Shape) -> int:
    return (int(tables_of(case).max()) + 1) * BLOCK * shape.token_bytes


def prepare(case: Case, shape: Shape) -> Problem:
    tables, lengths = tables_of(case), lengths_of(case)
    slots = (int(tables.max()) + 1) * BLOCK
    torch.manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, shape.dim, dtype=shape.dtype, device=shape.device)

    keys, values = (draw(shape.kv_heads, slots + 1).transpose(0, 1) for _ in range(2))
    unread = np.flatnonzero(np.arange(BLOCK) >= tokens_read(tables, lengths)[:, None])
    for pool in (keys, values):
        pool[torch.from_numpy(unread).to(shape.device)] = math.nan
        pool[slots] = 0
    plan = make_plan(tables, lengths, block_size=BLOCK, null_slot=slots, device=shape.device)
    plain = plain_plan(plan, packing_of(shape))
    return Problem(case, shape, draw(case.rows, shape.heads), keys, values, tables, lengths, plan, plain)


def packing_of(shape: Shape) -> Packing:
    """The packing that the operator will ask the plan for."""
    chosen = tiles(shape.dtype, shape.dim, shape.dim, BLOCK)
    group = shape.heads // shape.kv_heads
    return packing(chosen, shape.kv_heads, group, shape.dim, shape.dim, shape.dtype)


def plain_plan(plan: AttentionPlan, pack: Packing) -> AttentionPlan:
    """The same tables, every row reading all of its tokens alone, cut for the processors as well as can be."""
    plain = AttentionPlan(plan.sequences, plan.sequence_order, plan.nodes, plan.null_slot, plan.device, plan.cost)
    runs = plain_runs(plan.sequences, plan.sequence_order)
    cut, _ = best_cut(runs, pack, plan.cost, alignment(plan.block_size))
    plain._work[pack] = make_work(runs, plan.row_order, pack, plan.cost, cut).to(plan.device)
    return plain


# The sides.


def scale_of(shape: Shape) -> float:
    return shape.dim**-0.5


def our_side(given: Problem, plan: AttentionPlan) -> Run:
    options, run = AttentionOptions(scale=scale_of(given.shape)), implementation("triton")

    def once() -> torch.Tensor:
        return attention(given.query, given.keys, given.values, plan, options, run=run)[0]

    return once


def slots_of(tables: np.ndarray, longest: int, empty: int) -> np.ndarray:
    """[rows, longest] the slot of each position; ``empty`` where a row has no block."""
    position = np.arange(longest)
    block = tables[:, position // BLOCK]
    return np.where(block >= 0, block * BLOCK + position % BLOCK, empty)


def dense_copy(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[rows, kv_heads, longest, dim]; head by head, so that no second copy is in memory at any time."""
    rows, longest = slots.shape
    dense = pool.new_empty((rows, pool.shape[1], longest, pool.shape[2]))
    for head in range(pool.shape[1]):
        dense[:, head] = pool[slots, head]
    return dense


def sdpa_side(given: Problem) -> tuple[Run | None, str]:
    """SDPA over dense copies, and what to say about it; None where there is none."""
    shape, longest = given.shape, int(given.lengths.max())
    if len(given.lengths) * longest * shape.token_bytes > MEMORY_SHARE * free_bytes(shape.device):
        return None, "does not fit"
    slots = torch.from_numpy(slots_of(given.tables, longest, given.plan.null_slot)).to(shape.device)
    keys, values = (dense_copy(pool, slots) for pool in (given.keys, given.values))
    query = given.query[:, :, None]
    backend = SDPBackend.FLASH_ATTENTION if shape.device.type == "cuda" else SDPBackend.MATH

    def once() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(query, keys, values, scale=scale_of(shape), enable_gqa=True)
        return out[:, :, 0]

    try:
        once()
    except RuntimeError as error:  # a card without a flash kernel must not cost the other columns
        print(f"SDPA, {given.name}: {error}", file=sys.stderr)
        return None, "no kernel"
    return once, "padded" if given.case.shortest is not None else ""


def free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return math.inf
    torch.cuda.empty_cache()  # what earlier cases left counts as taken otherwise
    return torch.cuda.mem_get_info(device)[0]


# The oracle.


def row_attention(given: Problem, row: int, dtype: torch.dtype) -> torch.Tensor:
    """[heads, dim] one row, eagerly, from the tables alone: products in ``dtype``, softmax at least in float32."""
    slots = slots_of(given.tables[row : row + 1], int(given.lengths[row]), given.plan.null_slot)[0]
    chosen, group = torch.from_numpy(slots).to(given.query.device), given.shape.heads // given.shape.kv_heads
    keys, values = (
        pool[chosen].to(dtype).repeat_interleave(group, dim=1).transpose(0, 1) for pool in (given.keys, given.values)
    )
    wide = torch.promote_types(dtype, torch.float32)
    scores = (keys @ given.query[row].to(dtype)[:, :, None]).squeeze(2).to(wide) * scale_of(given.shape)
    return (scores.softmax(-1).to(dtype)[:, None] @ values).squeeze(1)


def wrong_rows(given: Problem, out: torch.Tensor) -> list[int]:
    """Of a sample, the rows with an RMS error above twice that of eager in the same dtype and half an ulp."""
    found = []
    for row in np.unique(np.linspace(0, given.case.rows - 1, ROWS_CHECKED).round().astype(int)).tolist():
        right, eager = (row_attention(given, row, dtype).double() for dtype in (torch.float64, given.shape.dtype))
        limit = 2 * rms(eager - right) + torch.finfo(given.shape.dtype).eps * rms(right) / 2
        if not rms(out[row].double() - right) <= limit:  # NaN is wrong as well
            found.append(row)
    return found


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def check(given: Problem, sides: Mapping[str, Run]) -> None:
    """Raises WrongResultError where a side is wrong or did not run the plan it is named after."""
    for name, run in sides.items():
        if bad := wrong_rows(given, run()):
            raise WrongResultError(f"{given.name}: {name} differs from float64 in rows {bad}")
    if list(given.plain._work) != [packing_of(given.shape)]:
        raise WrongResultError(f"{given.name}: the operator asked the plain plan for another packing")
