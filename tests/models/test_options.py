"""Every option of generate is applied, has no effect, or is refused by name before anything runs: none is dropped."""

from __future__ import annotations

import inspect
import itertools
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch.nn.modules.module import register_module_forward_pre_hook

import branchkv
from support.families import EOS, FAMILIES, PAD
from support.oracle import oracle_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using the model-agnostic default"),
]

Row = tuple[list[int], list[int]]  # prompt, and generated tokens up to and with the end
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "beam sample": {"num_beams": 3, "num_return_sequences": 3, "do_sample": True},
}
ALL, DRAWN = ("greedy", "beams"), ("sample", "beam sample")
FIELDS = set(vars(hf.GenerationConfig()))


def tiny_tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token per character, 40 in all; ids 0 to 5 are special."""
    words = ["<unk>", "<pad>", "<s>", "</s>", "<e4>", "<e5>", *string.ascii_lowercase, *" .,!?-:;"]
    tokenizer = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@dataclass(frozen=True)
class Applied:
    """An option that changes HF's own result in `modes`; rows must obey it. `base` is given with and without it."""

    value: Any
    modes: tuple[str, ...] = ALL
    obeyed: Callable[[list[int], list[int]], bool] = lambda prompt, tokens: True
    family: str = "llama"
    base: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None  # a known fault of ours


class Refused(NamedTuple):
    value: Any
    modes: tuple[str, ...] = ALL
    fault: str | None = None


class Inert(NamedTuple):
    value: Any
    reason: str
    modes: tuple[str, ...] = ALL
    fault: str | None = None


def without(*banned: int) -> Callable[[list[int], list[int]], bool]:
    return lambda prompt, tokens: not set(banned) & set(tokens)


def no_repeated_bigram(prompt: list[int], tokens: list[int]) -> bool:
    pairs = list(itertools.pairwise(prompt + tokens))
    return len(set(pairs)) == len(pairs)


def after_ten_no_eight(prompt: list[int], tokens: list[int]) -> bool:
    return (10, 8) not in itertools.pairwise(tokens) and 30 not in tokens


def ends_at_y_a(prompt: list[int], tokens: list[int]) -> bool:
    return (30, 6) not in itertools.pairwise(tokens[:-1])


def ends_at_29_or_31(prompt: list[int], tokens: list[int]) -> bool:
    return all(set(tokens[i + 1 :]) <= {PAD} for i, token in enumerate(tokens) if token in (29, 31))


