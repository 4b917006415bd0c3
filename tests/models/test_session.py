"""The ways in besides `generate`; streams of samples; what comes out; what is left behind after errors."""

from __future__ import annotations

import itertools
import string
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation import utils as hf_generation
from transformers.generation.streamers import BaseStreamer

import branchkv
from support.families import EOS, FAMILIES, PAD, alone
from support.oracle import oracle_model

pytestmark = pytest.mark.usefixtures("one_thread")

generate: Any = branchkv.generate
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sample": {"num_beams": 3, "do_sample": True},
}
each_mode = pytest.mark.parametrize("mode", MODES)


def fresh(family: str) -> Any:
    return FAMILIES[family].build()


def seeded(decode: Callable[..., Any], inputs: dict[str, Tensor], **options: Any) -> Any:
    torch.manual_seed(3)
    return decode(**inputs, **{"max_new_tokens": 10, **options})


def hf_rows(family: str, inputs: dict[str, Tensor], **options: Any) -> list[list[int]]:
    model: Any = oracle_model(FAMILIES[family])
    rows: list[list[int]] = seeded(model.generate, inputs, **options).tolist()
    return rows


# paged


def test_a_pipeline_runs_unmodified() -> None:
    words = ["<unk>", "<pad>", "<s>", "</s>", "<e4>", "<e5>", *string.ascii_lowercase, *" .,!?-:;"]
    characters = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    characters.decoder = decoders.Fuse()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="</s>")
    model = fresh("llama")
    pipe: Any = hf.pipeline("text-generation", model=model, tokenizer=tokenizer)
    ask = partial(pipe, ["hello you", "ab"], batch_size=2, do_sample=False, num_beams=4, max_new_tokens=6)
    expected = ask(num_return_sequences=2)
    with branchkv.paged(model) as session:
        assert ask(num_return_sequences=2) == expected
    assert (session.calls, session.unpaged, session.stats.prefill_tokens) == (1, 0, 11)


def test_counters_are_summed_and_peaks_are_the_larger() -> None:
    model, kv = fresh("llama"), branchkv.KVConfig(block_size=4)
    asks = [(FAMILIES["llama"].prompts(n), {"num_beams": beams, "max_new_tokens": 8}) for n, beams in ((1, 3), (4, 2))]
    with branchkv.paged(model, kv) as session:
        for inputs, options in asks:
            model.generate(**inputs, **options)
    parts = [generate(model, **i, **o, kv=kv, return_dict_in_generate=True).kv.to_dict() for i, o in asks]
    total = session.stats.to_dict()
    for counter in ("forks", "blocks_copied", "prefill_tokens", "steps"):
        assert total[counter] == sum(part[counter] for part in parts) > 0
    for peak in ("peak_blocks", "peak_blocks_unshared", "peak_bytes", "bytes_per_block"):
        assert total[peak] == max(part[peak] for part in parts) > 0
    assert total["by_kind"]["full"]["blocks_copied"] == total["blocks_copied"]
    assert session.calls == 2


def test_what_is_not_supported_goes_to_hf_with_one_warning_per_option() -> None:
    model, inputs = fresh("llama"), FAMILIES["llama"].prompts(1)
    unsupported: list[dict[str, Any]] = [{"output_attentions": True}, {"prompt_lookup_num_tokens": 2}]
    expected = [hf_rows("llama", inputs, **options) for options in unsupported]
    with branchkv.paged(model) as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert [seeded(model.generate, inputs, **options).tolist() for options in unsupported] == expected
        dict_out = model.generate(**inputs, output_attentions=True, return_dict_in_generate=True, max_new_tokens=3)
    assert len(dict_out.attentions) == 3
    messages = [str(warning.message) for warning in caught if "not paged" in str(warning.message)]
    assert ["output_attentions" in messages[0], "prompt_lookup_num_tokens" in messages[1]] == [True, True]
    assert len(messages) == 2
    assert (session.calls, session.unpaged) == (0, 5)


