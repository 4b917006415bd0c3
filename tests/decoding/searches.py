"""The call that most tests of this folder decode: prompts of different lengths that end at different steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from branchkv.decoding.beam_search import BeamSearcher, CandidatePicker
from branchkv.decoding.beam_step import BeamRule
from branchkv.decoding.draws import Argmax, Sampler, top_picker
from branchkv.decoding.protocol import Criterion, Processor
from branchkv.decoding.record import Recorder
from branchkv.decoding.sampling import SampleSearcher
from branchkv.decoding.step import Hypotheses, Search
from branchkv.tests.decoding.fake_model import Tokens, random_language, search_inputs
from branchkv.tests.decoding.list_beams import EarlyStopping

PROMPTS: tuple[Tokens, ...] = ((3,), (4, 1, 6, 5, 2, 6, 1), (2, 2, 5), (1, 6, 6, 2))
LENGTHS = [len(prompt) for prompt in PROMPTS]
LIMITS = (6, 3, 9, 1)
VOCABULARY = 9
EOS = (7, 8)
LANGUAGE = random_language(VOCABULARY, seed=5)


def beam_searcher(
    prompts: Sequence[Tokens] = PROMPTS,
    limits: Sequence[int] = LIMITS,
    *,
    num_beams: int = 4,
    penalty: float = 1.0,
    stopping: EarlyStopping = False,
    eos: Sequence[int] = EOS,
    candidates: int | None = None,
    pick: CandidatePicker = top_picker,
    processors: Sequence[Processor] = (),
    criteria: Sequence[Criterion] = (),
    recorder: Recorder | None = None,
) -> BeamSearcher:
    count = max(2, 1 + len(eos)) * num_beams if candidates is None else candidates
    rule = BeamRule(num_beams, penalty, stopping, count)
    inputs = search_inputs(prompts, limits, eos)
    return BeamSearcher(inputs, rule, pick, processors, criteria, recorder or no_record())


def sample_searcher(
    prompts: Sequence[Tokens] = PROMPTS,
    limits: Sequence[int] = LIMITS,
    *,
    n: int = 1,
    eos: Sequence[int] = EOS,
    sampler: Sampler | None = None,
    processors: Sequence[Processor] = (),
    criteria: Sequence[Criterion] = (),
    recorder: Recorder | None = None,
) -> SampleSearcher:
    inputs = search_inputs(prompts, limits, eos)
    return SampleSearcher(inputs, n, sampler or Argmax(), processors, criteria, recorder or no_record())


SEARCHES: dict[str, Callable[..., Search]] = {
    "beams": beam_searcher,
    "greedy": sample_searcher,
    "samples": partial(sample_searcher, n=3),  # all alike
}


def no_record() -> Recorder:
    return Recorder(0, keep_scores=False, keep_logits=False)


def generated(result: Hypotheses) -> list[Tokens]:
    """The tokens of each hypothesis, without what stands after its end."""
    return _until_end(result.tokens.tolist())


def ancestry(result: Hypotheses) -> list[Tokens]:
    assert result.ancestry is not None
    return _until_end(result.ancestry.tolist())


def worth(result: Hypotheses) -> list[float]:
    """The score of each hypothesis."""
    assert result.scores is not None
    values: list[float] = result.scores.tolist()
    return values


def _until_end(rows: list[list[int]]) -> list[Tokens]:
    for row in rows:
        ended = [value < 0 for value in row]
        assert ended == sorted(ended), "something stands after the end"
    return [tuple(value for value in row if value >= 0) for row in rows]


def assert_same(got: Sequence[Hypotheses], want: Sequence[Hypotheses]) -> None:
    """Equal prompt by prompt, but for empty columns: their number may follow from what else was in the batch."""
    for ours, theirs in zip(got, want, strict=True):
        assert generated(ours) == generated(theirs)
        if theirs.scores is not None:
            assert worth(ours) == worth(theirs)
            assert ancestry(ours) == ancestry(theirs)
