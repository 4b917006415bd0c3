"""Per-step scores and logits in the layout of the call."""

from __future__ import annotations

import math

import pytest
import torch

from branchkv.decoding.record import Recorder

ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
NONE = [-math.inf, -math.inf]


@pytest.mark.parametrize("keep_scores", [False, True])
@pytest.mark.parametrize("keep_logits", [False, True])
def test_only_what_was_asked_for_is_kept(keep_logits: bool, keep_scores: bool) -> None:
    recorder = Recorder(2, keep_scores=keep_scores, keep_logits=keep_logits)
    for step in range(2):
        recorder.add_logits(ROWS + step, torch.tensor([0, 1]))
        recorder.add_scores(ROWS - step, torch.tensor([1, 0]))
    logits = None if recorder.logits is None else [step.tolist() for step in recorder.logits]
    scores = None if recorder.scores is None else [step.tolist() for step in recorder.scores]
    assert logits == ([[[1, 2], [3, 4]], [[2, 3], [4, 5]]] if keep_logits else None)
    assert scores == ([[[3, 4], [1, 2]], [[2, 3], [0, 1]]] if keep_scores else None)


def test_places_without_a_row_are_minus_infinity() -> None:
    recorder = Recorder(4, keep_scores=True, keep_logits=False)
    recorder.add_scores(ROWS, torch.tensor([3, 1]))
    assert recorder.scores is not None
    assert recorder.scores[0].tolist() == [NONE, [3, 4], NONE, [1, 2]]


def test_what_was_kept_does_not_change_with_the_scores() -> None:
    recorder, rows = Recorder(2, keep_scores=True, keep_logits=True), ROWS.clone()
    recorder.add_scores(rows, torch.tensor([0, 1]))
    recorder.add_logits(rows, torch.tensor([0, 1]))
    rows += 100
    assert recorder.scores is not None
    assert recorder.logits is not None
    assert torch.equal(recorder.scores[0], ROWS)
    assert torch.equal(recorder.logits[0], ROWS)
