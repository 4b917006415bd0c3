"""What the right answer is, found without any code of branchkv.

Three independent sources: HuggingFace on one unpadded prompt (`hf_alone`), one plain forward over a finished text
(`rescore`), and the list of everything that could have been said (`exhaustive`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from support.families import FAMILIES, LLAMA_LIKE, MAX_NEW_TOKENS, Family, Inputs, alone, randomise

Settings = Mapping[str, Any]
Rescorer = Callable[[int, Sequence[int]], Sequence[float]]
SEED = 11  # given to torch's global generator before every run, so that sampled results can be compared
TIE = 1e-5  # two candidates nearer than this may come in either order: rounding decides


@dataclass(frozen=True)
class Hypothesis:
    """One returned row without prompt and padding.

    `score` is the search's own (the sum of `logprobs` where there are no beams); `beams` holds `beam_indices` counted
    from the prompt's first beam, and is None where there are no beams.
    """

    tokens: tuple[int, ...]
    score: float
    logprobs: tuple[float, ...]
    beams: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Result:
    """The hypotheses of each prompt, in the order returned."""

    prompts: tuple[tuple[Hypothesis, ...], ...]

    @property
    def rows(self) -> tuple[Hypothesis, ...]:
        """All hypotheses, prompt after prompt."""
        return tuple(itertools.chain.from_iterable(self.prompts))

    @property
    def early(self) -> float:
        """The share of rows that end before the limit."""
        return sum(len(row.tokens) < MAX_NEW_TOKENS for row in self.rows) / len(self.rows)


def run(generate: Callable[..., Any], model: hf.PreTrainedModel, inputs: Inputs, settings: Settings) -> Result:
    """Seed torch, call `generate(**inputs, **settings)` with scores, and read its output."""
    torch.manual_seed(SEED)
    output = generate(**inputs, **settings, return_dict_in_generate=True, output_scores=True)
    return read_output(model, inputs, output, num_beams=settings.get("num_beams", 1))


def hf_result(model: hf.PreTrainedModel, inputs: Inputs, settings: Settings) -> Result:
    """HF's `generate` on the batch as it is."""
    generate: Any = model.generate  # to a type checker an attribute of a module is a tensor or a module
    return run(generate, model, inputs, settings)


def hf_alone(model: hf.PreTrainedModel, inputs: Inputs, settings: Settings) -> Result:
    """HF's `generate` on each prompt alone and unpadded. No oracle for sampling: a batch draws other numbers."""
    prompts = (alone(inputs, i) for i in range(len(next(iter(inputs.values())))))
    return Result(tuple(hf_result(model, prompt, settings).prompts[0] for prompt in prompts))


def expected(family: Family, settings: Settings, n: int) -> Result:
    """What `generate` must return for `family.prompts(n)`: HF alone, or HF on the batch where it samples.

    Kept per prompt and settings, so that cells that differ in what HF does not know (the block size) cost one run.
    """
    key = tuple(sorted(settings.items()))
    if settings.get("do_sample"):
        return _hf_batch(family.name, key, n)
    return Result(tuple(_hf_prompt(family.name, key, i) for i in range(n)))


def oracle_model(family: Family) -> hf.PreTrainedModel:
    """The family's model, apart from `family.model`: nothing that is plugged into that one reaches the oracle."""
    return _oracle_model(family.name)


@cache
def _oracle_model(name: str) -> hf.PreTrainedModel:
    return FAMILIES[name].build()


@cache
def _hf_batch(name: str, settings: tuple[tuple[str, Any], ...], n: int) -> Result:
    return hf_result(_oracle_model(name), FAMILIES[name].prompts(n), dict(settings))


@cache
def _hf_prompt(name: str, settings: tuple[tuple[str, Any], ...], index: int) -> tuple[Hypothesis, ...]:
    prompt = alone(FAMILIES[name].prompts(index + 1), index)
    return hf_result(_oracle_model(name), prompt, dict(settings)).prompts[0]


