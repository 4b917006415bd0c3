"""What is built is what is here: package list, data, version, pins; and importing the package costs nothing."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
from packaging.requirements import Requirement

import branchkv

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("paged_cache", "kernels", "decoding", "models", "eval")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    content: dict[str, Any] = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return content


def packages_in(root: Path) -> set[str]:
    """Every package below the root that ships: the root itself and each folder of a room that holds a module."""
    modules = (module for room in ROOMS for module in (root / room).rglob("*.py"))
    return {"branchkv"} | {".".join(("branchkv", *module.parent.relative_to(root).parts)) for module in modules}


def test_every_folder_with_a_module_is_listed_and_no_other(pyproject: dict[str, Any]) -> None:
    listed = pyproject["tool"]["setuptools"]["packages"]
    assert set(listed) == packages_in(ROOT)
    assert len(listed) == len(set(listed))


def test_a_forgotten_sub_package_would_be_seen(tmp_path: Path) -> None:
    for file in ("models/hf.py", "kernels/deep/er/plan.py", "eval/README.md", "docs/conf.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    assert packages_in(tmp_path) == {"branchkv", "branchkv.models", "branchkv.kernels.deep.er"}


def test_the_type_marker_ships(pyproject: dict[str, Any]) -> None:
    assert (ROOT / "py.typed").is_file()
    assert pyproject["tool"]["setuptools"]["package-data"] == {"branchkv": ["py.typed"]}


def test_the_root_holds_no_conftest() -> None:
    # pytest would import it, and with it the package a second time, under the name of the checkout folder.
    assert not (ROOT / "conftest.py").exists()


def test_the_type_checkers_link_points_at_the_root() -> None:
    assert (ROOT / ".typecheck" / "branchkv").resolve() == ROOT


def test_one_version(pyproject: dict[str, Any]) -> None:
    version = pyproject["project"]["version"]
    assert branchkv.__version__ == version
    assert importlib.metadata.version("branchkv") == version, "installed from an older checkout"


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import json, sys; old = set(sys.modules); import branchkv; print(json.dumps(list(set(sys.modules) - old)))"
    loaded = json.loads(_python(code, cwd=tmp_path))
    assert "branchkv" in loaded
    assert {name.partition(".")[0] for name in loaded}.isdisjoint({"transformers", "triton", "torch", "numpy"})
    assert [name for name in loaded if name.startswith("branchkv.")] == []


def test_huggingface_kernels_is_not_shadowed_at_the_root() -> None:
    # From the root, `import kernels` must not be our folder as a regular package: transformers imports PyPI's.
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)"
    assert str(ROOT / "kernels") not in _python(code, cwd=ROOT)


def test_the_lock_fits_the_ranges(pyproject: dict[str, Any]) -> None:
    lock = {r.name: str(next(iter(r.specifier)).version) for r in _requirements("lock-cpu.txt") if _applies(r)}
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(line) for line in [*project["dependencies"], *extras["demo"], *extras["test"]]]
    wanted = [requirement for requirement in wanted if _applies(requirement) and requirement.name != "branchkv"]
    assert len(wanted) > 10
    for requirement in wanted:
        assert requirement.name in lock, f"{requirement.name} is not pinned"
        assert requirement.specifier.contains(lock[requirement.name], prereleases=True), str(requirement)


@pytest.mark.parametrize("name", ["lock-cpu.txt", "models.txt"])
def test_every_pin_is_exact(name: str) -> None:
    requirements = list(_requirements(name))
    assert requirements
    for requirement in requirements:
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], str(requirement)


def test_the_model_packages_are_pinned_by_hash() -> None:
    text = (ROOT / "requirements" / "models.txt").read_text(encoding="utf-8")
    assert text.count("--hash=sha256:") == len(list(_requirements("models.txt")))


def _requirements(name: str) -> Iterator[Requirement]:
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        requirement = line.partition("#")[0].removesuffix("\\").strip()
        if requirement and not requirement.startswith("--"):
            yield Requirement(requirement)


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate()


def _python(code: str, cwd: Path) -> str:
    run = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
