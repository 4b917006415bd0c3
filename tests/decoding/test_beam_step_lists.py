"""Beam search step by step on random tables, against the same rules in lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from branchkv.decoding.beam_step import BeamStep
from branchkv.tests.decoding.beam_steps import (
    PENALTIES,
    STOPPING,
    advance,
    finished,
    make_rule,
    random_table,
    running,
    start,
)
from branchkv.tests.decoding.list_beams import EarlyStopping, ListBeams, Tie

pytestmark = pytest.mark.usefixtures("one_thread")


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
    assert min(ended.values()) >= 15, f"the tables do not reach both ends: {ended}"


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
