"""Greedy decoding and samples, through the loop and a model that reads its history back from the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from branchkv.decoding.draws import GlobalDraws, StreamDraws
from branchkv.decoding.history import History
from branchkv.decoding.record import Recorder
from branchkv.tests.decoding.fake_model import Run, Tokens, decode, make_cache, random_language
from branchkv.tests.decoding.searches import (
    EOS,
    LANGUAGE,
    LIMITS,
    PROMPTS,
    VOCABULARY,
    assert_same,
    generated,
    sample_searcher,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 7


def greedy(prompt: Tokens, limit: int, eos: Sequence[int] = EOS) -> Tokens:
    """The likeliest token again and again, over whole texts."""
    text: Tokens = ()
    while len(text) < limit and (not text or text[-1] not in eos):
        text += (int(LANGUAGE(prompt + text).argmax()),)
    return text


def sample(prompt: Tokens, limit: int, stream: Iterator[float]) -> Tokens:
    """One sample by inverse CDF over whole texts, in float64 and a Python loop."""
    text: Tokens = ()
    while len(text) < limit and (not text or text[-1] not in EOS):
        weights = np.exp(LANGUAGE(prompt + text).double().numpy())
        point, token = next(stream) * weights.sum(), 0
        while (point := point - weights[token]) >= 0:
            token += 1
        text += (token,)
    return text


def stream(seed: int, prompt: int, number: int) -> Iterator[float]:
    """The uniforms of one sample; the recipe is part of the promise that a seed gives the same text again."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(prompt, number))))
    while True:
        yield generator.random()


def drawn(n: int, part: Sequence[int] = range(len(PROMPTS)), seed: int = SEED, block_size: int = 3) -> Run:
    prompts, limits = [PROMPTS[i] for i in part], [LIMITS[i] for i in part]
    search = sample_searcher(prompts, limits, n=n, sampler=StreamDraws(seed, part, n))
    return decode(LANGUAGE, prompts, search, make_cache(block_size))


def test_greedy_takes_the_likeliest_token() -> None:
    run = decode(LANGUAGE, PROMPTS, sample_searcher())
    assert [generated(result) for result in run.results] == [
        [greedy(prompt, limit)] for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
    ]
    assert len({len(generated(result)[0]) for result in run.results}) > 2


def test_samples_follow_their_streams() -> None:
    """Every sample is what it would be alone, and ends alone."""
    want = [
        [sample(prompt, limit, stream(SEED, i, number)) for number in range(4)]
        for i, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]
    assert [generated(result) for result in drawn(4).results] == want
    assert len({len(text) for texts in want for text in texts}) > 3
    assert len({text for texts in want for text in texts}) >= 10


def test_a_sample_does_not_change_when_n_grows() -> None:
    few, many = drawn(2), drawn(7)
    for small, large in zip(few.results, many.results, strict=True):
        assert generated(small) == generated(large)[:2]


@pytest.mark.parametrize("parts", [[[3, 2, 1, 0]], [[1], [3, 0], [2]], [[0], [1], [2], [3]]])
def test_order_and_split_of_the_batch_change_nothing(parts: list[list[int]]) -> None:
    together = drawn(3).results
    for part in parts:
        assert_same(drawn(3, part).results, [together[number] for number in part])


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_the_block_size_changes_nothing(block_size: int) -> None:
    assert_same(drawn(3, block_size=block_size).results, drawn(3).results)


def test_a_seed_gives_the_same_again_and_another_seed_something_else() -> None:
    assert_same(drawn(3).results, drawn(3).results)
    assert [generated(r) for r in drawn(3, seed=SEED + 1).results] != [generated(r) for r in drawn(3).results]