def read_output(model: hf.PreTrainedModel, inputs: Inputs, output: Any, num_beams: int) -> Result:
    """Take the output of a `generate` (HF's or ours, with `output_scores`) apart into hypotheses.

    `logprobs` are picked out of the per-step `scores` along `beam_indices`, so their layout is compared as well.
    """
    count = len(next(iter(inputs.values())))
    per_prompt = len(output.sequences) // count
    start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    # Whisper's own generate repeats the inputs before the search, so every returned row is a prompt of its own there,
    # and it has already picked the scores of the returned rows.
    speech = model.main_input_name == "input_features"
    eos, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    ends = eos if isinstance(eos, list) else [eos]
    hypotheses = []
    for row, generated in enumerate(output.sequences[:, start:].tolist()):
        if (indices := getattr(output, "beam_indices", None)) is None:
            length, beams = next((i + 1 for i, token in enumerate(generated) if token in ends), len(generated)), None
            steps = [scores.log_softmax(-1) for scores in output.scores]
        else:
            first = num_beams * (row if speech else row // per_prompt)
            ancestry = [beam for beam in indices[row].tolist() if beam >= 0]
            length, beams = len(ancestry), tuple(beam - first for beam in ancestry)
            steps = output.scores
        tokens = tuple(generated[:length])
        assert set(generated[length:]) <= {pad}, f"row {row} is not padded after its end: {generated}"
        sources = [row] * length if beams is None or speech else ancestry
        logprobs = tuple(float(step[at, token]) for step, at, token in zip(steps, sources, tokens, strict=False))
        score = sum(logprobs) if beams is None else float(output.sequences_scores[row])
        hypotheses.append(Hypothesis(tokens, score, logprobs, beams))
    return Result(tuple(tuple(hypotheses[i * per_prompt : (i + 1) * per_prompt]) for i in range(count)))


def assert_same(
    got: Result,
    want: Result,
    *,
    score_tol: float = 1e-4,
    rescorer: Rescorer | None = None,
    length_penalty: float = 1.0,
) -> int:
    """Fail unless tokens and beams are equal and scores within `score_tol` * max(1, |score|); return ties forgiven.

    With a `rescorer`, other tokens are forgiven where both choices are worth the same to within `TIE` in one plain
    forward: the whole hypothesis with beams, the first token that differs without. Draws are never forgiven, they do
    not follow from the scores: pass no rescorer. Callers check that the returned count stays near zero.
    """
    shapes = [[len(prompt) for prompt in result.prompts] for result in (got, want)]
    assert shapes[0] == shapes[1], f"hypotheses per prompt: got {shapes[0]}, want {shapes[1]}"
    forgiven = 0
    for i, (ours, theirs) in enumerate(zip(got.prompts, want.prompts, strict=True)):
        for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            where = f"prompt {i}, rank {rank}:\n  got  {a}\n  want {b}"
            if a.tokens != b.tokens:
                gap = None if rescorer is None else _gap(partial(rescorer, i), a, b, length_penalty)
                assert gap is not None and gap <= TIE, f"tokens differ (rescored gap {gap}), {where}"
                assert a.beams is None or _close(a.score, b.score, score_tol), f"scores differ, {where}"
                forgiven += 1
                continue
            assert a.beams == b.beams, f"beam_indices differ, {where}"
            pairs = [(a.score, b.score), *zip(a.logprobs, b.logprobs, strict=True)]
            bad = [pair for pair in pairs if not _close(*pair, score_tol)]
            assert not bad, f"scores differ, (got, want) {bad}, {where}"
    return forgiven


def _close(a: float, b: float, tolerance: float) -> bool:
    return a == b or abs(a - b) <= tolerance * max(1.0, abs(b))


def _gap(score: Callable[[Sequence[int]], Sequence[float]], a: Hypothesis, b: Hypothesis, penalty: float) -> float:
    """How much better one choice is than the other, by plain forwards."""
    if a.beams is None:
        forks = [t for t, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y]
        if not forks:
            return float("inf")  # one stopped inside the other: that is no choice between two tokens
        worth = [score(row.tokens[: forks[0] + 1])[-1] for row in (a, b)]
    else:
        worth = [sum(score(row.tokens)) / len(row.tokens) ** penalty if row.tokens else -1e9 for row in (a, b)]
    return abs(worth[0] - worth[1]) / max(1.0, abs(worth[1]))


def log_probs(model: hf.PreTrainedModel, prompt: Inputs, continuations: Tensor) -> Tensor:
    """Log-probabilities [n, T, V] of what may stand at each of T places, given the tokens [n, T] before it.

    One forward without a cache; `prompt` is a batch of one without padding.
    """
    rows = len(continuations)
    inputs = {name: value.expand(rows, *value.shape[1:]) for name, value in prompt.items()}
    if model.config.is_encoder_decoder:
        start = torch.full((rows, 1), model.generation_config.decoder_start_token_id)
        inputs["decoder_input_ids"] = torch.cat([start, continuations[:, :-1]], dim=1)
    else:
        inputs = {"input_ids": torch.cat([inputs["input_ids"], continuations[:, :-1]], dim=1)}
    with torch.no_grad():
        logits: Tensor = model(**inputs, use_cache=False).logits
    return logits[:, -continuations.shape[1] :].float().log_softmax(-1)


def rescore(model: hf.PreTrainedModel, prompt: Inputs, tokens: Sequence[int]) -> list[float]:
    """The log-probability of each of `tokens` after `prompt`, by one forward without a cache."""
    chosen = torch.tensor([list(tokens)])
    return [float(value) for value in log_probs(model, prompt, chosen).gather(2, chosen[..., None])[0, :, 0]]


def rescorer(model: hf.PreTrainedModel, inputs: Inputs) -> Rescorer:
    """`rescore` for the prompts of a batch, as `assert_same` takes it."""
    return lambda prompt, tokens: rescore(model, alone(inputs, prompt), tokens)


def exhaustive(
    model: hf.PreTrainedModel,
    prompt: Inputs,
    *,
    eos: Iterable[int],
    vocab: int,
    length: int,
    length_penalty: float = 1.0,
) -> list[Hypothesis]:
    """Every hypothesis that ends with an `eos` or at `length` tokens, best first (feasible for tiny `vocab` only)."""
    ends = set(eos)
    words = [token for token in range(vocab) if token not in ends]
    texts = [
        (*words_before, last)
        for n in range(1, length + 1)
        for words_before in itertools.product(words, repeat=n - 1)
        for last in (range(vocab) if n == length else sorted(ends))
    ]
    # Texts are padded to one length with any token: a causal model does not look ahead.
    padded = torch.tensor([text + (0,) * (length - len(text)) for text in texts])
    picked = log_probs(model, prompt, padded).gather(2, padded[..., None])[..., 0].tolist()
    cut = [(text, tuple(row[: len(text)])) for text, row in zip(texts, picked, strict=True)]
    found = [Hypothesis(text, sum(logprobs) / len(text) ** length_penalty, logprobs) for text, logprobs in cut]
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def tiny_exhaustive_model(seed: int = 0) -> hf.PreTrainedModel:
    """A llama with a vocabulary of 5 (end 2, pad 1): 341 hypotheses of up to 4 tokens."""
    options = LLAMA_LIKE | {"vocab_size": 5, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**options))
    model.eval()
    randomise(model, seed)
    return model
