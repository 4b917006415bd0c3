"""What cannot be decoded is refused with an error that says why; the model and the next call are none the worse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

import branchkv
from support.families import BOS, EOS, FAMILIES, PAD, Family, alone
from support.oracle import oracle_model

pytestmark = pytest.mark.usefixtures("one_thread")

generate: Any = branchkv.generate
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
}
each_mode = pytest.mark.parametrize("mode", MODES)
LLAMA, BART = FAMILIES["llama"], FAMILIES["bart"]
VOCABULARY = 40
NO_IDS = torch.empty(1, 0, dtype=torch.long)


def prompt(length: int) -> Tensor:
    return torch.arange(length)[None] % 30 + 6


@contextmanager
def nothing_runs() -> Iterator[None]:
    seen: list[str] = []
    handle = register_module_forward_pre_hook(lambda module, inputs: seen.append(type(module).__name__))
    try:
        yield
    finally:
        handle.remove()
    assert not seen


# Numbers


@each_mode
def test_nan_logits_name_prompt_and_step(mode: str) -> None:
    model: Any = LLAMA.build()
    inputs = LLAMA.prompts(3)
    poison = int(inputs["input_ids"][1, -1])
    assert poison not in inputs["input_ids"][[0, 2]]
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    with pytest.raises(branchkv.NumericalError, match=r"prompt 1, step 0: .*nan") as error:
        generate(model, **inputs, max_new_tokens=4, **MODES[mode])
    assert (error.value.prompt, error.value.step) == (1, 0)


def test_nan_logits_in_the_middle_name_the_step() -> None:
    model: Any = LLAMA.build()
    one = LLAMA.prompts(1)
    tokens = generate(model, **one, max_new_tokens=4)[0, one["input_ids"].shape[1] :].tolist()
    with torch.no_grad():
        model.get_input_embeddings().weight[tokens[1]] = float("nan")
    with pytest.raises(branchkv.NumericalError, match=r"prompt 0, step 2: .*nan"):
        generate(model, **one, max_new_tokens=4)


class BanAll(hf.LogitsProcessor):
    """Bans everything for one prompt of several (`rows` each), from some step on."""

    def __init__(self, prompt: int, rows: int, length: int) -> None:
        self.banned, self.length = slice(prompt * rows, (prompt + 1) * rows), length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        if input_ids.shape[1] >= self.length:
            scores[self.banned] = -torch.inf
        return scores


@each_mode
def test_nothing_allowed_names_prompt_and_step(mode: str) -> None:
    inputs, rows = LLAMA.prompts(3), {"greedy": 1, "sample": 2, "beams": 3}[mode]
    ban = hf.LogitsProcessorList([BanAll(2, rows, inputs["input_ids"].shape[1] + 2)])
    with pytest.raises(branchkv.NumericalError, match=r"prompt 2, step 2: every continuation .*banned"):
        generate(LLAMA.model, **inputs, max_new_tokens=4, logits_processor=ban, eos_token_id=[39], **MODES[mode])


def test_what_is_finished_is_returned_when_nothing_more_is_allowed() -> None:
    one = LLAMA.prompts(1)
    width = one["input_ids"].shape[1]
    ban = hf.LogitsProcessorList([BanAll(0, 3, width + 1)])
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12, "output_scores": True}
    with pytest.warns(UserWarning, match="cannot be reached"):
        output = generate(LLAMA.model, **one, logits_processor=ban, **options, return_dict_in_generate=True)
    real = ~output.sequences_scores.isneginf()
    assert 0 < real.sum() < 3
    assert all(set(row) & set(EOS) for row in output.sequences[real, width:].tolist())
    assert (output.sequences[~real, width:] == PAD).all()


@each_mode
def test_every_token_an_end_gives_one_token_hypotheses(mode: str) -> None:
    inputs = LLAMA.prompts(3)
    rows = generate(LLAMA.model, **inputs, eos_token_id=list(range(VOCABULARY)), max_new_tokens=5, **MODES[mode])
    assert rows.shape == (3 * {"greedy": 1, "sample": 2, "beams": 3}[mode], inputs["input_ids"].shape[1] + 1)
    if mode == "beams":
        logits = oracle_model(LLAMA)(**alone(inputs, 2)).logits[0, -1]
        assert rows[-3:, -1].tolist() == logits.topk(3).indices.tolist()


def test_all_tokens_but_one_ends() -> None:
    options = {"eos_token_id": list(range(VOCABULARY - 1)), "max_new_tokens": 5, **MODES["beams"]}
    expected = oracle_model(LLAMA).generate(**LLAMA.prompts(1), **options)  # type: ignore[operator]
    assert generate(LLAMA.model, **LLAMA.prompts(1), **options).tolist() == expected.tolist()


def test_fewer_hypotheses_than_asked_are_marked_and_warned_of() -> None:
    options: dict[str, Any] = {"num_beams": 50, "num_return_sequences": 50, "max_new_tokens": 1}
    dict_out: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    with pytest.warns(UserWarning, match="20 of 100 hypotheses asked for cannot be reached"):
        output = generate(LLAMA.model, **LLAMA.prompts(2), **options, **dict_out)
    scores = output.sequences_scores.view(2, 50)
    assert scores[:, 40:].isneginf().all() and scores[:, :40].isfinite().all()
    assert (output.sequences.view(2, 50, -1)[:, 40:, -1] == PAD).all()
    assert (output.beam_indices.view(2, 50, -1)[:, 40:] == -1).all()
    assert sorted(output.sequences.view(2, 50, -1)[0, :40, -1].tolist()) == list(range(VOCABULARY))


# Lengths


def short_gpt2() -> Any:
    gpt2 = FAMILIES["gpt2"].build()
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 20, "n_layer": 2, "n_head": 4, "n_positions": 16}
    short: Any = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, tie_word_embeddings=False)).eval()
    weights = gpt2.state_dict()
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:16]
    short.load_state_dict(weights, strict=False)
    short.generation_config = hf.GenerationConfig(pad_token_id=PAD, eos_token_id=39)
    return short


@each_mode
def test_a_prompt_past_the_position_table_is_refused_before_the_first_step(mode: str) -> None:
    model = short_gpt2()
    with nothing_runs(), pytest.raises(ValueError, match=r"prompt 0: 17 tokens .* table of 16 entries"):
        generate(model, prompt(17), max_new_tokens=1, **MODES[mode])
    with nothing_runs(), pytest.raises(ValueError, match=r"14 tokens and at least 4 new ones .* 16 entries"):
        generate(model, prompt(14), max_new_tokens=8, min_new_tokens=4, **MODES[mode])
    assert generate(model, prompt(16), max_new_tokens=1, **MODES[mode]).shape[1] == 17


@each_mode
def test_a_sequence_that_may_pass_the_position_table_is_warned_of_once(mode: str) -> None:
    model, options = short_gpt2(), {"max_new_tokens": 8, **MODES[mode]}
    with (
        pytest.warns(UserWarning, match="position table has 16") as caught,
        pytest.raises(ValueError, match="16 entries"),
    ):
        generate(model, prompt(14), **options, suppress_tokens=[39])
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="position table has 16"):  # ends in time
        assert (
            generate(model, prompt(14), **options, forced_bos_token_id=39, eos_token_id=list(range(40))).shape[1] == 15
        )
    exact = generate(model, prompt(14), **options | {"max_new_tokens": 3, "suppress_tokens": [39]})
    torch.manual_seed(0)
    assert exact.shape[1] == 17


@each_mode
def test_max_length_within_the_prompt_is_refused(mode: str) -> None:
    for limit in ({"max_length": 9}, {"max_length": 3}, {"max_new_tokens": 0}, {"max_new_tokens": -1}):
        with pytest.raises(ValueError, match="max_"):
            generate(LLAMA.model, **LLAMA.prompts(3), **limit, **MODES[mode])


# Prompts


@each_mode
def test_an_empty_prompt_starts_with_bos(mode: str) -> None:
    model, options = LLAMA.model, {"max_new_tokens": 5, **MODES[mode]}
    torch.manual_seed(0)
    expected = oracle_model(LLAMA).generate(torch.tensor([[BOS]]), **options).tolist()  # type: ignore[operator]
    for given in ({}, {"inputs": NO_IDS}, {"input_ids": NO_IDS}, {"input_ids": NO_IDS, "attention_mask": NO_IDS}):
        torch.manual_seed(0)
        assert generate(model, **given, **options).tolist() == expected
    torch.manual_seed(0)
    assert generate(model, NO_IDS, **options).tolist() == expected
    torch.manual_seed(0)
    assert generate(model, NO_IDS, bos_token_id=7, **options)[0, 0] == 7


def test_an_empty_prompt_starts_with_the_models_bos_under_a_config_without_one() -> None:
    config = hf.GenerationConfig(max_new_tokens=3)
    assert generate(LLAMA.model, NO_IDS, generation_config=config)[0, 0] == BOS


@each_mode
def test_an_empty_row_starts_with_bos_and_leaves_the_others_right(mode: str) -> None:
    inputs, options = LLAMA.prompts(3), {"max_new_tokens": 5, **MODES[mode]}
    inputs["attention_mask"][1] = 0
    if mode == "sample":
        options |= {"top_k": 1}
    rows = generate(LLAMA.model, **inputs, **options)[:, inputs["input_ids"].shape[1] :].tolist()
    model: Any = oracle_model(LLAMA)
    ones = [alone(inputs, 0)["input_ids"], torch.tensor([[BOS]]), alone(inputs, 2)["input_ids"]]
    expected = [row[one.shape[1] :] for one in ones for row in model.generate(one, **options).tolist()]
    assert rows == [row + [PAD] * (len(rows[0]) - len(row)) for row in expected]


@each_mode
def test_an_empty_row_of_a_model_without_bos_is_named(mode: str) -> None:
    model, inputs = LLAMA.build(), LLAMA.prompts(3)
    model.generation_config.bos_token_id = None
    inputs["attention_mask"][1] = 0
    with nothing_runs(), pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(model, **inputs, max_new_tokens=3, **MODES[mode])
    with nothing_runs(), pytest.raises(ValueError, match="prompt 0 is empty"):
        generate(model, NO_IDS, max_new_tokens=3, **MODES[mode])


@pytest.mark.parametrize("family", [LLAMA, BART])
@pytest.mark.parametrize("shape", [(0, 3), (0, 0)])
def test_a_batch_of_no_prompts_is_refused(family: Family, shape: tuple[int, int]) -> None:
    with nothing_runs(), pytest.raises(ValueError, match="batch of 0"):
        generate(family.model, torch.empty(shape, dtype=torch.long), max_new_tokens=3)


def test_an_empty_source_of_an_encoder_is_named() -> None:
    with nothing_runs(), pytest.raises(ValueError, match="prompt 0 is empty"):
        generate(BART.model, NO_IDS, max_new_tokens=3)


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_a_padded_decoder_prompt_is_honoured_or_refused(mode: str) -> None:
    """T5, since its positions are relative: HF's masked batch equals each prompt alone there."""
    family, options = FAMILIES["t5"], {"max_new_tokens": 6, **MODES[mode]}
    inputs = family.prompts(3)
    starts, mask = torch.tensor([[2, 8, 9, 10]] * 3), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    given = {"decoder_input_ids": starts, "decoder_attention_mask": mask}
    try:
        rows = generate(family.model, **inputs, **given, **options)
    except branchkv.UnsupportedOptionError as error:
        assert error.option == "decoder_attention_mask"
    else:
        expected: Any = oracle_model(family)
        assert rows.tolist() == expected.generate(**inputs, **given, **options).tolist()


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_right_padding_is_repacked(mode: str) -> None:
    left, options = LLAMA.prompts(4), {"max_new_tokens": 6, **MODES[mode]}
    order = left["attention_mask"].argsort(dim=1, descending=True, stable=True)
    right = {name: value.gather(1, order) for name, value in left.items()}
    assert not right["attention_mask"][:, -1].all()
    width = order.shape[1]
    rows, expected = (generate(LLAMA.model, **inputs, **options) for inputs in (right, left))
    assert rows[:, width:].tolist() == expected[:, width:].tolist()
    per_prompt = len(rows) // 4
    assert rows[::per_prompt, :width].tolist() == right["input_ids"].tolist()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences.*num_beams"),
        ({"num_beams": 2, "num_return_sequences": 3, "do_sample": True}, "num_return_sequences.*num_beams"),
        ({"num_beams": 2, "streamer": hf.TextStreamer(None)}, "streamer"),  # type: ignore[arg-type]
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"num_beams": 2, "early_stopping": "sometimes"}, "early_stopping"),
        ({"max_new_token": 3}, "max_new_token"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_bad_arguments_are_value_errors(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        generate(BART.model, **BART.prompts(1), max_new_tokens=3, **options)


def test_more_samples_than_prompts_have_beams_are_fine() -> None:
    rows = generate(LLAMA.model, **LLAMA.prompts(2), do_sample=True, num_return_sequences=30, max_new_tokens=3)
    assert len(rows) == 60


# Models


def _bert_encoder() -> Any:
    return hf.BertModel(hf.BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))


SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "MambaForCausalLM": (lambda: hf.MambaForCausalLM(hf.MambaConfig(**SMALL)), "not K/V per token"),
    "XLNetLMHeadModel": (
        lambda: hf.XLNetLMHeadModel(hf.XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=8)),
        "cache of its own",
    ),
    "RwkvForCausalLM": (lambda: hf.RwkvForCausalLM(hf.RwkvConfig(**SMALL)), "cache of its own"),
    "BertModel": (_bert_encoder, "generate"),
    "LlamaModel": (lambda: LLAMA.model.model, "generate"),
    "Linear": (lambda: torch.nn.Linear(2, 2), "generate"),
    "str": (lambda: "gpt2", "generate"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_that_is_not_supported_is_named_before_anything_runs(name: str) -> None:
    make, reason = UNSUPPORTED[name]
    with nothing_runs(), pytest.raises(branchkv.UnsupportedModelError, match=name) as error:
        generate(make(), prompt(3), max_new_tokens=3)
    assert reason in str(error.value)
    with nothing_runs(), pytest.raises(branchkv.UnsupportedModelError, match=name), branchkv.paged(make()):
        pass
