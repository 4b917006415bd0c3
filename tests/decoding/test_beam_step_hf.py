"""`beam_step` against the helper methods of HF's own beam search, step by step on the same tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from branchkv.decoding.beam_step import BeamRule, BeamState, BeamStep
from branchkv.tests.decoding.beam_steps import PENALTIES, STOPPING, advance, make_rule
from branchkv.tests.decoding.list_beams import EarlyStopping

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS, VOCABULARY, NUM_BEAMS, LIMIT = 3, 12, 4, 7


class Helpers(GenerationMixin):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """HF's methods without a model: they use no attribute of it."""


HF: Any = Helpers()


@dataclass(frozen=True)
class HFState:
    """The tensors that `GenerationMixin._beam_search` carries from step to step, for a prompt of no tokens."""

    running_scores: torch.Tensor
    running_sequences: torch.Tensor
    running_indices: torch.Tensor
    scores: torch.Tensor
    sequences: torch.Tensor
    indices: torch.Tensor
    is_finished: torch.Tensor
    unsatisfied: torch.Tensor
    stops: torch.Tensor

    @classmethod
    def start(cls) -> HFState:
        shape = (PROMPTS, NUM_BEAMS)
        scores = torch.full(shape, -1e9)
        running = scores.clone()
        running[:, 0] = 0
        tokens = torch.full((*shape, LIMIT), -1)
        none = torch.zeros(shape, dtype=torch.bool)
        return cls(running, tokens, tokens, scores, tokens, tokens, none, torch.ones((PROMPTS, 1)).bool(), none)


def hf_step(state: HFState, log_probs: torch.Tensor, length: int, eos: torch.Tensor, rule: BeamRule) -> HFState:
    """The body of the loop in `_beam_search`, from the accumulated log-probs on; `length` tokens are there."""
    summed = (log_probs + state.running_scores[:, :, None]).view(PROMPTS, -1)
    top_scores, top_sequences, top_indices = HF._get_top_k_continuations(
        accumulated_log_probs=summed,
        running_sequences=state.running_sequences,
        running_beam_indices=state.running_indices,
        cur_len=length,
        decoder_prompt_len=0,
        do_sample=False,
        beams_to_keep=rule.candidates,
        num_beams=NUM_BEAMS,
        batch_size=PROMPTS,
    )
    stops = torch.isin(top_sequences[:, :, length], eos) | (length + 1 >= LIMIT)
    running_sequences, running_scores, running_indices = HF._get_running_beams_for_next_iteration(
        topk_log_probs=top_scores,
        topk_running_sequences=top_sequences,
        topk_running_beam_indices=top_indices,
        next_token_hits_stopping_criteria=stops,
        num_beams=NUM_BEAMS,
    )
    sequences, scores, indices, is_finished = HF._update_finished_beams(
        sequences=state.sequences,
        topk_running_sequences=top_sequences,
        beam_scores=state.scores,
        topk_log_probs=top_scores,
        beam_indices=state.indices,
        topk_running_beam_indices=top_indices,
        is_early_stop_heuristic_unsatisfied=state.unsatisfied,
        is_sent_finished=state.is_finished,
        next_token_hits_stopping_criteria=stops,
        top_num_beam_mask=torch.arange(rule.candidates) < NUM_BEAMS,
        num_beams=NUM_BEAMS,
        cur_len=length,
        decoder_prompt_len=0,
        length_penalty=rule.length_penalty,
        early_stopping=rule.early_stopping,
    )
    unsatisfied = HF._check_early_stop_heuristic(
        is_early_stop_heuristic_unsatisfied=state.unsatisfied,
        running_beam_scores=running_scores,
        beam_scores=scores,
        is_sent_finished=is_finished,
        cur_len=length + 1,
        max_length=LIMIT,
        decoder_prompt_len=0,
        early_stopping=rule.early_stopping,
        length_penalty=rule.length_penalty,
    )
    running = (running_scores, running_sequences, running_indices)
    return HFState(*running, scores, sequences, indices, is_finished, unsatisfied, stops)


def assert_equal(result: BeamStep, hf: HFState, rule: BeamRule) -> None:
    ours = result.state
    offset = torch.arange(PROMPTS)[:, None, None] * NUM_BEAMS
    if bool((hf.running_scores > -1e8).all()):  # not in the last step, where nothing goes on
        assert torch.equal(ours.scores, hf.running_scores)
        assert torch.equal(ours.tokens, hf.running_sequences[:, :, : ours.steps])
        assert torch.equal(ours.ancestry + offset, hf.running_indices[:, :, : ours.steps])
    done = hf.is_finished
    assert torch.equal(~torch.isneginf(ours.done_scores), done)
    assert torch.equal(ours.done_scores[done], hf.scores[done])
    for row, (prompt, rank) in enumerate(done.nonzero().tolist()):
        ancestry = ours.done_ancestry[prompt, rank]
        length = int((ancestry >= 0).sum())
        assert length == int((hf.indices[done][row] >= 0).sum())
        assert torch.equal(ancestry[:length] + prompt * NUM_BEAMS, hf.indices[done][row, :length])
        assert torch.equal(ours.done_tokens[prompt, rank, :length], hf.sequences[done][row, :length])
        assert (ours.done_tokens[prompt, rank, length:] == -1).all()
    for prompt in range(PROMPTS):
        one = slice(prompt, prompt + 1)
        goes_on = HF._beam_search_has_unfinished_sequences(
            hf.unsatisfied[one], hf.is_finished[one], hf.stops[one], rule.early_stopping
        )
        assert bool(result.ended[prompt]) == (not bool(goes_on))


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("ends", [0, 1, 3])
def test_equals_hf_step_by_step(ends: int, penalty: float, stopping: EarlyStopping) -> None:
    """Also past the end of single prompts, which HF carries along until the last one ends."""
    generator = torch.Generator().manual_seed(10 * ends + int(penalty))
    eos = torch.randperm(VOCABULARY, generator=generator)[:ends]
    rule = make_rule(NUM_BEAMS, penalty, stopping, eos.tolist())
    for _ in range(5):
        ours, hf = BeamState.start(NUM_BEAMS, torch.full((PROMPTS,), LIMIT)), HFState.start()
        for length in range(LIMIT):
            logits = 3 * torch.randn((PROMPTS, NUM_BEAMS, VOCABULARY), generator=generator)
            hf = hf_step(hf, logits.log_softmax(-1), length, eos, rule)
            result = advance(ours, logits.log_softmax(-1), rule, eos.tolist())
            assert_equal(result, hf, rule)
            ours = result.state
            if result.ended.all():
                break
