"""One step of beam search on tables made by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from branchkv.decoding.beam_step import BeamStep, top_candidates
from branchkv.decoding.draws import top_picker
from branchkv.tests.decoding.beam_steps import INF, STOPPING, advance, finished, make_rule, random_table, running, start
from branchkv.tests.decoding.list_beams import EarlyStopping

pytestmark = pytest.mark.usefixtures("one_thread")


def ranked(*order: int, vocabulary: int = 8) -> list[float]:
    """Log-probs that rank tokens in this order, -1, -2, ...; the others are impossible."""
    row = [-INF] * vocabulary
    for place, token in enumerate(order):
        row[token] = -1.0 - place
    return row


def first_step(row: list[float], num_beams: int, eos: Sequence[int] = (0,), limit: int = 9) -> BeamStep:
    table = torch.tensor([[row] * num_beams])
    return advance(start(num_beams, limit), table, make_rule(num_beams, eos=eos), eos)


def test_an_end_ranked_last_among_the_beams_is_kept() -> None:
    result = first_step(ranked(5, 6, 0, 7, 4, 3), num_beams=3)
    assert [beam.tokens for beam in finished(result.state)] == [(0,)]
    assert [beam.tokens for beam in running(result.state)] == [(5,), (6,), (7,)]


def test_an_end_ranked_behind_the_beams_is_dropped() -> None:
    result = first_step(ranked(5, 6, 7, 0, 4, 3), num_beams=3)
    assert finished(result.state) == []
    assert [beam.tokens for beam in running(result.state)] == [(5,), (6,), (7,)]


def test_beams_are_filled_from_behind_the_ends() -> None:
    """With two ends, 3 * num_beams candidates are looked at: the beams go on though both ends come first."""
    result = first_step(ranked(0, 1, 5, 6, 7), num_beams=2, eos=(0, 1))
    assert [beam.tokens for beam in finished(result.state)] == [(0,), (1,)]
    assert [beam.tokens for beam in running(result.state)] == [(5,), (6,)]


def test_the_penalty_counts_every_token_the_end_included() -> None:
    rule = make_rule(2, penalty=2.0)
    state = advance(start(2, 9), torch.tensor([[ranked(5, 6)] * 2]), rule).state
    result = advance(state, torch.tensor([[ranked(0, 3), ranked(0, 3)]]), rule)
    # Running: (5) at -1 and (6) at -2; both end with one more -1, after two tokens.
    assert [(float(beam.score), beam.tokens) for beam in finished(result.state)] == [(-2 / 4, (5, 0)), (-3 / 4, (6, 0))]
    # Live beams are ranked by their sums: the penalty has not touched them.
    assert [beam.score for beam in running(result.state)] == [-3.0, -4.0]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_equal_log_probs_tie_whether_they_end_or_are_cut(limit: int) -> None:
    """Every token costs 2: at a penalty of 1 each hypothesis is worth -2, whatever its length and the way it ended."""
    vocabulary, num_beams = 3, 12
    rule = make_rule(num_beams, 1.0, "never")
    state = start(num_beams, limit)
    for _ in range(limit):
        result = advance(state, torch.full((1, num_beams, vocabulary), -2.0), rule)
        state = result.state
    assert result.ended.tolist() == [True]
    assert {beam.score for beam in finished(state)} == {-2.0}
    texts = {beam.tokens for beam in finished(state)}
    ends = sum(2 ** (n - 1) for n in range(1, limit)) + 3 * 2 ** (limit - 1)
    assert len(texts) == len(finished(state)) == min(ends, num_beams)


def test_what_is_impossible_never_finishes() -> None:
    """An end with -inf, and a limit that would close candidates that do not exist."""
    result = first_step(ranked(5, 6), num_beams=4)
    assert finished(result.state) == []
    assert [beam.tokens for beam in running(result.state)] == [(5,), (6,)]
    cut = first_step(ranked(5, 6), num_beams=4, limit=1)
    assert [beam.tokens for beam in finished(cut.state)] == [(5,), (6,)]
    assert (cut.state.done_tokens[0, 2:] == -1).all()
    assert (cut.state.done_ancestry[0, 2:] == -1).all()
    assert cut.state.done_scores[0, 2:].tolist() == [-INF, -INF]
    assert cut.ended.tolist() == [True]


def test_nothing_possible_at_all_ends_with_nothing() -> None:
    result = first_step(ranked(), num_beams=2)
    assert (running(result.state), finished(result.state), result.ended.tolist()) == ([], [], [True])


@pytest.mark.parametrize(("vocabulary", "num_beams"), [(1, 4), (2, 5), (12, 20)])
def test_more_beams_than_continuations(vocabulary: int, num_beams: int) -> None:
    result = first_step([-1.0 - token for token in range(vocabulary)], num_beams, eos=())
    assert [beam.tokens for beam in running(result.state)] == [(token,) for token in range(vocabulary)]
    assert result.ended.tolist() == [False]


@pytest.mark.parametrize("stopping", STOPPING)
def test_every_token_an_end(stopping: EarlyStopping) -> None:
    eos = range(12)
    row = [-1.0 - (token * 5) % 12 for token in eos]
    best = sorted(eos, key=lambda token: -row[token])
    for num_beams in (2, 5, 20):
        rule = make_rule(num_beams, stopping=stopping, eos=eos)
        result = advance(start(num_beams, 9), torch.tensor([[row] * num_beams]), rule, eos)
        assert [beam.tokens for beam in finished(result.state)] == [(token,) for token in best[:num_beams]]
        assert running(result.state) == []
        assert result.ended.tolist() == [True]


def test_early_stopping_freezes_what_is_there() -> None:
    """Once num_beams hypotheses are there a better one may not enter, even if the step is asked for again."""
    rule = make_rule(2, 1.0, True)
    first = advance(start(2, 9), torch.tensor([[[-5.0, -6.0, -7.0]] * 2]), rule)
    assert [beam.tokens for beam in finished(first.state)] == [(0,)]
    assert first.ended.tolist() == [False]
    second = advance(first.state, torch.tensor([[[-0.5, -9.0, -9.0]] * 2]), rule)
    assert second.ended.tolist() == [True]
    held = finished(second.state)
    assert len(held) == 2
    better = advance(second.state, torch.tensor([[[0.0, -8.0, -8.0]] * 2]), rule)
    worse = advance(better.state, torch.tensor([[[-9.0, -1.0, -2.0]] * 2]), rule)
    assert finished(better.state) == finished(worse.state) == held
    assert worse.ended.tolist() == [True]
    assert worse.state.done_tokens.shape == (1, 2, 4)


def test_never_waits_where_the_heuristic_gives_up() -> None:
    """A penalty of 2 can still lift a long hypothesis above a short one; only "never" looks that far ahead."""
    ended = {}
    for stopping in STOPPING:
        rule = make_rule(1, 2.0, stopping)
        # The end costs 3; going on has cost 4 after one token: -4 / 1 < -3, but -4 / 81 > -3.
        result = advance(start(1, 9), torch.tensor([[[-3.0, -4.0]]]), rule)
        ended[stopping] = bool(result.ended[0])
    assert ended == {False: True, True: True, "never": False}


def test_a_beam_that_can_only_draw_level_is_given_up() -> None:
    result = advance(start(1, 9), torch.tensor([[[-2.0, -2.0]]]), make_rule(1, 0.0))
    assert [float(beam.score) for beam in finished(result.state) + running(result.state)] == [-2.0, -2.0]
    assert result.ended.tolist() == [True]


def test_a_prompt_that_gave_up_takes_nothing_more() -> None:
    rule = make_rule(1, 0.0, False)
    first = advance(start(1, 9), torch.tensor([[[-1.0, -2.0]]]), rule)
    assert first.state.improvable.tolist() == [False]
    again = advance(first.state, torch.tensor([[[3.0, -2.0]]]), rule)
    assert finished(again.state) == finished(first.state)


def test_select_keeps_every_part_of_a_prompt() -> None:
    state = start(2, 3, 4, 5)
    table = random_table(np.random.default_rng(1), (3, 2, 5), 0.0)
    state = advance(state, table, make_rule(2)).state
    picked = state.select(torch.tensor([2, 0]))
    assert picked.steps == 1
    assert picked.limits.tolist() == [5, 3]
    for place, prompt in ((0, 2), (1, 0)):
        assert running(picked, place) == running(state, prompt)
        assert finished(picked, place) == finished(state, prompt)


def test_candidates_name_the_right_parent_and_token() -> None:
    table = random_table(np.random.default_rng(2), (2, 3, 5), 0.0)
    scores = torch.tensor([[0.0, -1.0, -2.0], [-3.0, -3.5, -INF]])
    count = 12

    def pick(flat: torch.Tensor, wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
        return top_picker(flat, wanted, torch.arange(2))

    got = top_candidates(table, scores, count, pick)
    for prompt in range(2):
        everything = [
            (float(scores[prompt, beam] + table[prompt, beam, token]), beam, token)
            for beam, token in itertools.product(range(3), range(5))
        ]
        want = sorted(everything, reverse=True)[:count]
        triples = zip(
            got.scores[prompt].tolist(), got.parents[prompt].tolist(), got.tokens[prompt].tolist(), strict=True
        )
        finite = [triple for triple in triples if triple[0] > -INF]
        assert finite == [triple for triple in want if triple[0] > -INF]
    assert top_candidates(table, scores, 99, pick).scores.shape == (2, 15)