APPLIED: dict[str, Applied] = {
    "max_length": Applied(14, ALL, lambda prompt, tokens: len(tokens) <= 5, base={"max_new_tokens": None}),
    "max_new_tokens": Applied(4, ALL, lambda prompt, tokens: len(tokens) <= 4),
    "min_length": Applied(16, ALL, lambda prompt, tokens: len(prompt + tokens) > 16),
    "min_new_tokens": Applied(7, ALL, lambda prompt, tokens: len(tokens) > 7),
    "early_stopping": Applied(True, ("beams",), base={"num_beams": 5, "num_return_sequences": 5}),
    "max_time": Applied(1e-9, ALL, lambda prompt, tokens: len(tokens) == 1),
    "stop_strings": Applied("ya", ALL, ends_at_y_a, base={"tokenizer": tiny_tokenizer()}),
    "do_sample": Applied(True, ("greedy", "beams")),
    "num_beams": Applied(4, ("greedy", "beam sample")),
    "num_return_sequences": Applied(2, ("sample", "beams", "beam sample")),
    "temperature": Applied(0.4, DRAWN),
    "top_k": Applied(3, DRAWN),
    "top_p": Applied(0.4, DRAWN),
    "min_p": Applied(0.3, DRAWN),
    "top_h": Applied(0.4, DRAWN),
    "typical_p": Applied(0.3, DRAWN),
    "epsilon_cutoff": Applied(0.1, DRAWN),
    "eta_cutoff": Applied(0.1, DRAWN),
    "repetition_penalty": Applied(3.0),
    "encoder_repetition_penalty": Applied(2.0, family="bart"),
    "length_penalty": Applied(-1.0, ("beams", "beam sample")),
    "no_repeat_ngram_size": Applied(2, ("beams",), no_repeated_bigram, family="bart"),
    "bad_words_ids": Applied([[30], [10, 8]], ALL, after_ten_no_eight),
    "renormalize_logits": Applied(True, ("beams", "beam sample"), base={"repetition_penalty": 1.5}),
    "forced_bos_token_id": Applied(20, ALL, lambda prompt, tokens: tokens[0] == 20, family="bart"),
    "forced_eos_token_id": Applied(4, ALL, lambda prompt, tokens: tokens[-1] in EOS, base={"min_new_tokens": 11}),
    "exponential_decay_length_penalty": Applied((2, 3.0), ALL, lambda prompt, tokens: len(tokens) < 12),
    "suppress_tokens": Applied([30, 6, 10], ALL, without(30, 6, 10)),
    "begin_suppress_tokens": Applied([30, 5], ALL, lambda prompt, tokens: tokens[0] not in (30, 5)),
    "sequence_bias": Applied([[[30], -50.0], [[8, 18], 4.0]], ALL, without(30)),
    "guidance_scale": Applied(1.8, ("greedy",)),
    "watermarking_config": Applied(hf.WatermarkingConfig(bias=3.0, context_width=2, seeding_scheme="selfhash")),
    "eos_token_id": Applied([29, 31], ALL, ends_at_29_or_31),
    "encoder_no_repeat_ngram_size": Applied(
        1, ALL, lambda prompt, tokens: not set(prompt) & set(tokens), "bart", {"bad_words_ids": [[38]]}
    ),
    "decoder_start_token_id": Applied(9, family="bart"),
    "is_assistant": Applied(True, ("greedy",)),
    "assistant_confidence_threshold": Applied(0.15, ("greedy",), base={"is_assistant": True}),
}
REFUSED: dict[str, Refused] = {
    "use_mtp": Refused(True),
    "cache_implementation": Refused("static"),
    "cache_config": Refused({"a": 1}),
    "guidance_scale": Refused(
        1.8, ("beams", "beam sample")
    ),  # HF's processor keeps a cache that does not follow the beams
    "output_attentions": Refused(True),
    "output_hidden_states": Refused(True),
    "prompt_lookup_num_tokens": Refused(2),
    "assistant_early_exit": Refused(1),
    "compile_config": Refused(hf.CompileConfig()),
    "continuous_batching_config": Refused({"a": 1}),
    "penalty_alpha": Refused(0.6, ("greedy",)),
    "dola_layers": Refused("low", ("greedy", "sample")),
    "num_beam_groups": Refused(3, ("beams", "beam sample")),
    "constraints": Refused([1]),
    "force_words_ids": Refused([[7]]),
    "prefill_chunk_size": Refused(2),
    "assistant_model": Refused(oracle_model(FAMILIES["bart"])),
    "synced_gpus": Refused(True),
    "custom_generate": Refused(branchkv.decode),
    "cache": Refused(hf.DynamicCache()),
    "past_key_values": Refused(hf.DynamicCache()),
}
ASSISTED, AS_IN_HF = "read by assisted decoding only", "in the modes where it is not refused HF ignores it, too"
INERT: dict[str, Inert] = {
    "use_cache": Inert(False, "a cache never changes a result"),
    "cache_implementation": Inert("dynamic", "what HF takes by default"),
    "max_cache_len": Inert(99, "for HF's static cache"),
    "num_assistant_tokens": Inert(5, ASSISTED),
    "num_assistant_tokens_schedule": Inert("heuristic", ASSISTED),
    "max_matching_ngram_size": Inert(3, ASSISTED),
    "assistant_lookbehind": Inert(3, ASSISTED),
    "target_lookbehind": Inert(3, ASSISTED),
    "assistant_ensemble_weight": Inert(0.5, ASSISTED),
    "speculation_type": Inert("dflash", ASSISTED),
    "disable_compile": Inert(True, "nothing is compiled"),
    "low_memory": Inert(True, AS_IN_HF, ("greedy", "sample")),
    "penalty_alpha": Inert(0.6, AS_IN_HF, ("sample", "beams")),
    "dola_layers": Inert("low", AS_IN_HF, ("beams",)),
    "num_beam_groups": Inert(3, AS_IN_HF, ("greedy", "sample")),
    "diversity_penalty": Inert(1.0, "for group beam search only"),
    "_from_model_config": Inert(True, "says where the config came from"),
    "transformers_version": Inert("5.0.0", "says where the config came from"),
    "negative_prompt_ids": Inert(torch.tensor([[7, 8]]), "for guidance_scale only"),
    "negative_prompt_attention_mask": Inert(torch.tensor([[1, 1]]), "for guidance_scale only"),
}
ELSEWHERE = {
    "remove_invalid_values": "test_remove_invalid_values",
    "token_healing": "test_token_healing",
    "bos_token_id": "test_bad_input.py",
    "pad_token_id": "test_ragged_processors.py",
    "return_dict_in_generate": "test_session.py",
    "output_scores": "test_session.py",
    "output_logits": "test_session.py",
    "logits_processor": "test_ragged_processors.py",
    "stopping_criteria": "test_ragged_processors.py",
    "prefix_allowed_tokens_fn": "test_ragged_processors.py",
    "streamer": "test_session.py",
    "generation_config": "test_options_in_a_positional_config",
    "inputs": "test_options_in_a_positional_config",
    "kwargs": "everything",
}


