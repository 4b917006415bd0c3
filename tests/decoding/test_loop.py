"""The loop around the searches: who is computed, what processors and criteria see, and when prompts leave."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from branchkv.decoding.history import History
from branchkv.decoding.step import Search
from branchkv.tests.decoding.fake_model import Tokens, decode
from branchkv.tests.decoding.searches import (
    LANGUAGE,
    LENGTHS,
    LIMITS,
    PROMPTS,
    SEARCHES,
    generated,
)

pytestmark = pytest.mark.usefixtures("one_thread")

searches = pytest.mark.parametrize("search", SEARCHES.values(), ids=list(SEARCHES))


@searches
def test_a_prompt_leaves_in_the_step_it_finishes(search: Callable[..., Search]) -> None:
    """Nothing is computed for it afterwards, and the model is told so once."""
    alone = [decode(LANGUAGE, [p], search([p], [limit])) for p, limit in zip(PROMPTS, LIMITS, strict=True)]
    forwards = [len(run.model.seen) for run in alone]
    assert len(set(forwards)) > 2, "the prompts should end at different steps"
    run = decode(LANGUAGE, PROMPTS, search())
    live = [[prompt for prompt, count in enumerate(forwards) if count > step] for step in range(max(forwards) + 1)]
    assert [sorted(set(seen.prompts)) for seen in run.model.seen] == live[:-1]
    assert run.model.kept == [after for before, after in pairwise(live) if after != before]
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
def test_the_whole_layout_keeps_the_lanes_of_prompts_that_left(search: Callable[..., Search]) -> None:
    """A lane that has ended stays as it was and is filled; its text is one that the prompt could have had."""
    width, fill, longest = search().width, 99, max(LENGTHS)
    layouts: list[list[list[int]]] = []

    def watch(history: History, scores: torch.Tensor) -> torch.Tensor:
        layouts.append(history.full(fill).tolist())
        return scores

    run = decode(LANGUAGE, PROMPTS, search(processors=[watch]))
    left = 0
    for step, (before, after) in enumerate(pairwise(layouts), start=1):
        assert len(after) == width * len(PROMPTS)
        for place, row in enumerate(after):
            prompt = place // width
            assert len(row) == longest + step
            assert tuple(row[longest - LENGTHS[prompt] : longest]) == PROMPTS[prompt]
            if prompt not in run.model.seen[step].prompts:
                left += 1
                if prompt in run.model.seen[step - 1].prompts:
                    earlier = [text[: longest + step - 1] for text in before[prompt * width : (prompt + 1) * width]]
                    assert row[:-1] in earlier
                    assert row[-1] != fill
                else:
                    assert row == [*before[place], fill]
    assert left > 4


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
