"""The GPU benchmark without a GPU: its tables, plans, oracle and report, on small cases in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from branchkv.kernels.cost import CostModel
from branchkv.kernels.plan import AttentionPlan

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels are not interpreted: TRITON_INTERPRET is not 1", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SHARE_ALL = CostModel(processors=1, fixed=0.0, bandwidth=1.0, rate=1e12, merge=0.0, reread=1.0)


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The script as a module; dataclasses look it up under its name. Its folder is on the path, as when it is run."""
    before = set(sys.modules)
    sys.path.append(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("gpu_attention", ROOT / "benchmarks" / "gpu_attention.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in set(sys.modules) - before:
        if name == spec.name or name.split(".")[0] == "parts":
            del sys.modules[name]


@pytest.fixture(scope="module")
def oracle(bench: Any) -> Any:
    """What the script is made of: tensors, sides, oracle."""
    return sys.modules["parts.gpu_sides"]


@pytest.fixture(scope="module")
def cases(bench: Any) -> Any:
    """Its block tables."""
    return sys.modules["parts.decoding_cases"]


def tiny(bench: Any, name: str) -> Any:
    level = bench.Level
    return {
        "prompt": bench.Case("prompt", (level(1, 40), level(5, 20))),
        "tree": bench.Case("tree", (level(1, 32), level(2, 16), level(4, 35))),
        "ragged": bench.Case("ragged", (level(4, 50),), shortest=5),
    }[name]


def tiny_shape(bench: Any, dtype: torch.dtype = torch.float32) -> Any:
    return bench.Shape(4, 2, 32, dtype, CPU)


def shared(given: Any) -> Any:
    """The same with a plan that shares whatever can be shared: with so few tokens the cost model would not."""
    old = given.plan
    return replace(
        given, plan=AttentionPlan(old.sequences, old.sequence_order, old.nodes, old.null_slot, None, SHARE_ALL)
    )


def test_blocks_and_tokens_of_every_case(bench: Any, cases: Any) -> None:
    ragged = [303 + round(row * 3796 / 127) for row in range(128)]
    expected = {  # blocks, and tokens in them, counted by hand
        "10 x (4,096 + 416)": (256 + 10 * 26, 4096 + 10 * 416),
        "1,024 x (2,048 + 32)": (128 + 1024 * 2, 2048 + 1024 * 32),
        "256 x 1,024, nothing shared": (256 * 64, 256 * 1024),
        "128 x (303..4,099), nothing shared": (sum(-(-length // 16) for length in ragged), sum(ragged)),
        "tree 1, 4, 8, 256 of 2,048, 256, 256, 64": (
            128 + 4 * 16 + 8 * 16 + 256 * 4,
            2048 + 4 * 256 + 8 * 256 + 256 * 64,
        ),
        "128 x (300 + 3)": (18 + 128, 288 + 128 * 15),
        "128 x (1,024 + 3)": (64 + 128, 1024 + 128 * 3),
        "128 x (4,096 + 3)": (256 + 128, 4096 + 128 * 3),
    }
    assert [case.name for case in bench.CASES] == list(expected)
    for case in bench.CASES:
        tables, lengths = cases.tables_of(case), cases.lengths_of(case)
        used = np.unique(tables[tables >= 0])
        assert (len(used), int(bench.tokens_read(tables, lengths).sum())) == expected[case.name]
        assert used.tolist() == list(range(len(used)))
        assert ((tables >= 0).sum(axis=1) == -(-lengths // 16)).all()


def test_rows_share_the_blocks_of_the_nodes_they_are_in(bench: Any, cases: Any) -> None:
    tables = cases.tables_of(tiny(bench, "tree"))
    together = (tables[:, None] == tables[None]).sum(axis=2)
    assert together.tolist() == [[6, 3, 2, 2], [3, 6, 2, 2], [2, 2, 6, 3], [2, 2, 3, 6]]
    for column in range(tables.shape[1]):
        elsewhere = np.delete(tables, column, axis=1)
        assert not np.isin(tables[:, column], elsewhere).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["prompt", "tree", "ragged"])
def test_both_plans_and_sdpa_are_right(bench: Any, oracle: Any, name: str, dtype: torch.dtype) -> None:
    given = shared(bench.prepare(tiny(bench, name), tiny_shape(bench, dtype)))
    sides = {"branchkv": bench.our_side(given, given.plan), "plain": bench.our_side(given, given.plain)}
    bench.check(given, sides)
    pack = bench.packing_of(given.shape)
    assert int(given.plain.work(pack).items[:, 1].max()) == 1
    assert (int(given.plan.work(pack).items[:, 1].max()) > 1) == (name != "ragged")
    together, alone = (sides[side]().double() for side in ("branchkv", "plain"))
    # Sums of some 60 products in another order: each rounds by half an ulp, and they add up like a random walk.
    assert oracle.rms(together - alone) <= 60**0.5 / 2 * torch.finfo(dtype).eps * oracle.rms(alone)
    sdpa, note = bench.sdpa_side(given)
    assert note == ("padded" if name == "ragged" else "")
    if not note:
        bench.check(given, {"SDPA": sdpa})


def test_the_oracle_rejects_what_is_wrong(bench: Any, oracle: Any) -> None:
    given = bench.prepare(tiny(bench, "prompt"), tiny_shape(bench))
    right = bench.our_side(given, given.plan)()
    one_head, not_a_number = right.clone(), right.clone()
    one_head[2, 1], not_a_number[4, 0, 0] = right[2, 3], float("nan")
    assert oracle.wrong_rows(given, right) == []
    assert oracle.wrong_rows(given, right * 1.01) == [0, 1, 2, 3, 4]
    assert oracle.wrong_rows(given, one_head) == [2]
    assert oracle.wrong_rows(given, not_a_number) == [4]
    with pytest.raises(bench.WrongResultError, match=r"prompt, 4/2 heads: branchkv .* rows \[0, 1, 2, 3, 4\]"):
        bench.check(given, {"branchkv": lambda: right * 1.01})


def test_a_wrong_result_is_not_timed(bench: Any, oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = oracle.attention
    monkeypatch.setattr(oracle, "attention", lambda *args, **kwargs: (real(*args, **kwargs)[0] * 1.01, None))
    with pytest.raises(bench.WrongResultError):
        bench.measure(tiny(bench, "prompt"), tiny_shape(bench), lambda run: pytest.fail("timed"), 1)


def test_a_measured_line(bench: Any) -> None:
    """Every side takes 3 microseconds: 5 x 28 + 32 tokens of 512 bytes in float32 and K and V, 2 heads of 32."""
    case = replace(tiny(bench, "prompt"), goals={"4/2": 2.5})
    result = bench.measure(case, tiny_shape(bench), lambda run: 3.0, 4)
    assert result.unique_bytes == (32 + 5 * 28) * 512
    cells = [cell.strip() for cell in bench.row_of(replace(result, plan_ms=0.5), copy=100.0).strip("|").split("|")]
    assert cells == ["prompt", "4/2", "0.50", "3", "3", "3", "1.00", "1.00", "2.5: missed", "29", "29%"]
    assert len(cells) == bench.HEADER.splitlines()[0].count("|") - 1
    alone = bench.row_of(replace(result, over_plain=2.5, sdpa=None, over_sdpa=None, note="does not fit"), copy=100.0)
    assert "| does not fit | 3 | 3 |  | 2.50 | 2.5: met |" in alone


def test_sides_take_turns(bench: Any) -> None:
    runs: list[str] = []
    sides = {name: lambda name=name: runs.append(name) for name in "abc"}
    times = bench.in_turns(sides, lambda run: run() or 1.0, 3)
    assert "".join(runs) == "abcabcabc" + "abc" + "bca" + "cab"
    assert times == {name: [1.0] * 3 for name in "abc"}


def test_what_is_left_out_is_said(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(bench.time, "monotonic", lambda: clock[0])

    def row(case: Any, shape: Any) -> str:
        clock[0] += 4
        return str(case.name)

    pairs = [(tiny(bench, name), tiny_shape(bench)) for name in ("prompt", "tree", "ragged")]
    assert list(bench.lines_of(pairs, row, 9)) == [
        "prompt",
        "tree",
        "\nLeft out: ragged with 4/2 heads (no time left).",
    ]
    clock[0] = 0
    monkeypatch.setattr(bench, "free_bytes", lambda device: 100_000 / bench.MEMORY_SHARE)
    assert "tree with 4/2 heads (K/V do not fit)" in list(bench.lines_of(pairs, row, 99))[-1]


def test_the_page_takes_the_table(bench: Any) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    filled = bench.replaced(page, "A TABLE")
    assert bench.replaced(filled, "ANOTHER") == bench.replaced(page, "ANOTHER")
    assert f"{bench.BEGIN}\n\nA TABLE\n\n{bench.END}" in filled
    with pytest.raises(ValueError, match="markers"):
        bench.replaced("no markers", "A TABLE")


def test_without_a_gpu(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    said = capsys.readouterr()
    assert "no CUDA device" in said.err
    assert said.out == ""


def test_a_wrong_result_ends_the_run(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def report(*_: object) -> Iterator[str]:
        yield "a line before"
        raise bench.WrongResultError("that case")

    page = tmp_path / "page.md"
    page.write_text(f"{bench.BEGIN}old{bench.END}", encoding="utf-8")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench, "report", report)
    assert bench.main(["--out", str(page)]) == 1
    assert "that case" in capsys.readouterr().err
    assert "old" in page.read_text(encoding="utf-8")