def test_every_option_is_in_a_category() -> None:
    arguments = set(inspect.signature(hf.GenerationMixin.generate).parameters) - {"self"}
    missing = (FIELDS | arguments) - {*APPLIED, *REFUSED, *INERT, *ELSEWHERE}
    assert not missing, "a new option: say here whether it is applied, refused or without effect"


def cells(table: Mapping[str, Applied | Refused | Inert]) -> list[Any]:
    marks = {name: [pytest.mark.xfail(strict=True, reason=o.fault)] if o.fault else [] for name, o in table.items()}
    return [
        pytest.param(name, mode, marks=marks[name], id=f"{name}-{mode}")
        for name, option in table.items()
        for mode in option.modes
    ]


def output(generate: Callable[..., Any], family: str, settings: dict[str, Any], prompts: int = 1) -> Any:
    torch.manual_seed(11)
    inputs = FAMILIES[family].prompts(prompts)
    return generate(**inputs, **settings, return_dict_in_generate=True, output_scores=True)


def ours(family: str, settings: dict[str, Any], prompts: int = 1) -> Any:
    return output(partial(branchkv.generate, FAMILIES[family].model), family, settings, prompts)


def theirs(family: str, settings: dict[str, Any], prompts: int = 1) -> Any:
    generate: Any = oracle_model(FAMILIES[family]).generate
    return output(generate, family, settings, prompts)


def assert_equal(a: Any, b: Any) -> None:
    """Same rows, beams and scores; steps at which a row of `a` has left (-inf) are not compared."""
    assert a.sequences.tolist() == b.sequences.tolist()
    if "beam_indices" in b:
        assert a.beam_indices.tolist() == b.beam_indices.tolist()
        torch.testing.assert_close(a.sequences_scores, b.sequences_scores, atol=1e-4, rtol=1e-4)
    assert len(a.scores) == len(b.scores)
    for x, y in zip(a.scores, b.scores, strict=True):
        live = ~x.isneginf().all(1)
        torch.testing.assert_close(x[live], y[live], atol=1e-4, rtol=1e-4)


