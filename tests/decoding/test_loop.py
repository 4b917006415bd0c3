"""The loop around the searches: who is computed, when prompts leave, and what is left after an error at any place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from branchkv.decoding.history import History
from branchkv.decoding.loop import DecodingLoop
from branchkv.decoding.step import Search, Step
from branchkv.errors import NumericalError, OutOfBlocksError
from branchkv.paged_cache.manager import CacheManager
from branchkv.tests.decoding.fake_model import FakeModel, Tokens, assert_whole, decode, make_cache
from branchkv.tests.decoding.searches import (
    LANGUAGE,
    LIMITS,
    PROMPTS,
    assert_same,
    beam_searcher,
    generated,
    sample_searcher,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SEARCHES: dict[str, Callable[..., Search]] = {"beams": beam_searcher, "greedy": sample_searcher}
LENGTHS = [len(prompt) for prompt in PROMPTS]
searches = pytest.mark.parametrize("search", SEARCHES.values(), ids=list(SEARCHES))


# -- who is computed ---------------------------------------------------------------------------------------------------


@searches
def test_a_prompt_leaves_in_the_step_it_finishes(search: Callable[..., Search]) -> None:
    """Nothing is computed for it afterwards, and the model is told so once."""
    alone = [decode(LANGUAGE, [p], search([p], [limit])) for p, limit in zip(PROMPTS, LIMITS, strict=True)]
    forwards = [len(run.model.seen) for run in alone]
    assert len(set(forwards)) > 2, "the prompts should end at different steps"
    run = decode(LANGUAGE, PROMPTS, search())
    live = [[prompt for prompt, count in enumerate(forwards) if count > step] for step in range(max(forwards) + 1)]
    assert [sorted(set(seen.prompts)) for seen in run.model.seen] == live[:-1]
    assert run.model.kept == [after for before, after in zip(live, live[1:], strict=False) if after != before]
    assert [sorted(set(step.prompts.tolist())) for step in run.steps] == live[1:]


@searches
def test_every_prompt_is_computed_once(search: Callable[..., Search]) -> None:
    run = decode(LANGUAGE, PROMPTS, search())
    assert run.model.seen[0].histories == PROMPTS
    assert run.cache.stats.result().prefill_tokens == sum(LENGTHS)


@searches
def test_on_step_sees_the_rows_that_go_on(search: Callable[..., Search]) -> None:
    run = decode(LANGUAGE, PROMPTS, search())
    for step, before, after in zip(run.steps, run.model.seen, [*run.model.seen[1:], None], strict=True):
        if after is None:
            assert (len(step.parents), len(step.prompts), len(step.tokens)) == (0, 0, 0)
            continue
        assert tuple(step.prompts.tolist()) == after.prompts
        # In the first step every lane of a prompt counts as a row.
        width = len(before.histories) if before is not run.model.seen[0] else len(PROMPTS) * search().width
        parents = [int(parent) * len(before.histories) // width for parent in step.parents]
        texts = [
            (*before.histories[parent], token) for parent, token in zip(parents, step.tokens.tolist(), strict=True)
        ]
        assert tuple(texts) == after.histories


@searches
def test_processors_see_the_text_of_each_row(search: Callable[..., Search]) -> None:
    """The prompt and the row's own ancestry, as the cache holds them."""
    texts: list[list[Tokens]] = []

    def watch(history: History, scores: torch.Tensor) -> torch.Tensor:
        rows: dict[int, Tokens] = {}
        for numbers, ids in history.cohorts():
            rows.update(zip(numbers.tolist(), map(tuple, ids.tolist()), strict=True))
        texts.append([rows[number] for number in range(len(scores))])
        return scores

    run = decode(LANGUAGE, PROMPTS, search(processors=[watch]))
    prefill = [prompt for prompt in PROMPTS for _ in range(search().width)]
    assert texts == [prefill, *(list(seen.histories) for seen in run.model.seen[1:])]


@searches
def test_criteria_see_each_choice_behind_its_prompt(search: Callable[..., Search]) -> None:
    longest = max(LENGTHS)
    asked: list[list[int]] = []

    def watch(ids: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        for row, prompt in zip(ids.tolist(), prompts.tolist(), strict=True):
            assert tuple(row[longest - LENGTHS[prompt] : longest]) == PROMPTS[prompt]
            assert min(row[longest:]) >= 0
        asked.append(sorted(set(prompts.tolist())))
        counts = torch.bincount(prompts)
        assert len(set(counts[counts > 0].tolist())) == 1
        return torch.zeros(len(ids), dtype=torch.bool)

    run = decode(LANGUAGE, PROMPTS, search(criteria=[watch]))
    assert asked == [sorted(set(seen.prompts)) for seen in run.model.seen]


@searches
def test_a_ban_on_the_own_text_is_never_broken(search: Callable[..., Search]) -> None:
    """A processor that looks at another row's history would let a token through."""

    def ban_own(history: History, scores: torch.Tensor) -> torch.Tensor:
        banned = scores.clone()
        for rows, ids in history.cohorts():
            for row, text in zip(rows.tolist(), ids, strict=True):
                banned[row, text] = -math.inf
        return banned

    run = decode(LANGUAGE, PROMPTS, search(limits=(3, 3, 3, 3), eos=(0,), processors=[ban_own]))
    texts = [(prompt, text) for prompt, result in zip(PROMPTS, run.results, strict=True) for text in generated(result)]
    assert all(len(set(text)) == len(text) and not set(text) & set(prompt) for prompt, text in texts)
    assert max(len(text) for _, text in texts) == 3


# -- errors ------------------------------------------------------------------------------------------------------------


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
    tripwire = wire(inner[place])
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
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_processed_scores_without_a_choice_name_prompt_and_step(value: float, search: Callable[..., Search]) -> None:
    with pytest.raises(NumericalError) as error:
        decode(LANGUAGE, PROMPTS, search(eos=(), processors=[filling(value, after=2)]))
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