def test_generate_is_given_back_also_after_errors_and_inside_another_session() -> None:
    model, inputs = fresh("llama"), FAMILIES["llama"].prompts(1)
    with pytest.raises(KeyboardInterrupt), branchkv.paged(model):
        raise KeyboardInterrupt
    assert "generate" not in vars(model)
    with branchkv.paged(model) as outer:
        with branchkv.paged(model, branchkv.KVConfig(block_size=2)) as inner:
            assert seeded(model.generate, inputs).tolist() == hf_rows("llama", inputs)
        with pytest.raises(ValueError, match="max_length"):
            model.generate(**inputs, max_length=2)
        assert seeded(model.generate, inputs, num_beams=3).tolist() == hf_rows("llama", inputs, num_beams=3)
        assert (outer.calls, inner.calls) == (1, 1)
        assert (outer.stats.block_size, inner.stats.block_size) == (16, 2)
    assert "generate" not in vars(model)
    model.generate = own = partial(type(model).generate, model)
    with branchkv.paged(model):
        assert model.generate is not own
    assert model.generate is own


def test_settings_that_cannot_be_honoured_are_refused_on_entering() -> None:
    model = fresh("llama")
    with pytest.raises(branchkv.UnsupportedOptionError, match="prefix_caching"):
        branchkv.paged(model, branchkv.KVConfig(prefix_caching=True)).__enter__()
    assert "generate" not in vars(model)


# custom_generate


@each_mode
@pytest.mark.parametrize("family", ["llama", "bart", "t5"])
def test_the_hook_equals_hf(family: str, mode: str) -> None:
    inputs = FAMILIES[family].prompts(4)
    hook = {"custom_generate": branchkv.decode, "kv": branchkv.KVConfig(block_size=3)}
    ours = seeded(FAMILIES[family].model.generate, inputs, **MODES[mode], **hook)  # type: ignore[arg-type]
    assert ours.tolist() == hf_rows(family, inputs, **MODES[mode])


def test_the_hook_takes_kv_and_seed_and_returns_statistics() -> None:
    model, inputs = fresh("llama"), FAMILIES["llama"].prompts(2)
    options = {
        "do_sample": True,
        "num_return_sequences": 3,
        "seed": 5,
        "return_dict_in_generate": True,
        "max_new_tokens": 10,
    }
    hook = {"custom_generate": branchkv.decode, "kv": branchkv.KVConfig(block_size=2)}
    ours = seeded(model.generate, inputs, **options, **hook)
    assert ours.sequences.tolist() == seeded(partial(generate, model), inputs, **options).sequences.tolist()
    assert ours.kv.block_size == 2
    with pytest.raises(branchkv.UnsupportedOptionError, match="output_attentions"):
        model.generate(**inputs, max_new_tokens=3, custom_generate=branchkv.decode, output_attentions=True)


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("options", [{}, {"do_sample": True}])
def test_a_streamer_is_told_the_prompt_and_each_token(options: dict[str, Any]) -> None:
    inputs, streamers = FAMILIES["llama"].prompts(1), (Collector(), Collector())
    rows = seeded(partial(generate, FAMILIES["llama"].model), inputs, streamer=streamers[0], **options)
    assert hf_rows("llama", inputs, streamer=streamers[1], **options) == rows.tolist()
    assert streamers[0].pieces == streamers[1].pieces
    assert list(itertools.chain(*streamers[0].pieces)) == rows[0].tolist()
    assert streamers[0].ends == streamers[1].ends == 1


def test_a_streamer_of_several_rows_is_told_all_of_them_in_every_step() -> None:
    inputs, streamers = FAMILIES["llama"].prompts(2), (Collector(), Collector())
    seeded(partial(generate, FAMILIES["llama"].model), inputs, streamer=streamers[0])
    hf_rows("llama", inputs, streamer=streamers[1])
    assert streamers[0].pieces == streamers[1].pieces


# Streams of samples


