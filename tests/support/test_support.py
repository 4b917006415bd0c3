"""The support is what every claim of equality rests on: it must not be vacuous, and the oracles must agree."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch

from support.families import EOS, FAMILIES, MAX_NEW_TOKENS, PAD, PROMPT_LENGTHS, WINDOW, Family, alone
from support.grid import EARLY_STOPPING, LENGTH_PENALTIES, EarlyStopping, settings
from support.oracle import (
    TIE,
    Hypothesis,
    Result,
    assert_same,
    exhaustive,
    expected,
    hf_alone,
    hf_result,
    log_probs,
    oracle_model,
    rescore,
    rescorer,
    tiny_exhaustive_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = len(PROMPT_LENGTHS)
BEAMS = ("beam2", "beam5", "beam8")
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


@cache
def hf_beams(name: str) -> dict[tuple[str, EarlyStopping, float], Result]:
    """HF's own results on the batch of prompts under every setting of the beam modes."""
    model, inputs = FAMILIES[name].build(), FAMILIES[name].prompts(BATCH)
    cells = itertools.product(BEAMS, EARLY_STOPPING, LENGTH_PENALTIES)
    return {cell: hf_result(model, inputs, settings(name, *cell)) for cell in cells}


# The families


@each_family
def test_at_least_a_quarter_of_the_rows_end_early_and_not_all_at_once(family: Family) -> None:
    rows = [row for result in hf_beams(family.name).values() for row in result.rows]
    lengths = [len(row.tokens) for row in rows]
    early = sum(length < MAX_NEW_TOKENS for length in lengths) / len(lengths)
    assert 0.25 <= early <= 0.9
    assert len(set(lengths)) >= 8


@each_family
def test_early_stopping_changes_what_hf_returns(family: Family) -> None:
    results = hf_beams(family.name)
    for one, other in itertools.combinations(EARLY_STOPPING, 2):
        pairs = [(results[m, one, lp], results[m, other, lp]) for m in BEAMS for lp in LENGTH_PENALTIES]
        assert any(best(a) != best(b) for a, b in pairs), (one, other)


@each_family
def test_length_penalty_changes_what_hf_returns(family: Family) -> None:
    results = hf_beams(family.name)
    for one, other in itertools.combinations(LENGTH_PENALTIES, 2):
        pairs = [(results[m, es, one], results[m, es, other]) for m in BEAMS for es in EARLY_STOPPING]
        assert any(best(a) != best(b) for a, b in pairs), (one, other)


def best(result: Result) -> list[tuple[int, ...]]:
    return [prompt[0].tokens for prompt in result.prompts]


@each_family
def test_neighbours_in_a_ranking_are_no_ties(family: Family) -> None:
    for result in hf_beams(family.name).values():
        for prompt in result.prompts:
            assert all(a.score - b.score > TIE for a, b in itertools.pairwise(prompt))


@each_family
def test_greedy_and_sampled_rows_end_early_too(family: Family) -> None:
    model, inputs = family.build(), family.prompts(BATCH)
    assert hf_result(model, inputs, settings(family.name, "greedy")).early > 0
    samples = hf_result(model, inputs, settings(family.name, "sample3"))
    assert samples.early >= 0.25
    assert len({row.tokens for row in samples.rows}) > BATCH, "the samples of a prompt are all the same"


@each_family
def test_the_next_token_depends_on_every_token_a_window_reaches_back(family: Family) -> None:
    text = torch.arange(10, 10 + WINDOW)[None]
    for back in range(1, WINDOW):
        other = text.clone()
        other[0, -1 - back] += 13
        # The last place is what follows; the appended token itself is not looked at.
        before, after = (
            log_probs(family.model, family.prompts(1), torch.cat([t, t[:, :1] * 0], dim=1))[0, -1]
            for t in (text, other)
        )
        assert (before - after).abs().max() > 0.05, f"{back} tokens back is not seen"


@each_family
def test_prompts_have_the_promised_shape(family: Family) -> None:
    inputs = family.prompts(BATCH)
    assert {len(value) for value in inputs.values()} == {BATCH}
    for index in range(BATCH):
        prompt = alone(inputs, index)
        same = alone(family.prompts(index + 1), index)
        assert all(torch.equal(prompt[name], same[name]) for name in prompt)
        if family.kind != "speech":
            assert prompt["input_ids"].shape == (1, PROMPT_LENGTHS[index])
            assert not torch.isin(prompt["input_ids"], torch.tensor([PAD, *EOS])).any()
    if family.kind != "speech":
        side = -1 if family.kind == "decoder" else 0
        assert inputs["attention_mask"][:, side].all(), "padding is on the wrong side"


def test_models_are_small_float32_and_leave_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    for family in FAMILIES.values():
        model = family.build()
        assert not model.training
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert sum(p.numel() for p in model.parameters()) < 30_000
        assert model.generation_config.eos_token_id == list(EOS) and model.generation_config.pad_token_id == PAD
    assert torch.equal(state, torch.random.get_rng_state())


