"""What is left, and what is said, after an error at any place and any step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from branchkv.decoding.beam_search import CandidatePicker
from branchkv.decoding.draws import GlobalCandidates, StreamCandidates, top_picker
from branchkv.decoding.history import History
from branchkv.decoding.loop import DecodingLoop
from branchkv.decoding.step import Search, Step
from branchkv.errors import NumericalError, OutOfBlocksError
from branchkv.paged_cache.manager import CacheManager
from branchkv.tests.decoding.fake_model import FakeModel, Tokens, assert_whole, decode, make_cache, random_language
from branchkv.tests.decoding.searches import (
    LANGUAGE,
    LENGTHS,
    PROMPTS,
    SEARCHES,
    assert_same,
    beam_searcher,
    generated,
)

pytestmark = pytest.mark.usefixtures("one_thread")

searches = pytest.mark.parametrize("search", SEARCHES.values(), ids=list(SEARCHES))


class Tripwire:
    """Raises `error` at the call with number `at`; else does what `inner` does."""

    def __init__(self, inner: Callable[..., Any], at: int, error: BaseException) -> None:
        self._inner, self._at, self._error = inner, at, error
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls > self._at:
            raise self._error
        return self._inner(*args)


def run_with(place: str, search: Callable[..., Search], cache: CacheManager, wire: Callable[..., Any]) -> Tripwire:
    """Decode with a tripwire at `place`; returns it."""
    inner: dict[str, Callable[..., Any]] = {
        "model": LANGUAGE,
        "processor": lambda history, scores: scores,
        "criterion": lambda ids, prompts: torch.zeros(len(ids), dtype=torch.bool),
        "on_step": lambda step: None,
        "keep": lambda prompts: None,
    }
    tripwire: Tripwire = wire(inner[place])
    searching = search(
        processors=[tripwire] if place == "processor" else (), criteria=[tripwire] if place == "criterion" else ()
    )
    model = FakeModel(tripwire if place == "model" else LANGUAGE, PROMPTS, cache)
    if place == "keep":
        model.keep = tripwire  # type: ignore[method-assign, assignment]
    DecodingLoop(model, cache, searching, tripwire if place == "on_step" else None).run(LENGTHS)
    return tripwire


@searches
@pytest.mark.parametrize("error", [ValueError("planted"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("place", ["model", "processor", "criterion", "on_step", "keep"])
def test_the_pool_is_whole_after_an_error_at_any_step(
    place: str, error: BaseException, search: Callable[..., Search]
) -> None:
    cache = make_cache()
    want = decode(LANGUAGE, PROMPTS, search()).results
    calls = run_with(place, search, cache, lambda inner: Tripwire(inner, 10**6, error)).calls
    assert calls >= 3
    for at in range(calls):
        with pytest.raises(type(error)) as raised:
            run_with(place, search, cache, lambda inner, at=at: Tripwire(inner, at, error))
        assert raised.value is error
        assert_whole(cache)
    assert_same(decode(LANGUAGE, PROMPTS, search(), cache).results, want)


@searches
def test_any_budget_holds_the_call_or_is_refused_with_numbers(search: Callable[..., Search]) -> None:
    free = decode(LANGUAGE, PROMPTS, search())
    peak = free.cache.stats.result().peak_blocks
    for limit in range(1, peak + 1):
        cache = make_cache(limit=limit)
        if limit < peak:
            with pytest.raises(OutOfBlocksError) as error:
                decode(LANGUAGE, PROMPTS, search(), cache)
            assert error.value.total == limit
            assert error.value.needed > error.value.free
            assert_whole(cache)
        else:
            assert_same(decode(LANGUAGE, PROMPTS, search(), cache).results, free.results)


@searches
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_logits_without_a_choice_name_prompt_and_step(step: int, bad: float, search: Callable[..., Search]) -> None:
    def broken(history: Tokens) -> torch.Tensor:
        logits = LANGUAGE(history)
        if history[:3] == PROMPTS[2] and len(history) == 3 + step:
            return torch.full_like(logits, bad) if bad < 0 else logits.index_fill(0, torch.tensor([5]), bad)
        return logits

    cache = make_cache()
    with pytest.raises(NumericalError) as error:
        decode(broken, PROMPTS, search(eos=()), cache)
    assert (error.value.prompt, error.value.step) == (2, step)
    assert_whole(cache)


def filling(value: float, after: int, prompt: int = 2) -> Callable[[History, torch.Tensor], torch.Tensor]:
    """A processor that makes every score of a prompt `value`, from its token number `after` on."""

    def processor(history: History, scores: torch.Tensor) -> torch.Tensor:
        late = (history.prompts == prompt) & (history.generated.shape[1] >= after)
        return scores.masked_fill(late[:, None], value)

    return processor


@searches
@pytest.mark.parametrize(("value", "reason"), [(math.nan, "contain nan"), (-math.inf, r"banned \(-inf\)")])
def test_processed_scores_without_a_choice_name_prompt_and_step(
    value: float, reason: str, search: Callable[..., Search]
) -> None:
    with pytest.raises(NumericalError, match=reason) as error:
        decode(LANGUAGE, PROMPTS, search(eos=(), processors=[filling(value, after=2)]))
    assert (error.value.prompt, error.value.step) == (2, 2)


@pytest.mark.parametrize(
    "pick",
    [
        top_picker,
        pytest.param(GlobalCandidates(len(PROMPTS)), id="global draws"),
        pytest.param(StreamCandidates(0, range(len(PROMPTS))), id="stream draws"),
    ],
)
def test_nan_in_one_of_several_beams_is_not_drawn_over(pick: CandidatePicker) -> None:
    torch.manual_seed(0)

    def broken(history: History, scores: torch.Tensor) -> torch.Tensor:
        last = (history.prompts == 2) & (history.lanes == 3) & (history.generated.shape[1] == 2)
        return scores.masked_fill(last[:, None], math.nan)

    language = random_language(vocabulary=200, seed=0)
    with pytest.raises(NumericalError) as error:
        decode(language, PROMPTS, beam_searcher(pick=pick, eos=(), processors=[broken]))
    assert (error.value.prompt, error.value.step) == (2, 2)


def test_where_no_beam_goes_on_the_finished_hypotheses_are_the_result() -> None:
    def search(**options: Any) -> Search:
        return beam_searcher(penalty=3.0, stopping="never", eos=(0, 5, 7, 8), **options)

    banned = decode(LANGUAGE, PROMPTS, search(processors=[filling(-math.inf, after=3)]))
    free = decode(LANGUAGE, PROMPTS, search())
    lengths = {len(text) for text in generated(banned.results[2])}
    assert lengths <= {0, 1, 2, 3}
    assert max(lengths) > 0
    assert max(len(text) for text in generated(free.results[2])) > 3
    others = (0, 1, 3)
    assert_same([banned.results[i] for i in others], [free.results[i] for i in others])


def test_a_step_from_on_step_can_stop_the_call() -> None:
    class Enough(Exception):
        pass

    def stop(step: Step) -> None:
        raise Enough

    cache = make_cache()
    with pytest.raises(Enough):
        DecodingLoop(FakeModel(LANGUAGE, PROMPTS, cache), cache, beam_searcher(), stop).run(LENGTHS)
    assert_whole(cache)
