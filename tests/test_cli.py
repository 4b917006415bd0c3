"""The command line: where a prompt comes from, what is printed where, exit codes, the event log."""

from __future__ import annotations

import io
import json
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from typer.testing import CliRunner

import branchkv
from branchkv.cli import app, main
from support.families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread", "offline")

SHORT = ["--max-new-tokens", "6"]
BEAMS = [*SHORT, "--num-beams", "3", "--n", "2"]


def character_tokenizer() -> hf.PreTrainedTokenizerFast:
    words = ["<unk>", "<pad>", "<s>", "</s>", "<e4>", "<e5>", *string.ascii_lowercase, *" .,!?-:;"]
    tokenizer = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    special: dict[str, Any] = {"pad_token": "<pad>", "eos_token": "</s>", "additional_special_tokens": ["<e4>", "<e5>"]}
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", "bart"):
        FAMILIES[name].build().save_pretrained(root / name)
        character_tokenizer().save_pretrained(root / name)
    yield root


def expected(family: str, text: str, **options: Any) -> list[str]:
    """Texts by HF's own generate."""
    tokenizer, model = character_tokenizer(), FAMILIES[family].build()
    ids = tokenizer(text, return_tensors="pt").input_ids
    rows = model.generate(ids, max_new_tokens=6, **options)  # type: ignore[operator]
    start = ids.shape[1] if family == "llama" else 1
    return [str(tokenizer.decode(row[start:], skip_special_tokens=True)) for row in rows]


def run(folder: Path, *arguments: str, text: str = "", family: str = "llama") -> Any:
    return CliRunner().invoke(app, ["generate", "--model", str(folder / family), *arguments], input=text)


