"""The draws: HF's bit for bit, and streams that follow the distribution and nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from branchkv.decoding import draws
from branchkv.decoding.draws import Argmax, GlobalCandidates, GlobalDraws, StreamCandidates, StreamDraws, top_picker

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(1, 1), (1, 2), (3, 7), (5, 50), (16, 1000), (2, 50257)]
UNLIKELY = 1e-4  # a right implementation fails a test of distribution with this probability; the seeds are fixed


def table(shape: Sequence[int], seed: int = 0, banned: float = 0.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.normal(scale=3, size=shape)).float()
    scores = scores.masked_fill(torch.from_numpy(rng.random(shape) < banned), -math.inf)
    scores[:, 0] = 0.0  # a row has something to say
    return scores


def places(count: int) -> torch.Tensor:
    return torch.arange(count)


def assert_follows(tokens: torch.Tensor, scores: torch.Tensor) -> None:
    """Pearson's chi-square test of independent draws against softmax(scores); impossible tokens must not occur."""
    weights = scores.double().softmax(-1)
    counts = torch.bincount(tokens, minlength=len(scores)).double()
    possible = weights > 0
    assert counts[~possible].sum() == 0
    expected = weights[possible] * len(tokens)
    assert expected.min() > 5, "too few draws for the approximation"
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, statistic / 2) > UNLIKELY


# -- HF's draws --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("banned", [0.0, 0.5])
def test_global_draws_are_those_of_multinomial(shape: tuple[int, int], banned: float) -> None:
    sampler = GlobalDraws(shape[0])
    torch.manual_seed(1)
    ours = [sampler(table(shape, step, banned), places(shape[0])) for step in range(3)]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    for step in range(3):
        theirs = torch.multinomial(table(shape, step, banned).softmax(-1), 1).squeeze(1)
        assert torch.equal(ours[step], theirs)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rows", [[0], [4], [1, 3], [5, 0, 2], []])
def test_rows_that_are_left_draw_as_if_all_were_there(rows: list[int]) -> None:
    scores = table((6, 40))
    torch.manual_seed(1)
    ours = GlobalDraws(6)(scores[rows], torch.tensor(rows, dtype=torch.int64))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    theirs = torch.multinomial(scores.softmax(-1), 1).squeeze(1)[rows]
    assert torch.equal(ours, theirs)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("left", [slice(None), slice(None, None, -2)])
def test_global_candidates_are_those_of_multinomial_sorted(shape: tuple[int, int], left: slice) -> None:
    scores = table(shape)
    prompts = torch.arange(shape[0])[torch.tensor(range(shape[0])[left])]
    for count in {1, min(4, shape[1]), min(30, shape[1])}:
        torch.manual_seed(3)
        best, index = GlobalCandidates(shape[0])(scores[prompts], count, prompts)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        drawn = torch.multinomial(scores.softmax(-1), count)  # what HF does from here on is written in its own words
        drawn_scores = torch.gather(scores, 1, drawn)
        drawn_scores, order = drawn_scores.sort(dim=-1, descending=True)
        assert torch.equal(best, drawn_scores[prompts])
        assert torch.equal(index, drawn.gather(-1, order)[prompts])
        assert torch.equal(torch.get_rng_state(), state)


def test_global_candidates_have_no_limit_of_size() -> None:
    """`torch.multinomial` refuses more than 2**24 candidates."""
    scores = torch.full((1, 2**24 + 1), -1.0)
    with pytest.raises(RuntimeError, match="2\\^24"):
        torch.multinomial(scores.softmax(-1), 2)
    torch.manual_seed(0)
    best, index = GlobalCandidates(1)(scores, 4, places(1))
    assert best.tolist() == [[-1.0] * 4]
    assert len(set(index[0].tolist())) == 4


# -- streams -----------------------------------------------------------------------------------------------------------


def run(sampler: StreamDraws, rows: int, steps: int = 5, vocabulary: int = 30) -> torch.Tensor:
    """[rows, steps] tokens, every row from the same scores."""
    row = table((1, vocabulary))
    return torch.stack([sampler(row.expand(rows, -1), places(rows)) for _ in range(steps)], dim=1)


def test_a_sample_keeps_its_draws_when_n_grows() -> None:
    few, many = run(StreamDraws(5, [0, 1, 2], 2), 6), run(StreamDraws(5, [0, 1, 2], 9), 27)
    for prompt, number in itertools.product(range(3), range(2)):
        assert torch.equal(few[prompt * 2 + number], many[prompt * 9 + number])
    assert len({tuple(row) for row in many.tolist()}) == 27


def test_a_sample_keeps_its_draws_when_prompts_change_places() -> None:
    want = run(StreamDraws(5, [10, 11, 12], 2), 6).view(3, 2, -1)
    moved = run(StreamDraws(5, [12, 10, 7, 11], 2), 8).view(4, 2, -1)
    for place, prompt in ((0, 12), (1, 10), (3, 11)):
        assert torch.equal(moved[place], want[prompt - 10])


def test_a_row_that_waits_keeps_its_draws() -> None:
    """One uniform per step in which the row takes part, whoever else does."""
    want = run(StreamDraws(5, [0, 1], 2), 4, steps=4)
    sampler, row = StreamDraws(5, [0, 1], 2), table((1, 30))
    got: dict[int, list[int]] = {place: [] for place in range(4)}
    for turn in ([0, 1, 2, 3], [3], [1, 2], [2, 1, 0], [3, 0, 2], [0, 1, 3]):
        tokens = sampler(row.expand(len(turn), -1), torch.tensor(turn)).tolist()
        for place, token in zip(turn, tokens, strict=True):
            got[place].append(token)
    assert [got[place] for place in range(4)] == want.tolist()


