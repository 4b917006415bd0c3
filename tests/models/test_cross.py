"""Cross-attention K/V: once per prompt, whatever the number of beams, and given back when a prompt ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import branchkv
from branchkv.kernels.dense import dense_attention
from branchkv.kernels.options import AttentionOptions
from branchkv.models.cross import CrossStore
from support.families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", ["bart", "t5", "marian", "whisper"])
def test_cross_bytes_do_not_depend_on_the_number_of_beams(family: str) -> None:
    model = FAMILIES[family].model
    inputs: dict[str, Any] = FAMILIES[family].prompts(4)
    held = []
    for beams in (1, 8):
        stats: list[branchkv.KVStats] = []
        branchkv.generate(model, **inputs, num_beams=beams, max_new_tokens=6, on_stats=stats.append)
        held.append(stats[0].cross_bytes)
    assert held[0] == held[1] > 0


def test_cross_bytes_of_bart_by_hand() -> None:
    family = FAMILIES["bart"]
    inputs: dict[str, Any] = family.prompts(4)
    output = branchkv.generate(family.model, **inputs, num_beams=3, max_new_tokens=4, return_dict_in_generate=True)
    prompts, source = inputs["input_ids"].shape
    layers, width, parts, float32 = 2, 16, 2, 4
    assert output.kv.cross_bytes == prompts * source * layers * width * parts * float32


def test_finished_prompts_give_their_cross_kv_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, int]] = []
    keep = CrossStore.keep

    def watched(self: CrossStore, prompts: Any) -> None:
        keep(self, prompts)
        held.append((len(prompts), self.bytes))

    monkeypatch.setattr(CrossStore, "keep", watched)
    family = FAMILIES["bart"]
    inputs: dict[str, Any] = family.prompts(5)
    output = branchkv.generate(family.model, **inputs, num_beams=4, max_new_tokens=12, return_dict_in_generate=True)
    each = output.kv.cross_bytes // 5
    assert len({count for count, _ in held}) > 1, "all prompts ended in the same step: nothing is shown"
    assert all(size == count * each for count, size in held)
    assert held[-1] == (0, 0)


def test_attention_reads_each_prompt_once_for_rows_of_uneven_number() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, 2, 7, 5, generator=generator) for _ in range(2))
    store = CrossStore()
    store.write(0, keys, values)
    rows = np.array([0, 0, 0, 2])  # prompt 1 has no row, prompt 2 fewer than prompt 0
    store.set_rows(rows)
    query = torch.randn(4, 4, 1, 5, generator=generator)
    mask = torch.ones(4, 1, 1, 7, dtype=torch.bool)
    mask[3, :, :, 4:] = False
    options = AttentionOptions(scale=0.4)
    out = store.attend(0, query, mask, options)
    index = torch.from_numpy(rows)
    expected = dense_attention(query, keys[index], values[index], options, mask).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    handle = store.handle(0, 0)
    assert handle is not None and handle.shape == (4, 2, 7, 5)
    assert torch.equal(handle + 0, keys[index])