def as_json(result: Any) -> dict[str, Any]:
    """The one object on standard output, in JSON as the standard has it: without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"not JSON: {constant}")

    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout, parse_constant=refuse)
    return parsed


def test_the_prompt_is_the_argument_the_file_or_standard_input(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello you", encoding="utf-8")
    wanted = expected("llama", "hello you")[0].strip()
    for result in (
        run(folder, "hello you", *SHORT),
        run(folder, "--file", str(file), *SHORT),
        run(folder, *SHORT, text="hello you"),
    ):
        assert (result.exit_code, result.stdout.strip()) == (0, wanted)
        assert "K/V:" in result.stderr


def test_outputs_are_numbered_with_their_scores(folder: Path) -> None:
    result = run(folder, "hello", *BEAMS)
    lines = result.stdout.splitlines()
    assert [line.split("  score ")[0] for line in lines if line.startswith("---")] == ["--- 1", "--- 2"]
    assert [line.strip() for line in lines if not line.startswith("---")] == [
        text.strip() for text in expected("llama", "hello", num_beams=3, num_return_sequences=2)
    ]


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_json_has_the_outputs_and_the_statistics(folder: Path, family: str) -> None:
    parsed = as_json(run(folder, "hello you", *BEAMS, "--json", "--block-size", "4", family=family))
    assert set(parsed) == {"prompt_tokens", "outputs", "kv"}
    assert parsed["prompt_tokens"] == 9
    assert [set(output) for output in parsed["outputs"]] == [{"text", "score"}] * 2
    texts = expected(family, "hello you", num_beams=3, num_return_sequences=2)
    assert [output["text"] for output in parsed["outputs"]] == texts
    scores = [output["score"] for output in parsed["outputs"]]
    assert scores == sorted(scores, reverse=True)
    assert parsed["kv"]["block_size"] == 4
    assert set(parsed["kv"]) == set(branchkv.KVStats(block_size=4).to_dict())


def test_json_without_beams_has_no_scores(folder: Path) -> None:
    parsed = as_json(run(folder, "hello", *SHORT, "--json"))
    assert parsed["outputs"] == [{"text": expected("llama", "hello")[0], "score": None}]


@pytest.mark.filterwarnings("ignore:20 of 60 hypotheses")
def test_json_is_json_also_where_a_row_cannot_be_reached(folder: Path) -> None:
    arguments = ["--num-beams", "60", "--n", "60", "--max-new-tokens", "1"]
    assert len(as_json(run(folder, "hello", *arguments, "--json"))["outputs"]) == 60


def test_a_seed_repeats_the_samples(folder: Path) -> None:
    sample = ["hello", "--sample", "--n", "4", "--json", "--temperature", "1.5", *SHORT]
    first, again, other = (
        [output["text"] for output in as_json(run(folder, *sample, "--seed", seed))["outputs"]] for seed in "335"
    )
    assert first == again != other
    assert len(set(first)) > 1


def test_options_reach_the_search(folder: Path) -> None:
    search = ["--length-penalty", "-1.5", "--early-stopping", "never", "--num-beams", "4", *SHORT, "--json"]
    parsed = as_json(run(folder, "hello", *search))
    wanted = expected("llama", "hello", length_penalty=-1.5, early_stopping="never", num_beams=4)
    assert [output["text"] for output in parsed["outputs"]] == wanted


def test_the_trace_file_has_one_event_a_line(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "events.jsonl"
    parsed = as_json(run(folder, "hello you", *BEAMS, "--json", "--block-size", "2", "--trace", str(trace)))
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(event["event"] == "copy" for event in events) == parsed["kv"]["blocks_copied"] > 0
    freed = [(event["kind"], event["block"]) for event in events if event["event"] == "free"]
    taken = [(event["kind"], event["block"]) for event in events if event["event"] in ("allocate", "copy")]
    assert sorted(freed) == sorted(taken)


WRONG: dict[str, list[str]] = {
    "no model": ["generate", "hello"],
    "unknown option": ["generate", "hello", "--model", "x", "--beams", "3"],
    "unknown command": ["translate"],
    "not a number": ["generate", "hello", "--model", "x", "--num-beams", "many"],
    "out of range": ["generate", "hello", "--model", "x", "--num-beams", "0"],
    "prompt twice": ["generate", "hello", "--model", "x", "--file", "x"],
    "no such file": ["generate", "--model", "x", "--file", "/nowhere/prompt.txt"],
    "empty prompt": ["generate", " ", "--model", "x"],
    "empty input": ["generate", "--model", "x"],
    "early stopping": ["generate", "hello", "--model", "x", "--early-stopping", "soon"],
}


@pytest.mark.parametrize(
    "arguments",
    [
        *(pytest.param(arguments, id=name) for name, arguments in WRONG.items()),
        pytest.param(["generate", "hello", "--model", "x", "--memory", "much"], id="memory"),
        pytest.param(["generate", "hello", "--model", "x", "--attention", "best"], id="attention"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments, input="")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_file_that_is_no_text_is_a_wrong_argument(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.bin").write_bytes(b"\xff\xfe\xff")
    result = run(folder, "--file", str(tmp_path / "prompt.bin"))
    assert result.exit_code == 2
    assert "--file" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n", "3"], "num_return_sequences"),
        (["--num-blocks", "1", "--num-beams", "3"], "out of KV blocks: needed"),
        (["--sample", "--temperature", "0"], "temperature"),
        (["--chat"], "chat template"),
        (["--dtype", "float31"], "float31"),
        (["--model", "/nowhere/model"], "/nowhere/model"),
        (["--trace", "/nowhere/events"], "/nowhere/events"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_failures_exit_with_1_and_one_line(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["branchkv", "generate", "hello", "--model", str(folder / "llama"), *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (1, "")
    assert message in err
    assert [line.startswith("error: ") for line in err.splitlines()] == [True]


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["branchkv", "generate", "hello", "--model", "x"])
    monkeypatch.setattr("branchkv.cli._load", interrupted)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_as_a_process(folder: Path) -> None:
    command = [sys.executable, "-m", "branchkv", "generate", "--model", str(folder / "llama"), *BEAMS, "--json"]
    done = subprocess.run(command, input="hello", capture_output=True, text=True, timeout=120, check=True)
    wanted = expected("llama", "hello", num_beams=3, num_return_sequences=2)
    assert [output["text"] for output in json.loads(done.stdout)["outputs"]] == wanted
    assert done.stderr == ""


def test_kernels_for_a_target_that_nobody_knows() -> None:
    result = CliRunner().invoke(app, ["kernels", "--target", "cuda:70"])
    assert result.exit_code == 2
    assert "cuda:80, cuda:90, cuda:100 or hip:gfx942" in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("as_json", [True, False])
def test_kernels_prints_every_configuration(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled, tests/kernels/test_aot.py looks at; here nothing is."""
    from branchkv.kernels import aot

    kernel = aot.CompiledKernel("copy", "cuda:90", "bf16", 64, 16, 40, 0, 1024, False)
    monkeypatch.setattr(aot, "compile_all", lambda *args, **kwargs: [kernel])
    result = CliRunner().invoke(app, ["kernels", *(["--json"] if as_json else [])])
    assert result.exit_code == 0, result.output
    if as_json:
        assert json.loads(result.stdout) == [kernel.to_dict()]
    else:
        assert {"copy", "cuda:90", "bf16", "64", "16", "40", "0", "1024", "no"} <= set(result.stdout.split())
