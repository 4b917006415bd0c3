"""Processors and criteria in a batch of several lengths: each row gets what HF gives for its prompt alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import branchkv
from support.families import FAMILIES, PAD, Family, alone
from support.oracle import Result, assert_same, hf_alone, hf_result, oracle_model, run

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Unfeasible length constraints"),  # some prompts alone cannot be that long
]

generate: Any = branchkv.generate
PROMPTS = 4  # of 9, 3, 1 and 14 tokens
SEARCHES: dict[str, dict[str, Any]] = {"greedy": {}, "beams": {"num_beams": 3, "num_return_sequences": 3}}
DRAWS: dict[str, dict[str, Any]] = {
    "sample": {"do_sample": True, "num_return_sequences": 3},
    "beam sample": {"num_beams": 3, "do_sample": True, "num_return_sequences": 3},
}


def ours(family: Family, settings: dict[str, Any], n: int = PROMPTS) -> Any:
    settings = {"max_new_tokens": 12} | settings
    return run(partial(generate, family.model), family.model, family.prompts(n), settings)


def alone_by_hf(family: Family, settings: dict[str, Any]) -> Result:
    return hf_alone(oracle_model(family), family.prompts(PROMPTS), {"max_new_tokens": 12} | settings)


@cache
def without_options(family: str, search: str) -> Result:
    return alone_by_hf(FAMILIES[family], SEARCHES[search])


def allowed(prompt: int, ids: Tensor) -> list[int]:
    """Depends on the length, the first and the last token of what it is shown."""
    first, last = ids[0].item(), ids[-1].item()
    return [4, *((int(first + last) * k + len(ids)) % 34 + 6 for k in (1, 3, 5, 7))]


HISTORY: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 3.0},
    "no_repeat_ngram_size_1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size_2": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[30], [10, 8], [38, 38], [PAD, 10], [PAD, PAD, 25]]},
    "sequence_bias": {"sequence_bias": [[[8, 18], 4.0], [[38, 38], -4.0], [[PAD, 10], 9.0], [[PAD, PAD, 25], 9.0]]},
    "min_length": {"min_length": 16},
    "min_new_tokens": {"min_new_tokens": 6},
    "forced_bos_token_id": {"forced_bos_token_id": 20},
    "forced_eos_token_id": {"forced_eos_token_id": 4, "max_new_tokens": 5},
    "begin_suppress_tokens": {"begin_suppress_tokens": [30, 10, 5, 25, 38, 11]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 2.0)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "watermark": {"watermarking_config": hf.WatermarkingConfig(bias=3.0)},
    "watermark_of_a_context": {
        "watermarking_config": hf.WatermarkingConfig(bias=3.0, context_width=4, seeding_scheme="selfhash")
    },
    "synthid": {"watermarking_config": hf.SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)},
    "prefix_function": {"prefix_allowed_tokens_fn": allowed},
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", HISTORY)
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_history_is_that_of_the_prompt_alone(family: str, name: str, search: str) -> None:
    settings = HISTORY[name] | SEARCHES[search]
    theirs = alone_by_hf(FAMILIES[family], settings)
    assert theirs != without_options(family, search), "the option changes nothing here: the test is vacuous"
    assert assert_same(ours(FAMILIES[family], settings), theirs) == 0


@pytest.mark.xfail(
    strict=True, reason="begin_index is shifted by the padding alone; HF adds 1 behind a forced first token"
)
def test_begin_suppress_tokens_behind_a_forced_token_of_a_one_token_prompt() -> None:
    settings = {"forced_bos_token_id": 20, "begin_suppress_tokens": [30, 10, 25, 33]}
    assert assert_same(ours(FAMILIES["llama"], settings), alone_by_hf(FAMILIES["llama"], settings)) == 0


def shifted_right(batch: dict[str, Tensor]) -> None:
    order = batch["attention_mask"].argsort(dim=1, descending=True, stable=True)
    for name in batch:
        batch[name] = batch[name].gather(1, order)


def with_holes(batch: dict[str, Tensor]) -> None:
    batch["attention_mask"][0, -4] = batch["attention_mask"][3, -2] = 0


def with_pads_as_words(batch: dict[str, Tensor]) -> None:
    batch["input_ids"][0, -3:-1] = batch["input_ids"][3, -6:-3] = PAD


LAYOUTS = {"right": shifted_right, "holes": with_holes, "pads as words": with_pads_as_words}
PAD_WORDS = "n-grams with the pad's id are taken out of encoder_no_repeat_ngram_size, also where the mask says word"
FAULTS = {
    ("holes", "encoder_no_repeat_ngram_size"): PAD_WORDS,
    ("pads as words", "encoder_no_repeat_ngram_size"): PAD_WORDS,
}


def masked_cells() -> list[Any]:
    names = (
        "repetition_penalty",
        "no_repeat_ngram_size_2",
        "encoder_repetition_penalty",
        "encoder_no_repeat_ngram_size",
    )
    faults = {cell: pytest.mark.xfail(strict=True, reason=reason) for cell, reason in FAULTS.items()}
    cells = itertools.product(LAYOUTS, names)
    return [pytest.param(*cell, marks=[faults[cell]] if cell in faults else [], id="-".join(cell)) for cell in cells]


@pytest.mark.parametrize(("layout", "name"), masked_cells())
def test_the_mask_alone_says_what_a_prompt_is(layout: str, name: str) -> None:
    family, batch = FAMILIES["llama"], FAMILIES["llama"].prompts(PROMPTS)
    LAYOUTS[layout](batch)
    settings = {"max_new_tokens": 12, **HISTORY[name]}
    theirs = hf_alone(oracle_model(family), batch, settings)
    assert assert_same(run(partial(generate, family.model), family.model, batch, settings), theirs) == 0


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", ["repetition_penalty", "min_new_tokens", "encoder_no_repeat_ngram_size"])
def test_history_through_the_hook_is_that_of_the_prompt_alone(name: str, search: str) -> None:
    family = FAMILIES["llama"]
    settings = {"max_new_tokens": 12, **HISTORY[name], **SEARCHES[search]}
    model: Any = family.model
    got = run(partial(model.generate, custom_generate=branchkv.decode), model, family.prompts(PROMPTS), settings)
    assert assert_same(got, alone_by_hf(family, settings)) == 0


def assert_rows_as_alone(family: Family, batch: dict[str, Tensor], settings: dict[str, Any], fill: int) -> None:
    """For what `assert_same` cannot read: rows that end elsewhere than at an EOS, other pad ids."""

    def start(inputs: dict[str, Tensor]) -> int:
        return inputs["input_ids"].shape[1] if family.kind == "decoder" else 1

    model: Any = oracle_model(family)
    rows = iter(generate(family.model, **batch, **settings)[:, start(batch) :].tolist())
    for one in (alone(batch, prompt) for prompt in range(PROMPTS)):
        for expected in model.generate(**one, **settings)[:, start(one) :].tolist():
            found = next(rows)
            assert found == expected + [fill] * (len(found) - len(expected))


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", ["llama", "bart"])
@pytest.mark.parametrize("liked", [10, 30, 38])
def test_the_pad_that_the_model_likes_most_is_no_history(family: str, search: str, liked: int) -> None:
    settings = {"no_repeat_ngram_size": 1, "pad_token_id": liked, "max_new_tokens": 5, **SEARCHES[search]}
    batch = FAMILIES[family].prompts(PROMPTS)
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, liked)
    assert_rows_as_alone(FAMILIES[family], batch, settings, liked)


@pytest.mark.parametrize("search", SEARCHES)
def test_max_length_counts_each_prompt_alone(search: str) -> None:
    family = FAMILIES["llama"]
    settings = {**SEARCHES[search], "max_length": 16, "forced_eos_token_id": 4}
    assert_rows_as_alone(family, family.prompts(PROMPTS), settings, PAD)


def test_pad_id_0_fills_beams_with_0() -> None:
    """HF fills with the EOS there."""
    family = FAMILIES["llama"]
    settings = {**SEARCHES["beams"], "max_new_tokens": 12, "return_dict_in_generate": True}
    ones, zeros = (generate(family.model, **family.prompts(PROMPTS), **settings, pad_token_id=pad) for pad in (1, 0))
    ended = ones.beam_indices < 0
    assert ended.any()
    new = slice(-ended.shape[1], None)
    assert zeros.sequences[:, new].tolist() == ones.sequences[:, new].masked_fill(ended, 0).tolist()


NEGATIVE = torch.tensor([[PAD, PAD, PAD, 11, 20, 30, 31, 9, 14, 22]])
HIDDEN = {"negative_prompt_ids": NEGATIVE, "negative_prompt_attention_mask": (NEGATIVE != PAD).long()}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"do_sample": True, "num_return_sequences": 3}),
        ("bart", {"do_sample": True, "num_return_sequences": 3}),
        ("llama", HIDDEN),
        ("gemma2", {"negative_prompt_ids": NEGATIVE}),
        ("gpt_oss", {"negative_prompt_ids": NEGATIVE}),
        ("mistral", {"negative_prompt_ids": NEGATIVE}),
    ],
)
def test_guidance_computes_its_own_prompt_as_hf_does(family: str, settings: dict[str, Any]) -> None:
    settings = {"max_new_tokens": 12, "guidance_scale": 1.8, **settings}
    theirs = hf_result(oracle_model(FAMILIES[family]), FAMILIES[family].prompts(1), settings)
    assert assert_same(ours(FAMILIES[family], settings, 1), theirs) == 0


class Stateless(hf.LogitsProcessor):
    """Looks at the newest token only."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert (input_ids >= 0).all()
        return scores - 3.0 * torch.nn.functional.one_hot(input_ids[:, -1] % 7 + 6, scores.shape[1])


