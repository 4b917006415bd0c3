"""One step of beam search: against the same rules in lists, and on tables made by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from branchkv.decoding.beam_step import BeamRule, BeamState, BeamStep, beam_step, top_candidates
from branchkv.decoding.draws import top_picker
from branchkv.tests.decoding.list_beams import Beam, EarlyStopping, ListBeams, Tie

pytestmark = pytest.mark.usefixtures("one_thread")

INF = math.inf
STOPPING: tuple[EarlyStopping, ...] = (False, True, "never")
PENALTIES = (-1.0, 0.0, 1.0, 2.0)


def make_rule(
    num_beams: int, penalty: float = 1.0, stopping: EarlyStopping = False, eos: Sequence[int] = (0,)
) -> BeamRule:
    return BeamRule(num_beams, penalty, stopping, max(2, 1 + len(eos)) * num_beams)


def start(num_beams: int, *limits: int) -> BeamState:
    return BeamState.start(num_beams, torch.tensor(limits))


def advance(state: BeamState, log_probs: torch.Tensor, rule: BeamRule, eos: Sequence[int] = (0,)) -> BeamStep:
    """One step in which only the end tokens and the limit stop a hypothesis; `log_probs` [prompts, beams, vocabulary]."""

    def pick(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return top_picker(scores, count, torch.arange(len(scores)))

    candidates = top_candidates(log_probs, state.scores, rule.candidates, pick)
    stops = torch.isin(candidates.tokens, torch.tensor(list(eos), dtype=torch.int64))
    stops |= (state.limits <= state.steps + 1)[:, None]
    return beam_step(state, candidates, stops, rule)


def running(state: BeamState, prompt: int = 0) -> list[Beam]:
    return _beams(state.scores[prompt], state.tokens[prompt], state.ancestry[prompt])


def finished(state: BeamState, prompt: int = 0) -> list[Beam]:
    return _beams(state.done_scores[prompt], state.done_tokens[prompt], state.done_ancestry[prompt])


def _beams(scores: torch.Tensor, tokens: torch.Tensor, ancestry: torch.Tensor) -> list[Beam]:
    """The beams that exist; they come first, best first, and the rest is -inf."""
    exist = scores > -INF
    assert exist.tolist() == sorted(exist.tolist(), reverse=True)
    assert (scores.diff()[exist[1:]] <= 0).all()
    return [
        Beam(np.float32(score), tuple(t for t in text if t >= 0), tuple(p for p in parents if p >= 0))
        for score, text, parents in zip(scores.tolist(), tokens.tolist(), ancestry.tolist(), strict=True)
        if score > -INF
    ]


# -- against the rules in lists ----------------------------------------------------------------------------------------


def random_table(rng: np.random.Generator, shape: tuple[int, ...], banned: float) -> torch.Tensor:
    table = torch.from_numpy(rng.normal(scale=3.0, size=shape)).float().log_softmax(-1)
    return table.masked_fill(torch.from_numpy(rng.random(shape) < banned), -INF)


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_equals_the_rules_in_lists(penalty: float, stopping: EarlyStopping) -> None:
    """Random tables with bans, up to all tokens an end, fewer reachable than beams; every prompt until it ends."""
    rng = np.random.default_rng([17, STOPPING.index(stopping), PENALTIES.index(penalty)])
    ended, ties = {"early": 0, "at the limit": 0}, 0
    for _ in range(40):
        vocabulary, num_beams = int(rng.integers(1, 9)), int(rng.integers(2, 6))
        eos = rng.permutation(vocabulary)[: rng.integers(0, min(vocabulary, 3) + 1)].tolist()
        limits = rng.integers(1, 8, size=3).tolist()
        rule = make_rule(num_beams, penalty, stopping, eos)
        state = start(num_beams, *limits)
        lists = [ListBeams(num_beams, penalty, stopping, eos, limit) for limit in limits]
        live = [0, 1, 2]
        banned = float(rng.choice([0.0, 0.0, 0.4]))
        while live:
            table = random_table(rng, (len(live), num_beams, vocabulary), banned)
            table[:, :, 0] = torch.where(
                torch.isinf(table).all(-1), -3.0, table[:, :, 0]
            )  # something may always be said
            result = advance(state, table, rule, eos)
            try:
                for place, prompt in enumerate(live):
                    lists[prompt].step(table[place, : len(lists[prompt].running)].tolist())
            except Tie:
                ties += 1
                break
            for place, prompt in enumerate(live):
                _assert_equal(result, place, lists[prompt])
                if lists[prompt].ended:
                    ended["at the limit" if result.state.steps == limits[prompt] else "early"] += 1
            stay = (~result.ended).nonzero().flatten()
            state, live = result.state.select(stay), [live[place] for place in stay.tolist()]
    assert ties <= 3  # sums of a vocabulary of one and its like
    assert min(ended.values()) >= 20, f"the tables do not reach both ends: {ended}"


def _assert_equal(result: BeamStep, place: int, want: ListBeams) -> None:
    assert running(result.state, place) == want.running
    assert finished(result.state, place) == want.finished
    assert result.parents[place, : len(want.running)].tolist() == want.parents
    assert result.tokens[place, : len(want.running)].tolist() == [beam.tokens[-1] for beam in want.running]
    assert bool(result.ended[place]) == want.ended
    if not want.ended:
        assert bool(result.state.improvable[place]) == want.improvable


def test_prompts_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(5)
    rule = make_rule(3)
    table = random_table(rng, (4, 3, 7), 0.2)
    together = start(3, 5, 2, 9, 1)
    alone = [start(3, limit) for limit in (5, 2, 9, 1)]
    for _ in range(3):
        result = advance(together, table, rule)
        for prompt in range(4):
            own = advance(alone[prompt], table[prompt : prompt + 1], rule)
            assert running(own.state) == running(result.state, prompt)
            assert finished(own.state) == finished(result.state, prompt)
            assert bool(own.ended[0]) == bool(result.ended[prompt])
            alone[prompt] = own.state
        together = result.state


# -- by hand -----------------------------------------------------------------------------------------------------------


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
    assert [(beam.score, beam.tokens) for beam in finished(result.state)] == [(-2 / 4, (5, 0)), (-3 / 4, (6, 0))]
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
