"""What beam search finds, through the loop, the cache and a model that reads its history back from the blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from branchkv.decoding.beam_search import CandidatePicker
from branchkv.decoding.draws import GlobalCandidates, StreamCandidates, top_picker
from branchkv.decoding.history import History
from branchkv.decoding.record import Recorder
from branchkv.tests.decoding.fake_model import Language, Run, Tokens, decode, make_cache, random_language
from branchkv.tests.decoding.list_beams import EarlyStopping, ListBeams
from branchkv.tests.decoding.searches import (
    EOS,
    LANGUAGE,
    LIMITS,
    PROMPTS,
    ancestry,
    assert_same,
    beam_searcher,
    generated,
    worth,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def in_lists(language: Language, prompt: Tokens, beams: ListBeams) -> tuple[ListBeams, int]:
    """The search of one prompt over whole texts, without cache or batch; and the number of its steps."""
    for step in itertools.count(1):
        texts = [prompt + beam.tokens for beam in beams.running]
        beams.step([language(text).log_softmax(-1).tolist() for text in texts])
        if beams.ended:
            return beams, step
    raise AssertionError


@pytest.mark.parametrize("stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_equals_the_search_of_each_prompt_in_lists(penalty: float, stopping: EarlyStopping) -> None:
    run = decode(LANGUAGE, PROMPTS, beam_searcher(penalty=penalty, stopping=stopping))
    for prompt, limit, result in zip(PROMPTS, LIMITS, run.results, strict=True):
        want, steps = in_lists(LANGUAGE, prompt, ListBeams(4, penalty, stopping, EOS, limit))
        missing = 4 - len(want.finished)
        assert worth(result) == [float(beam.score) for beam in want.finished] + [-math.inf] * missing
        assert generated(result) == [beam.tokens for beam in want.finished] + [()] * missing
        assert ancestry(result) == [beam.ancestry for beam in want.finished] + [()] * missing
        assert result.tokens.shape == (4, steps)


def every_hypothesis(language: Language, prompt: Tokens, penalty: float) -> list[tuple[float, Tokens]]:
    """All that can be said in up to 4 tokens of 5 words, one of them the end, best first; sums in float32."""
    words, end, longest = (0, 1, 3, 4), 2, 4
    found = []
    for length in range(1, longest + 1):
        for start in itertools.product(words, repeat=length - 1):
            for last in range(5) if length == longest else (end,):
                text, total = (*start, last), np.float32(0)
                for step, token in enumerate(text):
                    total += np.float32(language(prompt + text[:step]).log_softmax(-1)[token])
                found.append((float(total / np.float32(length**penalty)), text))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_enough_beams_find_every_hypothesis_in_order(penalty: float, block_size: int) -> None:
    language, prompts = random_language(vocabulary=5, seed=6), ((1,), (3, 4, 4, 0))
    search = beam_searcher(prompts, (4, 4), num_beams=400, penalty=penalty, stopping="never", eos=(2,))
    run = decode(language, prompts, search, make_cache(block_size))
    for prompt, result in zip(prompts, run.results, strict=True):
        want = every_hypothesis(language, prompt, penalty)
        assert len({score for score, _ in want}) == 341, "the seed was chosen so that nothing ties"
        assert list(zip(worth(result), generated(result), strict=True)) == want + [(-math.inf, ())] * 59


def test_a_larger_penalty_favours_longer_hypotheses() -> None:
    """It divides a negative sum."""
    means = []
    for penalty in (-1.0, 0.0, 1.0, 2.0):
        search = beam_searcher(PROMPTS[:1], (6,), num_beams=8, penalty=penalty, stopping="never")
        means.append(np.mean([len(text) for text in generated(decode(LANGUAGE, PROMPTS[:1], search).results[0])]))
    assert means == sorted(means)
    assert means[0] < means[-1]


def test_hypotheses_are_sorted_and_distinct_so_that_fewer_are_a_prefix() -> None:
    for seed in range(5):
        for result in decode(random_language(9, seed), PROMPTS, beam_searcher(num_beams=5, stopping=True)).results:
            assert worth(result) == sorted(worth(result), reverse=True)
            texts = [text for text in generated(result) if text]
            assert len(set(texts)) == len(texts)


def test_fewer_hypotheses_than_beams() -> None:
    run = decode(random_language(12, 0), [(1,)], beam_searcher([(1,)], (1,), num_beams=20, eos=()))
    (result,) = run.results
    assert sorted(generated(result)[:12]) == [(token,) for token in range(12)]
    assert (generated(result)[12:], worth(result)[12:]) == ([()] * 8, [-math.inf] * 8)


def test_one_token_allowed_is_one_hypothesis() -> None:
    def only_four(history: History, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -math.inf).index_fill(1, torch.tensor([4]), 0.0)

    run = decode(LANGUAGE, [(1,)], beam_searcher([(1,)], (3,), processors=[only_four]))
    assert generated(run.results[0]) == [(4, 4, 4), (), (), ()]
    assert [len(seen.histories) for seen in run.model.seen] == [1, 1, 1]


def test_beams_without_a_reachable_history_have_no_row() -> None:
    run = decode(random_language(2, 0), [(1,)], beam_searcher([(1,)], (4,), num_beams=5, eos=()))
    assert [len(seen.histories) for seen in run.model.seen] == [1, 2, 4, 5]


def test_every_token_an_end() -> None:
    run = decode(LANGUAGE, PROMPTS, beam_searcher(eos=range(9)))
    for prompt, result in zip(PROMPTS, run.results, strict=True):
        assert generated(result) == [(token,) for token in LANGUAGE(prompt).topk(4).indices.tolist()]
    assert len(run.model.seen) == 1


def test_a_criterion_ends_a_hypothesis_as_an_end_token_does() -> None:
    def says_seven(ids: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        return ids[:, -1] == 7

    as_token = decode(LANGUAGE, PROMPTS, beam_searcher(eos=(7, 8), candidates=12))
    as_criterion = decode(LANGUAGE, PROMPTS, beam_searcher(eos=(8,), candidates=12, criteria=[says_seven]))
    assert_same(as_criterion.results, as_token.results)
    assert any(7 in text for result in as_token.results for text in generated(result))


@pytest.mark.parametrize("parts", [[[3, 2, 1, 0]], [[1], [3, 0], [2]], [[2, 0, 3], [1]], [[0], [1], [2], [3]]])
@pytest.mark.parametrize("drawn", [False, True])
def test_order_and_split_of_the_batch_change_nothing(parts: list[list[int]], drawn: bool) -> None:
    def run(part: Sequence[int]) -> Run:
        prompts, limits = [PROMPTS[i] for i in part], [LIMITS[i] for i in part]
        pick: CandidatePicker = StreamCandidates(3, part) if drawn else top_picker
        return decode(LANGUAGE, prompts, beam_searcher(prompts, limits, penalty=3.0, pick=pick))

    together = run(range(4)).results
    for part in parts:
        assert_same(run(part).results, [together[number] for number in part])


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_the_block_size_changes_nothing(block_size: int) -> None:
    want = decode(LANGUAGE, PROMPTS, beam_searcher(), make_cache(3))
    got = decode(LANGUAGE, PROMPTS, beam_searcher(), make_cache(block_size))
    assert_same(got.results, want.results)
    assert [seen.histories for seen in got.model.seen] == [seen.histories for seen in want.model.seen]


@pytest.mark.parametrize("penalty", [-1.0, 1.0, 2.0])
def test_recorded_scores_along_the_ancestry_sum_to_the_score(penalty: float) -> None:
    recorder = Recorder(len(PROMPTS) * 4, keep_scores=True, keep_logits=True)
    run = decode(LANGUAGE, PROMPTS, beam_searcher(penalty=penalty, recorder=recorder))
    assert recorder.scores is not None
    assert recorder.logits is not None
    for prompt, result in enumerate(run.results):
        for text, beams, score in zip(generated(result), ancestry(result), worth(result), strict=True):
            total = np.float32(0)
            for step, (beam, token) in enumerate(zip(beams, text, strict=True)):
                total += np.float32(recorder.scores[step][prompt * 4 + beam, token])
                history = PROMPTS[prompt] + text[:step]
                assert torch.equal(recorder.logits[step][prompt * 4 + beam], LANGUAGE(history))
            assert np.float32(total / np.float32(len(text) ** penalty)) == score


@pytest.mark.parametrize("seed", [None, 4])
def test_drawn_hypotheses_are_distinct_and_sorted(seed: int | None) -> None:
    torch.manual_seed(0)
    pick: CandidatePicker = GlobalCandidates(4) if seed is None else StreamCandidates(seed, range(4))
    for result in decode(LANGUAGE, PROMPTS, beam_searcher(num_beams=5, pick=pick)).results:
        assert len(set(generated(result))) == 5
        assert worth(result) == sorted(worth(result), reverse=True)
