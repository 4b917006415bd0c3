"""How many blocks a call holds at each step: one per distinct prefix of beams, and by ancestry for samples."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch

from branchkv.decoding.draws import StreamDraws
from branchkv.tests.decoding.fake_model import WINDOW, Tokens, decode, make_cache
from branchkv.tests.decoding.searches import LANGUAGE, PROMPTS, beam_searcher, sample_searcher

pytestmark = pytest.mark.usefixtures("one_thread")

block_sizes = pytest.mark.parametrize("block_size", [1, 2, 3, 16])


@block_sizes
def test_beams_hold_one_block_per_distinct_prefix(block_size: int) -> None:
    run = decode(LANGUAGE, PROMPTS, beam_searcher(num_beams=5), make_cache(block_size))
    unshared = []
    for seen in run.model.seen:
        assert len(set(seen.histories)) == len(seen.histories), "live beams are distinct"
        prefixes: dict[int, set[tuple[int, Tokens]]] = defaultdict(set)
        for prompt, text in zip(seen.prompts, seen.histories, strict=True):
            prefixes[prompt] |= {(start, text[: start + block_size]) for start in range(0, len(text), block_size)}
        assert seen.held["full"] == sum(map(len, prefixes.values()))
        unshared.append(sum(-(-len(text) // block_size) for text in seen.histories))
    held = [seen.held["full"] for seen in run.model.seen]
    unshared[0] *= 5  # from the prefill on a prompt counts as its beams
    stats = run.cache.stats.result().by_kind["full"]
    assert (stats.peak_blocks, stats.peak_blocks_unshared) == (max(held), max(unshared))
    assert stats.saved_mean == pytest.approx(
        sum(1 - h / u for h, u in zip(held, unshared, strict=True)) / len(held), rel=1e-12
    )


@block_sizes
@pytest.mark.parametrize("drawn", [True, False])
def test_samples_share_the_full_blocks_of_their_prompt(block_size: int, drawn: bool) -> None:
    """Samples that say the same words (here all of them, when not `drawn`) do not share what they say."""
    sampler = StreamDraws(3, range(len(PROMPTS)), 3) if drawn else None
    run = decode(LANGUAGE, PROMPTS, sample_searcher(n=3, sampler=sampler), make_cache(block_size))
    assert len(run.model.seen) > 2
    for number, seen in enumerate(run.model.seen):
        expected = 0
        for prompt, samples in Counter(seen.prompts).items():
            length = len(PROMPTS[prompt]) + number
            if number == 0:
                expected += -(-length // block_size)
            else:
                full = len(PROMPTS[prompt]) // block_size
                expected += full + samples * (-(-length // block_size) - full)
        assert seen.held["full"] == expected


@block_sizes
def test_what_has_left_the_window_is_given_back(block_size: int) -> None:
    """A row holds at most the blocks that the windows of its newest token and of the one before it touch."""
    run = decode(LANGUAGE, PROMPTS, beam_searcher(num_beams=5), make_cache(block_size))
    touched = WINDOW // block_size + 2 if block_size > 1 else WINDOW + 1
    for seen in run.model.seen[1:]:
        assert seen.held["window"] <= touched * len(seen.histories)
        assert seen.held["window"] <= seen.held["full"]
    if block_size < 3:
        assert run.model.seen[-1].held["window"] < run.model.seen[-1].held["full"]


def test_a_block_that_is_at_least_the_whole_text_saves_only_in_the_prefill() -> None:
    run = decode(LANGUAGE, PROMPTS, beam_searcher(num_beams=5), make_cache(block_size=64))
    assert [seen.held["full"] for seen in run.model.seen[1:]] == [len(seen.histories) for seen in run.model.seen[1:]]
    assert run.model.seen[0].held["full"] == len(PROMPTS)


@block_sizes
def test_copies_are_made_for_part_filled_blocks_only(block_size: int) -> None:
    """Every beam goes on once: no copies but those of the prompt's own tail, one less than the beams."""
    language = torch.tensor([0.0, -50.0, -50.0])
    for length in (3, 4, 6):
        prompt = (1,) * length
        search = sample_searcher([prompt], (4,), n=4, eos=())
        run = decode(lambda history: language, [prompt], search, make_cache(block_size))
        copied = run.cache.stats.result().by_kind["full"].blocks_copied
        assert copied == (3 if length % block_size else 0)