def samples(prompts: dict[str, Tensor], n: int, seed: int = 7, **options: Any) -> list[list[list[int]]]:
    """New tokens per prompt and sample, without padding."""
    start = prompts["input_ids"].shape[1]
    asked = {"do_sample": True, "num_return_sequences": n, "max_new_tokens": 10, "temperature": 1.2, **options}
    rows = generate(FAMILIES["llama"].model, **prompts, **asked, seed=seed)[:, start:].tolist()
    cut = [row[: next((i + 1 for i, token in enumerate(row) if token in EOS), len(row))] for row in rows]
    return [cut[i : i + n] for i in range(0, len(cut), n)]


def test_a_seed_gives_the_same_samples_and_leaves_the_global_generator_alone() -> None:
    batch = FAMILIES["llama"].prompts(4)
    before = torch.get_rng_state()
    first = samples(batch, 8)
    assert samples(batch, 8) == first != samples(batch, 8, seed=8)
    assert torch.equal(before, torch.get_rng_state())
    assert all(len({tuple(sample) for sample in prompt}) >= 6 for prompt in first)


def test_a_sample_does_not_change_when_n_grows() -> None:
    batch = FAMILIES["llama"].prompts(4)
    assert samples(batch, 2) == [prompt[:2] for prompt in samples(batch, 7)]
    assert samples(batch, 1) == [prompt[:1] for prompt in samples(batch, 7)]


def test_a_prompts_stream_is_that_of_its_place_in_the_call() -> None:
    """Split over calls, a prompt keeps its samples only where it keeps its place: `generate` takes no ids."""
    batch = FAMILIES["llama"].prompts(4)
    together = samples(batch, 3)
    assert samples(alone(batch, 0), 3) == together[:1]
    assert samples({name: rows[:2] for name, rows in batch.items()}, 3) == together[:2]
    swapped = samples({name: rows[[1, 0, 2, 3]] for name, rows in batch.items()}, 3)
    assert swapped[2:] == together[2:]
    assert swapped[:1] == samples(alone(batch, 1), 3)
    assert swapped[0] != together[1]


def test_beam_sampling_has_one_stream_per_prompt() -> None:
    batch = FAMILIES["llama"].prompts(2)
    first = samples(batch, 3, num_beams=3)
    assert samples(batch, 3, num_beams=3) == first != samples(batch, 3, num_beams=3, seed=8)
    assert samples(batch, 1, num_beams=3) == [prompt[:1] for prompt in first]
    assert samples(alone(batch, 0), 3, num_beams=3) == first[:1]


# What comes out


CLASSES = {
    ("llama", "greedy"): hf_generation.GenerateDecoderOnlyOutput,
    ("llama", "beams"): hf_generation.GenerateBeamDecoderOnlyOutput,
    ("bart", "greedy"): hf_generation.GenerateEncoderDecoderOutput,
    ("bart", "beams"): hf_generation.GenerateBeamEncoderDecoderOutput,
}


@pytest.mark.parametrize(("family", "mode"), CLASSES)
def test_outputs_are_of_hfs_classes_and_carry_the_statistics(family: str, mode: str) -> None:
    call = partial(generate, FAMILIES[family].model)
    plain = seeded(call, FAMILIES[family].prompts(1), **MODES[mode])
    output = seeded(call, FAMILIES[family].prompts(1), **MODES[mode], return_dict_in_generate=True)
    assert type(plain) is Tensor
    assert isinstance(output, CLASSES[family, mode])
    assert output.sequences.tolist() == plain.tolist()
    assert isinstance(output.kv, branchkv.KVStats)
    assert "kv" not in output
    assert output.past_key_values is None
    assert set(output) == {"sequences"} | ({"beam_indices"} if mode == "beams" else set())


