"""Who may import whom. The imports are read from the syntax tree, so nothing has to run for an arrow to be seen."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What each room may import beside itself and the shared modules; the arrows are transitive.
ROOMS: Mapping[str, frozenset[str]] = {
    "paged_cache": frozenset(),
    "kernels": frozenset(),
    "decoding": frozenset({"paged_cache"}),
    "models": frozenset({"decoding", "paged_cache", "kernels"}),
    "eval": frozenset({"models", "decoding", "paged_cache", "kernels"}),
}
SHARED = frozenset({"errors", "config"})  # import nothing of ours; all may import them
ENTRIES = frozenset({"__init__", "__main__", "cli", "demo"})  # may import anything of ours; nothing imports them

# The rooms with a door to a package; everywhere else it is unknown. The bookkeeping's torch has a rule of its own.
DOORS: Mapping[str, str] = {"transformers": "models", "triton": "kernels"}
STORAGE = PurePosixPath("paged_cache/storage.py")


def test_the_repository_follows_the_layers() -> None:
    sources = _repository_sources()
    seen = {path.parts[0] for path in sources}
    assert seen >= {"paged_cache", "kernels", "decoding", "models", "errors.py", "config.py", "__init__.py"}
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        # Arrows between rooms, in every form an import can take.
        ("kernels/plan.py", "import branchkv.paged_cache.tables", "kernels may not import paged_cache"),
        ("kernels/plan.py", "from branchkv.paged_cache import tables", "kernels may not import paged_cache"),
        ("kernels/plan.py", "from branchkv import paged_cache", "kernels may not import paged_cache"),
        ("paged_cache/tables.py", "import branchkv.kernels.plan as p", "paged_cache may not import kernels"),
        ("paged_cache/tables.py", "from branchkv.decoding.beam import step", "paged_cache may not import decoding"),
        ("decoding/loop.py", "def f():\n    from branchkv.models.hf import x", "decoding may not import models"),
        ("decoding/loop.py", "if TYPE_CHECKING:\n    import branchkv.kernels.plan", "decoding may not import kernels"),
        ("decoding/sub/loop.py", "import branchkv.kernels.plan", "decoding may not import kernels"),
        ("models/hf.py", "from branchkv.eval.runner import run", "models may not import eval"),
        ("models/hf.py", "importlib.import_module('branchkv.eval.runner')", "models may not import eval"),
        ("models/hf.py", "__import__('branchkv.eval')", "models may not import eval"),
        # Upwards, to the public face of the package.
        ("models/hf.py", "from branchkv import generate", "models may not import branchkv.generate"),
        ("models/hf.py", "import branchkv", "models may not import branchkv itself"),
        ("eval/runner.py", "from branchkv.cli import main", "eval may not import cli"),
        ("decoding/loop.py", "from branchkv.errors2 import E", "decoding may not import branchkv.errors2"),
        # The shared modules stand alone.
        ("errors.py", "from branchkv.config import KVConfig", "errors may not import config"),
        ("config.py", "from branchkv.models.hf import x", "config may not import models"),
        # Packages that have one door.
        ("decoding/loop.py", "import transformers", "transformers belongs in models"),
        ("eval/runner.py", "from transformers.generation import utils", "transformers belongs in models"),
        ("cli.py", "import transformers", "transformers belongs in models"),
        ("__init__.py", "from transformers import AutoModel", "transformers belongs in models"),
        ("models/hf.py", "import triton.language as tl", "triton belongs in kernels"),
        ("demo.py", "import triton", "triton belongs in kernels"),
        ("paged_cache/tables.py", "import torch", "torch belongs in paged_cache/storage.py"),
        ("paged_cache/sub/storage.py", "from torch import nn", "torch belongs in paged_cache/storage.py"),
        # Names that only work from the repository root, or that mean another package.
        ("models/hf.py", "from . import cache", "relative import"),
        ("models/hf.py", "from ..errors import BranchKVError", "relative import"),
        ("models/hf.py", "import kernels", "import branchkv.kernels by its full path"),
        ("decoding/loop.py", "from paged_cache.tables import T", "import branchkv.paged_cache by its full path"),
        ("cli.py", "from errors import BranchKVError", "import branchkv.errors by its full path"),
        # Files that must not be there.
        ("kernels/__init__.py", "", "shadows"),
        ("eval/__init__.py", "", "shadows"),
        ("helpers.py", "", "no place in the layout"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str, complaint: str) -> None:
    found = violations({PurePosixPath(path): source})
    assert len(found) == 1
    assert complaint in found[0]
    assert found[0].startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "eval/runner.py",
            "from branchkv.models.hf import x\nimport branchkv.paged_cache.tables, branchkv.kernels.plan",
        ),
        ("models/hf.py", "import torch, transformers\nfrom branchkv.decoding.loop import Loop\nimport branchkv.errors"),
        ("models/hf.py", "import_module('transformers.cache_utils')\nimport_module(name)"),
        ("decoding/loop.py", "import torch\nfrom branchkv import config, errors, paged_cache"),
        ("kernels/triton_paged.py", "import triton, torch\nfrom branchkv.kernels.plan import Plan"),
        ("paged_cache/storage.py", "import torch\nfrom branchkv.paged_cache.tables import Tables"),
        ("paged_cache/tables.py", "import numpy as np\nfrom collections import deque\nfrom branchkv.config import K"),
        ("cli.py", "import branchkv\nfrom branchkv import generate\nfrom branchkv.eval.runner import run"),
        ("__main__.py", "from branchkv.cli import main"),
        ("errors.py", "from __future__ import annotations\nimport dataclasses"),
        ("models/sub/__init__.py", ""),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert violations({PurePosixPath(path): source}) == []


# The rule book, as functions of (path, source) so that it can be tried on planted files.


def violations(sources: Mapping[PurePosixPath, str]) -> list[str]:
    """Every breach of the layout in the files given, each with its place."""
    found = []
    for path, source in sorted(sources.items()):
        found += [f"{path}:1: {complaint}" for complaint in _misplaced(path)]
        for line, name in _imports(ast.parse(source, filename=str(path))):
            complaint = _forbidden(path, name)
            if complaint:
                found.append(f"{path}:{line}: {complaint}")
    return found


def _repository_sources() -> dict[PurePosixPath, str]:
    files = [*ROOT.glob("*.py"), *(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))]
    return {PurePosixPath(file.relative_to(ROOT).as_posix()): file.read_text(encoding="utf-8") for file in files}


def _misplaced(path: PurePosixPath) -> Iterator[str]:
    if len(path.parts) == 2 and path.name == "__init__.py":
        yield f"a top-level package {path.parts[0]!r} shadows others of that name; the rooms have no __init__.py"
    if len(path.parts) == 1 and path.stem not in SHARED | ENTRIES:
        yield "a module at the root that has no place in the layout"


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported; a relative import has a name that starts with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module == "branchkv":  # `from branchkv import errors` names a module, not the package
                yield from ((node.lineno, f"branchkv.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"} and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _forbidden(path: PurePosixPath, name: str) -> str | None:
    """Why the file may not import `name`, or None if it may."""
    if name.startswith("."):
        return f"relative import {name!r}: write the full path"
    here = path.parts[0].removesuffix(".py")
    top, _, rest = name.partition(".")
    if top in ROOMS or top in SHARED:
        return f"import branchkv.{top} by its full path"
    if top in DOORS and here != DOORS[top]:
        return f"{top} belongs in {DOORS[top]}"
    if top == "torch" and here == "paged_cache" and path != STORAGE:
        return f"torch belongs in {STORAGE}"
    if top == "branchkv" and here not in ENTRIES:
        return _forbidden_inside(here, rest.partition(".")[0])
    return None


def _forbidden_inside(here: str, there: str) -> str | None:
    if not there:
        return f"{here} may not import branchkv itself: only what is below it"
    if here in ROOMS and (there == here or there in SHARED | ROOMS[here]):
        return None
    known = there in ROOMS or there in SHARED | ENTRIES
    return f"{here} may not import {there if known else f'branchkv.{there}'}"