def test_seeds_and_prompts_and_samples_have_streams_of_their_own() -> None:
    rows = [run(StreamDraws(seed, [prompt], 3), 3, steps=12).tolist() for seed in (0, 1, 2**40) for prompt in (0, 1)]
    texts = [tuple(text) for group in rows for text in group]
    assert len(set(texts)) == len(texts) == 18


def test_first_tokens_over_many_samples_follow_the_distribution() -> None:
    scores = table((1, 12), seed=4) / 2
    assert_follows(StreamDraws(0, [0], 20_000)(scores.expand(20_000, -1), places(20_000)), scores[0])


def test_tokens_along_the_streams_follow_the_distribution() -> None:
    scores = table((1, 12), seed=4, banned=0.4) / 2
    sampler = StreamDraws(0, range(20), 10)
    tokens = torch.cat([sampler(scores.expand(200, -1), places(200)) for _ in range(100)])
    assert torch.isinf(scores).any()
    assert_follows(tokens, scores[0])


class Fixed:
    """A generator that always says the same."""

    def __init__(self, value: float) -> None:
        self._value = value

    def random(self) -> float:
        return self._value


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.25, 1), (0.5, 3), (0.75, 3), (math.nextafter(1.0, 0.0), 3)]
)
def test_impossible_tokens_are_skipped_where_the_uniform_falls_on_an_edge(
    uniform: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens 0, 2 and 4 are impossible, 1 and 3 have one half each: the edges of the CDF are 0, 0, 0.5, 0.5, 1, 1."""
    monkeypatch.setattr(draws, "_stream", lambda *key: Fixed(uniform))
    scores = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    assert StreamDraws(0, [0], 1)(scores, places(1)).tolist() == [token]


def test_the_last_uniform_draws_the_last_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the probabilities sum to less than 1, as ten times 0.1 does."""
    monkeypatch.setattr(draws, "_stream", lambda *key: Fixed(math.nextafter(1.0, 0.0)))
    scores = torch.tensor([[0.0] * 10 + [-math.inf]])
    assert float(scores.double().softmax(-1).cumsum(-1)[0, -1]) < 1
    assert StreamDraws(0, [0], 1)(scores, places(1)).tolist() == [9]


@pytest.mark.parametrize("token", range(40_001, 40_009))
def test_edges_of_the_cdf_are_kept_in_double_precision(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform 2e-9 above the edge of a token, where single precision has steps of 6e-8."""
    vocabulary = 50_000
    monkeypatch.setattr(draws, "_stream", lambda *key: Fixed((token + 1e-4) / vocabulary))
    assert StreamDraws(0, [0], 1)(torch.zeros((1, vocabulary)), places(1)).tolist() == [token]


def test_stream_candidates_are_distinct_and_sorted() -> None:
    scores = table((3, 40), banned=0.3)
    pick = StreamCandidates(2, range(3))
    for _ in range(20):
        best, index = pick(scores, 12, places(3))
        assert all(len(set(row)) == 12 for row in index.tolist())
        assert torch.equal(scores.gather(1, index), best)
        assert (best.diff(dim=1) <= 0).all()
        assert torch.isfinite(best).all()


def test_stream_candidates_belong_to_their_prompt() -> None:
    scores = table((3, 40))
    together = StreamCandidates(2, [0, 1, 2])(scores, 6, places(3))[1]
    moved = StreamCandidates(2, [2, 5, 0])(scores[[2, 1, 0]], 6, places(3))[1]
    assert torch.equal(moved[0], together[2])
    assert torch.equal(moved[2], together[0])
    left = StreamCandidates(2, [0, 1, 2])(scores[[1]], 6, torch.tensor([1]))[1]
    assert torch.equal(left[0], together[1])


def test_a_single_stream_candidate_follows_the_distribution() -> None:
    scores = table((1, 8), seed=6, banned=0.3) / 2
    pick = StreamCandidates(1, range(200))
    tokens = torch.cat([pick(scores.expand(200, -1), 1, places(200))[1][:, 0] for _ in range(100)])
    assert_follows(tokens, scores[0])


@pytest.mark.parametrize("pick", [GlobalCandidates(1), StreamCandidates(0, [0])], ids=["global", "stream"])
def test_fewer_possible_candidates_than_asked(pick: GlobalCandidates | StreamCandidates) -> None:
    scores = torch.full((1, 10), -math.inf)
    scores[0, [3, 8]] = torch.tensor([-1.0, -5.0])
    best, index = pick(scores, 6, places(1))
    assert best.tolist() == [[-1.0, -5.0] + [-math.inf] * 4]
    assert index[0, :2].tolist() == [3, 8]
    assert len(set(index[0].tolist())) == 6


# -- no draws ----------------------------------------------------------------------------------------------------------


def test_argmax_and_top_picker_draw_nothing() -> None:
    scores, state = table((4, 20)), torch.get_rng_state()
    assert Argmax()(scores, places(4)).tolist() == [max(range(20), key=row.__getitem__) for row in scores.tolist()]
    best, index = top_picker(scores, 5, places(4))
    for row, values, chosen in zip(scores.tolist(), best.tolist(), index.tolist(), strict=True):
        assert chosen == sorted(range(20), key=lambda token, row=row: -row[token])[:5]  # type: ignore[misc]
        assert values == [row[token] for token in chosen]
    assert torch.equal(torch.get_rng_state(), state)