@each_family
def test_a_build_depends_on_its_seed_only(family: Family) -> None:
    first = family.build().state_dict()
    torch.rand(7)
    again, other = family.build().state_dict(), family.build(family.seed + 1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


# The oracles


@each_family
@pytest.mark.parametrize("mode", ["greedy", "beam5"])
def test_hf_batched_equals_hf_alone(family: Family, mode: str) -> None:
    model, inputs, chosen = family.build(), family.prompts(BATCH), settings(family.name, mode)
    batched, single = hf_result(model, inputs, chosen), hf_alone(model, inputs, chosen)
    assert assert_same(batched, single) == 0
    assert assert_same(expected(family, chosen, BATCH), single) == 0


@each_family
@pytest.mark.parametrize("mode", ["greedy", "beam5"])
@pytest.mark.parametrize("length_penalty", [-1.0, 2.0])
def test_rescoring_agrees_with_the_scores_of_hf(family: Family, mode: str, length_penalty: float) -> None:
    inputs, model = family.prompts(BATCH), oracle_model(family)
    chosen = settings(family.name, mode, False, length_penalty if mode != "greedy" else None)
    result = expected(family, chosen, BATCH)
    for index, prompt in enumerate(result.prompts):
        for row in prompt[:2]:
            logprobs = rescore(model, alone(inputs, index), row.tokens)
            assert row.logprobs == pytest.approx(logprobs, abs=5e-5)
            divisor = 1 if row.beams is None else len(row.tokens) ** length_penalty
            assert row.score == pytest.approx(sum(logprobs) / divisor, abs=1e-4)


def test_sampling_is_compared_with_the_batch_and_is_repeatable() -> None:
    family, chosen = FAMILIES["llama"], settings("llama", "sample3")
    again = hf_result(family.build(), family.prompts(BATCH), chosen)
    assert assert_same(again, expected(family, chosen, BATCH)) == 0


def test_the_oracle_has_a_model_of_its_own() -> None:
    family = FAMILIES["llama"]
    assert oracle_model(family) is not family.model
    pairs = zip(oracle_model(family).parameters(), family.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("length_penalty", LENGTH_PENALTIES)
def test_the_exhaustive_list_is_what_400_beams_find(length_penalty: float) -> None:
    model, prompt = tiny_exhaustive_model(), {"input_ids": torch.tensor([[3, 0, 4]])}
    every = exhaustive(model, prompt, eos=[2], vocab=5, length=4, length_penalty=length_penalty)
    assert len({row.tokens for row in every}) == len(every) == 341
    assert torch.tensor([sum(row.logprobs) for row in every]).exp().sum() == pytest.approx(1, abs=1e-5)
    beams = {"num_beams": 400, "num_return_sequences": 400, "early_stopping": "never"}
    found = hf_result(model, prompt, beams | {"length_penalty": length_penalty, "max_new_tokens": 4}).rows[:341]
    assert [row.tokens for row in found] == [row.tokens for row in every]
    assert [row.score for row in found] == pytest.approx([row.score for row in every], abs=1e-5)


# The comparison

ROW = Hypothesis(tokens=(7, 8, 3), score=-2.0, logprobs=(-1.0, -2.0, -3.0), beams=(0, 1, 0))


def one(row: Hypothesis) -> Result:
    return Result(((row,),))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokens": (7, 9, 3)}, "tokens differ"),
        ({"tokens": (7, 8), "logprobs": (-1.0, -2.0)}, "tokens differ"),
        ({"beams": (0, 0, 0)}, "beam_indices differ"),
        ({"beams": None}, "beam_indices differ"),
        ({"score": -2.0003}, "scores differ"),
        ({"score": float("nan")}, "scores differ"),
        ({"logprobs": (-1.0, -2.0, -3.0004)}, "scores differ"),
    ],
)
def test_a_difference_fails(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        assert_same(one(replace(ROW, **change)), one(ROW))  # type: ignore[arg-type]


def test_rounding_passes_and_a_missing_row_does_not() -> None:
    assert assert_same(one(replace(ROW, score=-2.0001)), one(ROW)) == 0
    with pytest.raises(AssertionError, match="hypotheses per prompt"):
        assert_same(Result(((ROW, ROW),)), one(ROW))


@pytest.mark.parametrize("beams", [ROW.beams, None])
@pytest.mark.parametrize(("gap", "forgiven"), [(0.5e-5, True), (1e-3, False)])
def test_only_a_tie_is_forgiven(beams: tuple[int, ...] | None, gap: float, forgiven: bool) -> None:
    theirs, ours = replace(ROW, beams=beams), replace(ROW, beams=beams, tokens=(7, 9, 3))

    def score(prompt: int, tokens: tuple[int, ...]) -> list[float]:
        return [-1.0 - gap * (token == 9) for token in tokens]

    if forgiven:
        with pytest.raises(AssertionError, match="tokens differ"):
            assert_same(one(ours), one(theirs))
        assert assert_same(one(ours), one(theirs), rescorer=score) == 1  # type: ignore[arg-type]
    else:
        with pytest.raises(AssertionError, match="tokens differ"):
            assert_same(one(ours), one(theirs), rescorer=score)  # type: ignore[arg-type]


def test_another_result_of_a_real_model_is_not_forgiven() -> None:
    family, chosen = FAMILIES["gpt2"], settings("gpt2", "beam5", "never", 2.0)
    inputs, model = family.prompts(BATCH), oracle_model(family)
    other = expected(family, settings("gpt2", "beam5", True, 2.0), BATCH)
    with pytest.raises(AssertionError, match="tokens differ"):
        assert_same(other, expected(family, chosen, BATCH), rescorer=rescorer(model, inputs), length_penalty=2.0)