@each_mode
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_scores_and_logits_have_hfs_rows_and_are_minus_infinity_where_a_prompt_has_left(family: str, mode: str) -> None:
    asked = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, **MODES[mode]}
    model: Any = oracle_model(FAMILIES[family])
    inputs = FAMILIES[family].prompts(5)
    ours = seeded(partial(generate, FAMILIES[family].model), inputs, **asked)
    theirs = seeded(model.generate, inputs, **asked)
    width = MODES[mode].get("num_beams") or MODES[mode].get("num_return_sequences", 1)
    assert len(ours.scores) == len(ours.logits) <= len(theirs.scores)
    left = torch.zeros(5 if "num_beams" in MODES[mode] else 5 * width, dtype=torch.bool)  # prompts, or rows
    for step, (scores, logits) in enumerate(zip(ours.scores, ours.logits, strict=True)):
        assert scores.shape == logits.shape == (5 * width, 40)
        gone = scores.isneginf().all(1)
        assert torch.equal(gone, logits.isneginf().all(1))
        torch.testing.assert_close(scores[~gone], theirs.scores[step][~gone], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits[~gone], theirs.logits[step][~gone], atol=1e-4, rtol=1e-4)
        now = gone.view(len(left), -1).all(1)
        assert (now >= left).all(), "what has left does not come back"
        left = now
    assert left.any(), "nothing ends early: the test is vacuous"


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_transition_scores_add_up_to_the_scores_of_the_rows(family: str, penalty: float) -> None:
    model: Any = FAMILIES[family].model
    asked = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": penalty}
    wanted = {"output_scores": True, "return_dict_in_generate": True}
    output = seeded(partial(generate, model), FAMILIES[family].prompts(3), **asked, **wanted)
    steps = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    lengths = (output.beam_indices >= 0).sum(1)
    assert len(set(lengths.tolist())) > 1 or penalty > 1
    torch.testing.assert_close(steps.sum(1) / lengths**penalty, output.sequences_scores, atol=1e-4, rtol=1e-4)
    assert (output.beam_indices // 4 == torch.arange(3).repeat_interleave(4)[:, None])[output.beam_indices >= 0].all()
    fill = output.sequences[:, -steps.shape[1] :][output.beam_indices < 0]
    assert (fill == PAD).all()


# What is left behind


def state_of(model: Any) -> dict[str, Any]:
    modules = {name: module for name, module in model.named_modules() if isinstance(module, hf.PreTrainedModel)}
    return {
        "attention": {name: module.config._attn_implementation for name, module in modules.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "configs": {name: module.config.to_dict() for name, module in modules.items()},
        "generation config": model.generation_config.to_dict(),
        "attention functions": sorted(AttentionInterface._global_mapping),
        "mask functions": sorted(AttentionMaskInterface._global_mapping),
        "hooks": sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()),
    }


class Raise:
    """A logits processor, stopping criterion, streamer or forward hook that raises when it is called the third time."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.calls = error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return args[1] if len(args) == 2 and isinstance(args[1], Tensor) else None


class RaisingCriterion(hf.StoppingCriteria):
    def __init__(self, error: type[BaseException]) -> None:
        self.raising = Raise(error)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.raising()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(("error", "mode"), [(KeyError, "greedy"), (KeyboardInterrupt, "beams")])
@pytest.mark.parametrize("place", ["processor", "criterion", "step", "forward", "attention"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "bart", "whisper"])
def test_after_an_error_the_model_is_as_before(family: str, place: str, error: type[BaseException], mode: str) -> None:
    model, inputs = fresh(family), FAMILIES[family].prompts(2)
    before = state_of(model)
    options: dict[str, Any] = {"max_new_tokens": 6, **MODES[mode]}
    places: dict[str, dict[str, Any]] = {
        "processor": {"logits_processor": hf.LogitsProcessorList([Raise(error)])},
        "criterion": {"stopping_criteria": hf.StoppingCriteriaList([RaisingCriterion(error)])},
        "step": {"on_step": Raise(error)},
    }
    own = places.get(place, {})
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    last = [module for module in decoder.modules() if type(module).__name__.endswith("Attention")][-1]
    hooked = {"forward": decoder, "attention": last}.get(place)
    handle = None if hooked is None else hooked.register_forward_hook(Raise(error))
    with pytest.raises(error):
        generate(model, **inputs, **options, **own)
    if handle is not None:
        handle.remove()
    assert state_of(model) == before
    expected = hf_rows(family, inputs, **options)
    assert generate(model, **inputs, **options).tolist() == expected
    assert state_of(model) == before
    with branchkv.paged(model):
        assert model.generate(**inputs, **options).tolist() == expected
    assert state_of(model) == before