def test_global_draws_are_those_of_a_batch_that_never_shrinks() -> None:
    """As HF draws: every row takes part in every step's multinomial, and rows that have ended ignore theirs."""
    n, steps = 3, max(LIMITS)
    torch.manual_seed(2)
    run = decode(LANGUAGE, PROMPTS, sample_searcher(n=n, sampler=GlobalDraws(len(PROMPTS) * n)))
    after = torch.get_rng_state()

    torch.manual_seed(2)
    texts: list[Tokens] = [()] * (len(PROMPTS) * n)
    going = [True] * len(texts)
    while any(going):
        scores = torch.stack([LANGUAGE(PROMPTS[place // n] + text) for place, text in enumerate(texts)])
        tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1).tolist()
        for place in range(len(texts)):
            if going[place]:
                texts[place] += (tokens[place],)
                going[place] = tokens[place] not in EOS and len(texts[place]) < LIMITS[place // n]
    assert [text for result in run.results for text in generated(result)] == texts
    assert torch.equal(torch.get_rng_state(), after)
    assert max(len(text) for text in texts) <= steps


def test_chosen_tokens_of_every_step_are_the_texts() -> None:
    """What a streamer gets: each step's `chosen` has a place for every sample, -1 for those that had ended before."""
    run = drawn(3)
    texts: list[list[int]] = [[] for _ in range(3 * len(PROMPTS))]
    places = list(range(len(texts)))
    for step in run.steps:
        assert step.chosen is not None
        for place, token in enumerate(step.chosen.tolist()):
            assert (token >= 0) == (place in places)
            texts[place] += [token] if token >= 0 else []
        assert step.tokens.tolist() == [int(step.chosen[places[parent]]) for parent in step.parents]
        places = [places[parent] for parent in step.parents]
    assert [tuple(text) for text in texts] == [text for result in run.results for text in generated(result)]


def test_a_criterion_ends_a_sample_as_an_end_token_does() -> None:
    def says_seven(ids: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        return ids[:, -1] == 7

    def run(eos: Sequence[int], criteria: Sequence[object]) -> Run:
        sampler = StreamDraws(SEED, range(4), 3)
        return decode(LANGUAGE, PROMPTS, sample_searcher(n=3, sampler=sampler, eos=eos, criteria=criteria))  # type: ignore[arg-type]

    want = run((7, 8), ()).results
    assert_same(run((8,), [says_seven]).results, want)
    assert any(7 in text for result in want for text in generated(result))


def test_criteria_see_all_samples_of_the_prompts_that_run() -> None:
    asked = []

    def watch(ids: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        asked.append(prompts.tolist())
        return torch.zeros(len(ids), dtype=torch.bool)

    sampler = StreamDraws(SEED, range(4), 3)
    run = decode(LANGUAGE, PROMPTS, sample_searcher(n=3, sampler=sampler, criteria=[watch]))
    assert asked == [[prompt for prompt in sorted(set(seen.prompts)) for _ in range(3)] for seen in run.model.seen]


def test_recorded_scores_are_those_the_tokens_were_drawn_from() -> None:
    def halve(history: History, scores: torch.Tensor) -> torch.Tensor:
        return scores / 2

    n, recorder = 2, Recorder(2 * len(PROMPTS), keep_scores=True, keep_logits=True)
    sampler = StreamDraws(SEED, range(4), n)
    run = decode(LANGUAGE, PROMPTS, sample_searcher(n=n, sampler=sampler, processors=[halve], recorder=recorder))
    texts = [text for result in run.results for text in generated(result)]
    assert recorder.scores is not None
    assert recorder.logits is not None
    assert len(recorder.scores) == len(recorder.logits) == max(map(len, texts))
    for step, (scores, logits) in enumerate(zip(recorder.scores, recorder.logits, strict=True)):
        for place, text in enumerate(texts):
            running = len(text) > step
            want = LANGUAGE(PROMPTS[place // n] + text[:step]) if running else torch.full((VOCABULARY,), -torch.inf)
            assert torch.equal(logits[place], want)
            assert torch.equal(scores[place], want / 2)


def test_samples_of_a_flat_model_differ() -> None:
    flat = random_language(50, 0, spread=0.0)
    sampler = StreamDraws(0, [0], 8)
    run = decode(flat, [(1,)], sample_searcher([(1,)], (6,), n=8, eos=(), sampler=sampler))
    assert len(set(generated(run.results[0]))) == 8