class RowCounting(hf.LogitsProcessor):
    """Treats each row of the batch differently, so it needs HF's rows, all of them in every step."""

    def __init__(self) -> None:
        self.rows: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.rows = self.rows or len(scores)
        assert len(input_ids) == len(scores) == self.rows
        return scores + torch.arange(self.rows)[:, None] * torch.linspace(0, 0.5, scores.shape[1])


class Stateful(hf.LogitsProcessor):
    """Favours another token at each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + 2.0 * torch.nn.functional.one_hot(torch.tensor(6 + self.calls), scores.shape[1])


class StopAtToken(hf.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert (input_ids >= 0).all()
        return input_ids[:, -1] % 5 == 1


class StopAll(hf.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        return input_ids.shape[1] >= 20


class StopByRow(hf.StoppingCriteria):
    """Counts the rows it is shown."""

    def __init__(self) -> None:
        self.rows: int | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.rows = self.rows or len(input_ids)
        assert len(input_ids) == self.rows
        return (torch.arange(self.rows) + input_ids.shape[1]) % 9 == 0


class StopByScores(hf.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), len(scores) >= 5)


OWN: dict[str, tuple[Callable[..., Any], tuple[Callable[[], Any], ...]]] = {
    "logits_processor": (hf.LogitsProcessorList, (Stateless, RowCounting, Stateful)),
    "stopping_criteria": (hf.StoppingCriteriaList, (StopAtToken, StopAll, StopByRow, StopByScores)),
}


@pytest.mark.parametrize("mode", SEARCHES | DRAWS)
@pytest.mark.parametrize(("argument", "kind"), [(argument, kind) for argument, own in OWN.items() for kind in own[1]])
def test_the_users_own_see_the_rows_that_hf_shows(argument: str, kind: Any, mode: str) -> None:
    family = FAMILIES["llama"]
    model: Any = oracle_model(family)
    results = []
    for decode in (partial(generate, family.model), model.generate):
        torch.manual_seed(5)
        own = {argument: OWN[argument][0]([kind()])}
        options = {"max_new_tokens": 12, "output_scores": True, "return_dict_in_generate": True}
        results.append(decode(**family.prompts(5), **(SEARCHES | DRAWS)[mode], **own, **options))
    assert results[0].sequences.tolist() == results[1].sequences.tolist()
    if "beam_indices" in results[1]:
        torch.testing.assert_close(results[0].sequences_scores, results[1].sequences_scores, atol=1e-4, rtol=1e-4)
