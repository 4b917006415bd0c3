"""Both shapes of a history, by hand."""

from __future__ import annotations

import torch

from branchkv.decoding.history import History, Prompts

PAD, FILL = 0, 9
PROMPTS = Prompts(torch.tensor([[PAD, PAD, 5], [6, 7, 8], [PAD, PAD, 4]]), (1, 3, 1))


def history(rows: list[tuple[int, int]], generated: list[list[int]], frozen: list[list[int]]) -> History:
    """Two lanes per prompt; `rows` are (prompt, lane)."""
    prompts, lanes = torch.tensor(rows, dtype=torch.int64).view(-1, 2).T
    texts = torch.tensor(generated, dtype=torch.int64)
    return History(PROMPTS, 2, prompts, lanes, texts, torch.tensor(frozen, dtype=torch.int64).view(6, -1))


def cohorts(of: History) -> list[tuple[list[int], list[list[int]]]]:
    return [(rows.tolist(), ids.tolist()) for rows, ids in of.cohorts()]


EVERYONE = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_prompts() -> None:
    assert (len(PROMPTS), PROMPTS.longest) == (3, 3)


def test_the_place_of_a_row_is_prompt_by_prompt() -> None:
    assert history([(2, 1), (0, 1), (1, 0)], [[1], [2], [3]], [[]] * 6).layout.tolist() == [5, 1, 2]


def test_rows_of_equal_length_come_together_without_padding() -> None:
    rows = history([(0, 1), (1, 0), (2, 0), (1, 1)], [[11], [12], [13], [14]], [[]] * 6)
    assert cohorts(rows) == [([0, 2], [[5, 11], [4, 13]]), ([1, 3], [[6, 7, 8, 12], [6, 7, 8, 14]])]


def test_before_the_first_token_there_is_only_the_prompt() -> None:
    rows = history([(1, 0), (0, 0)], [[], []], [[]] * 6)
    assert cohorts(rows) == [([1], [[5]]), ([0], [[6, 7, 8]])]
    rows = history(EVERYONE, [[]] * 6, [[]] * 6)
    assert rows.full(FILL).tolist() == [[0, 0, 5], [0, 0, 5], [6, 7, 8], [6, 7, 8], [0, 0, 4], [0, 0, 4]]


def test_prompts_of_one_length_are_one_cohort() -> None:
    """Also where every prompt has padding that belongs to none."""
    for padded, lengths in (([[5, 6], [7, 8]], (2, 2)), ([[PAD, 5, 6], [PAD, 7, 8]], (2, 2))):
        two = Prompts(torch.tensor(padded), lengths)
        rows = History(two, 1, torch.tensor([1, 0]), torch.tensor([0, 0]), torch.tensor([[3], [4]]), torch.empty(2, 0))
        assert cohorts(rows) == [([0, 1], [[7, 8, 3], [5, 6, 4]])]


def test_an_empty_prompt_has_the_generated_tokens_only() -> None:
    none = Prompts(torch.empty((2, 0), dtype=torch.int64), (0, 0))
    rows = History(none, 1, torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([[3], [4]]), torch.empty(2, 0))
    assert cohorts(rows) == [([0, 1], [[3], [4]])]
    mixed = Prompts(torch.tensor([[PAD, PAD], [1, 2]]), (0, 2))
    rows = History(mixed, 1, torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([[3], [4]]), torch.empty(2, 0))
    assert cohorts(rows) == [([0], [[3]]), ([1], [[1, 2, 4]])]


def test_the_whole_layout_has_every_lane_at_its_place() -> None:
    rows = history([(1, 0), (1, 1), (0, 1), (0, 0), (2, 0), (2, 1)], [[21], [22], [12], [11], [31], [32]], [[]] * 6)
    assert rows.full(FILL).tolist() == [
        [0, 0, 5, 11],
        [0, 0, 5, 12],
        [6, 7, 8, 21],
        [6, 7, 8, 22],
        [0, 0, 4, 31],
        [0, 0, 4, 32],
    ]


def test_lanes_that_ended_in_the_last_step_keep_their_tokens_and_are_filled() -> None:
    frozen = [[11], [12], [-1], [-1], [31], [32]]
    rows = history([(1, 0), (1, 1)], [[21, 23], [22, 24]], frozen)
    assert rows.full(FILL)[:, 3:].tolist() == [[11, FILL], [12, FILL], [21, 23], [22, 24], [31, FILL], [32, FILL]]


def test_lanes_that_ended_at_different_steps_are_all_filled() -> None:
    """`frozen` is as wide as the last lane to end; behind the others it holds -1."""
    frozen = [[11, -1], [12, -1], [-1, -1], [-1, -1], [31, 33], [32, 34]]
    rows = history([(1, 0), (1, 1)], [[21, 23, 25], [22, 24, 26]], frozen)
    assert rows.full(FILL)[:, 3:].tolist() == [
        [11, FILL, FILL],
        [12, FILL, FILL],
        [21, 23, 25],
        [22, 24, 26],
        [31, 33, FILL],
        [32, 34, FILL],
    ]
