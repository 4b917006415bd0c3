"""Compiles the Triton kernels ahead of time, without a GPU, and says what the compilers made of them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from branchkv.errors import CompilationError, InvalidArgumentError, UnsupportedOptionError
from branchkv.kernels.triton_configs import BLOCK_SIZES, DTYPES, FP_FUSION, HEAD_DIMS, SLOT_TILE, Tiles, padded, tiles

__all__ = ["TARGETS", "CompiledKernel", "Tiles", "Variant", "check_target", "compile_all", "report", "variants"]

# Backend, architecture, threads per warp.
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "cuda:80": ("cuda", 80, 32),
    "cuda:90": ("cuda", 90, 32),
    "cuda:100": ("cuda", 100, 32),
    "hip:gfx942": ("hip", "gfx942", 64),
}

_INTERPRET = "TRITON_INTERPRET"
_GROUP = 4
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

# Types of the kernels' arguments by name; what is not listed is a stride or a count, an i32.
_DATA = {"query", "key_pool", "value_pool", "out", "keys", "values", "source", "target"}
_POINTERS = {
    **dict.fromkeys(("lse", "partial_out", "partial_lse", "sinks", "bias", "alibi"), "*fp32"),
    **dict.fromkeys(("items", "order", "sequence", "lengths", "ends", "tables", "offsets", "slots"), "*i32"),
    **dict.fromkeys(("source_ids", "target_ids"), "*i64"),
}
_FLOATS = {"scale", "softcap"}
# Everything else is a multiple of 16: allocations are aligned, and so are strides of heads whose dim is.
_UNALIGNED = {"window", "kv_heads", "heads", "table_stride", *_FLOATS}

_MATRIX_SASS = re.compile(r"\b(?:HMMA|HGMMA|IMMA|QGMMA|QMMA|OMMA|UTC[A-Z]*MMA)\b")
_SPILL_SASS = re.compile(r"\b(?:STL|LDL)\b")
_RESOURCES = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")
# In PTX `.tf32` is the type of an operand, in SASS a suffix of the instruction.
_TF32 = re.compile(r"\.tf32\b", re.IGNORECASE)


@dataclass(frozen=True)
class Variant:
    """One configuration of one kernel.

    Attributes:
        kernel: attention, merge, write or copy.
        dtype: of queries and pools.
        head_dim: of keys and values.
        block_size: slots per block; 16 where the kernel does not depend on it.
    """

    kernel: str
    dtype: torch.dtype
    head_dim: int
    block_size: int


@dataclass(frozen=True)
class CompiledKernel:
    """What a compiler made of one configuration.

    Attributes:
        kernel, dtype, head_dim, block_size: the configuration; the dtype is fp32, fp16 or bf16.
        target: what it was compiled for.
        registers: per thread.
        spills: instructions that move registers to and from local memory (cuda), or registers spilled (hip).
        shared_bytes: shared memory of a program.
        matrix_instructions: whether products are computed by matrix instructions.
    """

    kernel: str
    target: str
    dtype: str
    head_dim: int
    block_size: int
    registers: int
    spills: int
    shared_bytes: int
    matrix_instructions: bool

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def variants() -> list[Variant]:
    """Every configuration that runs in production, options off."""
    found = []
    for dtype in DTYPES:
        for dim in HEAD_DIMS:
            found += [Variant("attention", dtype, dim, size) for size in BLOCK_SIZES]
            found += [Variant(kernel, dtype, dim, 16) for kernel in ("merge", "write")]
            found += [Variant("copy", dtype, dim, size) for size in BLOCK_SIZES]
    return found


def compile_all(
    target: str,
    jobs: int | None = None,
    only: list[Variant] | None = None,
    on_compiled: Callable[[CompiledKernel], None] | None = None,
) -> list[CompiledKernel]:
    """Compile configurations in processes of their own.

    Args:
        target: one of ``TARGETS``.
        jobs: processes; None for one per core.
        only: the configurations; None for all.
        on_compiled: called with each in turn, for progress.

    Raises:
        InvalidArgumentError, UnsupportedOptionError: from ``check_target``.
        CompilationError: from ``report``.
    """
    check_target(target)
    if jobs is not None and jobs < 1:
        raise InvalidArgumentError("jobs", "at least 1, or None", str(jobs))
    chosen = variants() if only is None else only
    workers = ProcessPoolExecutor(jobs or os.cpu_count(), get_context("spawn"), initializer=_leave_interpreter)
    found = []
    with workers as pool:
        for compiled in pool.map(report, chosen, [target] * len(chosen)):
            found.append(compiled)
            if on_compiled is not None:
                on_compiled(compiled)
    return found


def report(variant: Variant, target: str) -> CompiledKernel:
    """Compile one configuration in this process, which must not interpret kernels.

    Raises:
        InvalidArgumentError, UnsupportedOptionError: from ``check_target``.
        CompilationError: the compiler fails, or rounds fp32 products to TF32; or kernels are interpreted here.
    """
    check_target(target)
    name = f"{variant.kernel} ({_NAMES[variant.dtype]}, head size {variant.head_dim}, blocks of {variant.block_size})"
    if os.environ.get(_INTERPRET, "0") != "0":
        raise CompilationError(name, target, f"{_INTERPRET} is set: interpreted kernels have no code; use compile_all")
    try:
        compiled = _compile(variant, target)
    except Exception as error:  # whatever a compiler throws: ptxas, LLVM, out of shared memory
        raise CompilationError(name, target, str(error)) from error
    measured = _measure_cuda(compiled) if TARGETS[target][0] == "cuda" else _measure_hip(compiled)
    if variant.dtype is torch.float32 and measured["tf32"]:
        raise CompilationError(name, target, "fp32 products are rounded to TF32")
    return CompiledKernel(
        kernel=variant.kernel,
        target=target,
        dtype=_NAMES[variant.dtype],
        head_dim=variant.head_dim,
        block_size=variant.block_size,
        registers=measured["registers"],
        spills=measured["spills"],
        shared_bytes=int(compiled.metadata.shared),
        matrix_instructions=bool(measured["matrix"]),
    )


def check_target(target: str) -> None:
    """Whether kernels can be compiled for ``target``.

    Raises:
        InvalidArgumentError: no such target.
        UnsupportedOptionError: triton is not installed.
    """
    if target not in TARGETS:
        *most, last = TARGETS
        raise InvalidArgumentError("target", f"{', '.join(most)} or {last}", target)
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedOptionError("target", "triton is not installed; pip install triton")


def _leave_interpreter() -> None:
    """Before a process imports any kernel: the switch is read when a kernel is decorated."""
    os.environ.pop(_INTERPRET, None)


def _compile(variant: Variant, target: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # By name, and not before: whether a kernel is interpreted is decided when this module is imported.
    kernels = importlib.import_module("branchkv.kernels.triton_kernels")
    kernel = getattr(kernels, f"{variant.kernel}_kernel")
    constants, options = _constants(variant), _options(variant)
    signature = {name: _type(name, variant, constants) for name in kernel.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in constants and name not in _UNALIGNED
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def _type(name: str, variant: Variant, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in _DATA:
        return f"*{_NAMES[variant.dtype]}"
    if name == "slots" and variant.kernel == "write":  # of the pool, where the merge counts partial results
        return "*i64"
    return _POINTERS.get(name, "fp32" if name in _FLOATS else "i32")


def _constants(variant: Variant) -> dict[str, Any]:
    """The constexpr arguments of a production launch."""
    dim, tile, size = variant.head_dim, padded(variant.head_dim), variant.block_size
    key_value = {"KEY_DIM": dim, "VALUE_DIM": dim, "KEY_TILE": tile, "VALUE_TILE": tile}
    if variant.kernel == "merge":
        return {"VALUE_DIM": dim, "VALUE_TILE": tile, "HAS_SINKS": False}
    if variant.kernel == "write":
        return key_value
    if variant.kernel == "copy":
        # Blocks are gathered into the staging buffer; the launch that scatters them differs only in whose ids it reads.
        ids = {"HAS_SOURCE_IDS": True, "HAS_TARGET_IDS": False}
        return {**ids, "BLOCK_SIZE": size, "SLOT_TILE": SLOT_TILE, "DIM": dim, "DIM_TILE": tile}
    chosen = tiles(variant.dtype, dim, dim, size)
    switches = dict.fromkeys(("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS", "HAS_BIAS", "HAS_ALIBI"), False)
    shape = {"NARROW": chosen.narrow, "WIDE": chosen.wide, "TOKENS": chosen.tokens}
    precise = {"IEEE": variant.dtype is torch.float32}
    return {"GROUP": _GROUP, "BLOCK_SIZE": size, **key_value, **shape, **switches, **precise}


def _options(variant: Variant) -> dict[str, int]:
    """As ``branchkv.kernels.triton_ops`` launches it."""
    if variant.kernel != "attention":
        return {"num_warps": 1 if variant.kernel in ("merge", "write") else 4, "num_stages": 1, **FP_FUSION}
    chosen = tiles(variant.dtype, variant.head_dim, variant.head_dim, variant.block_size)
    return {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages, **FP_FUSION}


def _measure_cuda(compiled: Any) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage, sass = _cuobjdump("-res-usage", cubin), _cuobjdump("-sass", cubin)
    resources = {name: int(value) for name, value in _RESOURCES.findall(usage)}
    spills = len(_SPILL_SASS.findall(sass))
    return {
        "registers": resources["REG"],
        # Local memory without such an instruction does not happen; if it does, it has to show.
        "spills": spills or resources.get("LOCAL", 0),
        "matrix": len(_MATRIX_SASS.findall(sass)),
        "tf32": len(_TF32.findall(compiled.asm["ptx"])) + len(_TF32.findall(sass)),
    }


def _cuobjdump(option: str, cubin: Path) -> str:
    """What triton's own copy of the tool says; its folder is the same in all versions, the settings' names are not."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), option, str(cubin)], check=True, capture_output=True, text=True).stdout


def _measure_hip(compiled: Any) -> dict[str, int]:
    assembly = compiled.asm["amdgcn"]
    numbers = {name: int(value) for name, value in re.findall(r"^\s*-?\s*\.(\w+):\s+(\d+)\s*$", assembly, re.MULTILINE)}
    return {
        "registers": numbers["vgpr_count"],
        "spills": numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"],
        "matrix": len(re.findall(r"\bv_mfma_", assembly)),
        "tf32": len(re.findall(r"\bv_mfma_\w*xf32", assembly)),
    }