def rows_of(family: str, result: Any) -> Iterator[Row]:
    start = 1 if FAMILIES[family].kind == "encoder-decoder" else 9
    prompt = FAMILIES[family].prompts(1)["input_ids"][0].tolist()
    for row, tokens in enumerate(result.sequences[:, start:].tolist()):
        ends = [i + 1 for i, token in enumerate(tokens) if token in EOS]
        parents = result.beam_indices[row].tolist() if "beam_indices" in result else []
        yield prompt, tokens[: sum(parent >= 0 for parent in parents) or min([*ends, len(tokens)])]


@pytest.mark.parametrize(("name", "mode"), cells(APPLIED))
def test_applied(name: str, mode: str) -> None:
    option = APPLIED[name]
    base = {"max_new_tokens": 12, **MODES[mode], **option.base}
    settings = base | {name: option.value}
    expected = theirs(option.family, settings)
    with pytest.raises(AssertionError):
        assert_equal(theirs(option.family, {k: v for k, v in base.items() if k != "tokenizer"}), expected)
    result = ours(option.family, settings)
    assert_equal(result, expected)
    assert all(option.obeyed(*row) for row in rows_of(option.family, result))


@contextmanager
def counted_forwards() -> Iterator[list[str]]:
    seen: list[str] = []
    handle = register_module_forward_pre_hook(lambda module, inputs: seen.append(type(module).__name__))
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize(("name", "mode"), cells(REFUSED))
def test_refused_by_name_before_anything_runs(name: str, mode: str) -> None:
    with counted_forwards() as forwards, pytest.raises(branchkv.UnsupportedOptionError) as error:
        ours("bart", {"max_new_tokens": 4, **MODES[mode], name: REFUSED[name].value})
    assert not forwards
    assert error.value.option == name
    assert name in str(error.value)


@pytest.mark.parametrize(("name", "mode"), cells(INERT))
def test_without_effect(name: str, mode: str) -> None:
    settings = {"max_new_tokens": 6, **MODES[mode]}
    assert_equal(ours("llama", settings | {name: INERT[name].value}), ours("llama", settings))


def test_low_memory_is_refused_as_by_hf_with_beams() -> None:
    with counted_forwards() as forwards, pytest.raises(ValueError, match="low_memory"):
        ours("bart", {"num_beams": 3, "low_memory": True})
    assert not forwards


def test_options_in_a_positional_config() -> None:
    model, prompt = FAMILIES["bart"].model, FAMILIES["bart"].prompts(1)["input_ids"]
    refused = hf.GenerationConfig(num_beams=3, num_beam_groups=3)
    with counted_forwards() as forwards, pytest.raises(branchkv.UnsupportedOptionError, match="num_beam_groups"):
        branchkv.generate(model, prompt, refused)
    assert not forwards
    config = hf.GenerationConfig(num_beams=3, max_new_tokens=5, suppress_tokens=[38])
    expected = oracle_model(FAMILIES["bart"]).generate(prompt, config)  # type: ignore[operator]
    assert branchkv.generate(model, prompt, config).tolist() == expected.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_remove_invalid_values(mode: str) -> None:
    model = FAMILIES["llama"].build()
    with torch.no_grad():
        model.get_output_embeddings().weight[9] = float("nan")
    settings = {"max_new_tokens": 4, "remove_invalid_values": True, **MODES[mode]}
    generate: Any = model.generate
    assert_equal(output(partial(branchkv.generate, model), "llama", settings), output(generate, "llama", settings))


@pytest.mark.parametrize("mode", MODES)
def test_token_healing(mode: str) -> None:
    settings = {"max_new_tokens": 6, "token_healing": True, "tokenizer": tiny_tokenizer(), **MODES[mode]}
    try:
        result = ours("llama", settings)
    except branchkv.UnsupportedOptionError as error:
        assert error.option == "token_healing"
    else:
        assert_equal(result, theirs("llama", settings))
