"""The real SmolLM2 and the real annalog model: same results as HF, and the memory that forking saves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import branchkv
from branchkv.demo import PROMPT
from branchkv.models.loading import LoadedModel, load
from branchkv.models.real_models import MissingModelError, annalog, smollm2

pytestmark = pytest.mark.slow

SMILES = ["CC(=O)Oc1ccccc1C(=O)O", "CN1C=NC2=C1C(=O)N(C(=O)N2C)C", "CC(C)Cc1ccc(cc1)C(C)C(=O)O", "c1ccccc1O"]


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _folder(convert: Any, name: str, cache: Path) -> LoadedModel:
    try:
        return load(str(convert(cache)), dtype="float32")
    except MissingModelError as error:
        pytest.skip(f"{name}: {error}")


@pytest.fixture(scope="module")
def llm(model_cache: Path) -> LoadedModel:
    return _folder(smollm2, "SmolLM2", model_cache)


@pytest.fixture(scope="module")
def translator(model_cache: Path) -> LoadedModel:
    return _folder(annalog, "annalog", model_cache)


def _assert_equal(loaded: LoadedModel, inputs: dict[str, Any], options: dict[str, Any]) -> Any:
    arguments = {**inputs, **options, "return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(0)
    theirs = loaded.model.generate(**arguments)
    torch.manual_seed(0)
    ours = branchkv.generate(loaded.model, **arguments)
    assert torch.equal(ours.sequences, theirs.sequences)
    if theirs.get("beam_indices") is not None:
        assert torch.equal(ours.beam_indices, theirs.beam_indices)
        torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, atol=1e-4, rtol=1e-4)
    return ours


def _first_tokens(loaded: LoadedModel, count: int) -> dict[str, Any]:
    return {name: tensor[:, :count] for name, tensor in loaded.encode([PROMPT]).items()}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"num_beams": 5, "num_return_sequences": 5}, id="beams"),
        pytest.param({"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0}, id="never"),
        pytest.param({"do_sample": True, "num_return_sequences": 3}, id="samples"),
        pytest.param({"do_sample": True, "num_beams": 4, "num_return_sequences": 4}, id="beam-samples"),
    ],
)
def test_smollm2_equals_hf(llm: LoadedModel, options: dict[str, Any]) -> None:
    _assert_equal(llm, _first_tokens(llm, 100), {**options, "max_new_tokens": 12})


def test_smollm2_left_padded_batch_equals_each_prompt_alone(llm: LoadedModel) -> None:
    texts = ["The capital of France is", "Once upon a time, in a small village by the sea, there lived", "1, 2, 3,"]
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8}
    batch = llm.encode(texts)
    together = branchkv.generate(llm.model, **batch, **options)[:, batch["input_ids"].shape[1] :]
    for place, text in enumerate(texts):
        single = llm.encode([text])
        alone = llm.model.generate(**single, **options)[:, single["input_ids"].shape[1] :]
        assert together[3 * place : 3 * place + 3, : alone.shape[1]].tolist() == alone.tolist()


def test_eight_beams_hold_at_most_018_of_the_unshared_blocks(llm: LoadedModel) -> None:
    options: dict[str, Any] = {"num_beams": 8, "max_new_tokens": 64, "return_dict_in_generate": True}
    kv = branchkv.generate(llm.model, **_first_tokens(llm, 512), **options).kv
    assert kv.peak_blocks_unshared == 8 * 36
    assert kv.peak_blocks / kv.peak_blocks_unshared <= 0.18
    assert kv.prefill_tokens == 512
    assert kv.bytes_per_block == 16 * 30 * 2 * 3 * 64 * 4
    assert kv.peak_bytes == kv.peak_blocks * kv.bytes_per_block


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_beams": 1}, id="greedy"),
        pytest.param({"num_beams": 8, "num_return_sequences": 8}, id="beams"),
        pytest.param({"num_beams": 4, "early_stopping": True, "length_penalty": 0.0}, id="early"),
        pytest.param({"do_sample": True, "num_return_sequences": 6}, id="samples"),
    ],
)
def test_annalog_equals_hf(translator: LoadedModel, options: dict[str, Any]) -> None:
    ours = _assert_equal(translator, translator.encode(SMILES), {**options, "max_new_tokens": 40})
    assert ours.kv.cross_bytes > 0
