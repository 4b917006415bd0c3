"""Tiny random models, one per attention family, on which equality with HuggingFace can fail in interesting ways.

A random model is easily vacuous: it repeats one token for ever, never ends, or gives the same result under every
setting. These are built so that hypotheses end at different steps and the settings matter; the seeds were chosen for
it, and `test_support.py` measures it. The same seeds keep the candidates of a search apart (see `Family.seed`), so
that a difference of results is a fault and not a tie.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import transformers as hf
from torch import Tensor

VOCAB_SIZE = 40
PAD, BOS = 1, 2  # a pad id of 0 is a known fault of HF's beam search: it has tests of its own
EOS = (3, 4, 5)
FIRST_WORD = 6  # prompts are drawn from [FIRST_WORD, VOCAB_SIZE): they hold no pad and no end
WINDOW = 6
MAX_NEW_TOKENS = 12
# The first is the single prompt. Windows are passed by the prompt (9, 14), while decoding (3, 1), and at once (6).
PROMPT_LENGTHS = (9, 3, 1, 14, 6)

_MEL_BINS, _SOURCE_POSITIONS = 4, 8

Options = dict[str, Any]
_UNTIED: Options = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": list(EOS),
    "tie_word_embeddings": False,  # tied random embeddings repeat the last token
}
LLAMA_LIKE: Options = _UNTIED | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_ALTERNATING: Options = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_ENCODER_DECODER: Options = (
    _UNTIED
    | {"d_model": 16, "decoder_start_token_id": BOS, "forced_eos_token_id": None}
    | {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 24}
    | {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
)

Inputs = Mapping[str, Tensor]
Kind = Literal["decoder", "encoder-decoder", "speech"]


def _llama() -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA_LIKE))


def _qwen3() -> hf.PreTrainedModel:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA_LIKE, head_dim=6))


def _mistral() -> hf.PreTrainedModel:
    return hf.MistralForCausalLM(hf.MistralConfig(**LLAMA_LIKE, head_dim=6, sliding_window=WINDOW))


def _gemma2() -> hf.PreTrainedModel:
    # Caps small enough to bend the scores: one that is never reached would not show that it is applied.
    caps: Options = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0}
    config = hf.Gemma2Config(**LLAMA_LIKE, **_ALTERNATING, **caps, head_dim=8, query_pre_attn_scalar=8)
    return hf.Gemma2ForCausalLM(config)


def _gemma3() -> hf.PreTrainedModel:
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**LLAMA_LIKE, **_ALTERNATING, head_dim=8, query_pre_attn_scalar=8))


def _gpt2() -> hf.PreTrainedModel:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**_UNTIED, n_embd=20, n_layer=2, n_head=4, n_positions=64))


def _opt() -> hf.PreTrainedModel:
    sizes: Options = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2}
    return hf.OPTForCausalLM(hf.OPTConfig(**_UNTIED, **sizes, num_attention_heads=4, max_position_embeddings=64))


def _bloom() -> hf.PreTrainedModel:
    return hf.BloomForCausalLM(hf.BloomConfig(**_UNTIED, hidden_size=16, n_layer=2, n_head=4))


def _gpt_oss() -> hf.PreTrainedModel:
    experts: Options = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return hf.GptOssForCausalLM(hf.GptOssConfig(**LLAMA_LIKE, **_ALTERNATING, **experts, head_dim=8))


def _bart() -> hf.PreTrainedModel:
    return hf.BartForConditionalGeneration(hf.BartConfig(**_ENCODER_DECODER, max_position_embeddings=64))


def _t5() -> hf.PreTrainedModel:
    start: Options = {"decoder_start_token_id": BOS}
    config = hf.T5Config(**_UNTIED, **start, d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=4)
    return hf.T5ForConditionalGeneration(config)


def _marian() -> hf.PreTrainedModel:
    config = hf.MarianConfig(**_ENCODER_DECODER, max_position_embeddings=64, decoder_vocab_size=VOCAB_SIZE)
    return hf.MarianMTModel(config)


def _whisper() -> hf.PreTrainedModel:
    lengths: Options = {"max_source_positions": _SOURCE_POSITIONS, "max_target_positions": 64}
    # The default suppression lists name ids of the real vocabulary.
    lists: Options = {"suppress_tokens": None, "begin_suppress_tokens": None}
    config = hf.WhisperConfig(**_ENCODER_DECODER, **lengths, **lists, num_mel_bins=_MEL_BINS)
    return hf.WhisperForConditionalGeneration(config)


# Standard deviations by parameter name, first match, else 0.3. Sharp attention makes a wrong or missing token show
# (much sharper, and rounding shows too); damped feed-forward layers let the last token and the history both count.
# With one size for all, the post-norm decoders (bart, marian) say the same word whatever came before.
_SPREADS = (
    (re.compile(r"(q|k)_proj"), 0.6),
    (re.compile(r"\.(q|k)\.weight"), 0.4),  # t5 does not scale its scores down
    (re.compile(r"c_attn|query_key_value"), 0.4),
    (re.compile(r"fc|mlp|Dense|experts"), 0.2),
)


def randomise(model: hf.PreTrainedModel, seed: int) -> None:
    """Draw all weights anew, large enough that every layer and every cached token moves the logits.

    Default initialisation (0.02) makes attention nearly uniform and the logits nearly equal: results would not
    notice a wrong cache. The output head gives logits a spread of about 1.5: flat enough for an end to be among the
    best candidates, far enough apart that rounding does not reorder them.
    """
    noise = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings().weight
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    embedding_spread = 0.4 if "gemma" in model.config.model_type else 1.0  # gemma multiplies by sqrt(hidden_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue  # sinusoidal position tables
            draw = torch.randn(parameter.shape, generator=noise)
            if parameter is head:
                parameter.copy_(draw * (1.5 / math.sqrt(parameter.shape[-1])))
            elif id(parameter) in embeddings:
                parameter.copy_(draw * embedding_spread)
            elif parameter.dim() > 1:
                parameter.copy_(draw * next((size for pattern, size in _SPREADS if pattern.search(name)), 0.3))
            else:
                parameter.add_(draw * 0.1)  # norms and biases stay near their 1 or 0


@dataclass(frozen=True)
class Family:
    """One architecture: its model, its prompts, and how to take one prompt out of a batch.

    `seed` was searched for: with it a quarter of the rows and more end early, `early_stopping` and `length_penalty`
    change the results, and neighbours in every ranking differ by more than 1e-5.
    """

    name: str
    kind: Kind
    make: Callable[[], hf.PreTrainedModel]
    seed: int

    def build(self, seed: int | None = None) -> hf.PreTrainedModel:
        """A fresh fp32 model in eval mode on the CPU; the global random state is left as it was."""
        seed = self.seed if seed is None else seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # some one-dimensional parameters start from a draw too (the sinks of gpt_oss)
            model = self.make()
        model.float().eval()
        randomise(model, seed)
        ids: Options = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": list(EOS)}
        start: Options = {} if self.kind == "decoder" else {"decoder_start_token_id": BOS}
        model.generation_config = hf.GenerationConfig(**ids, **start)
        return model

    @property
    def model(self) -> hf.PreTrainedModel:
        """The model with the chosen seed, built once and shared: leave it as you found it."""
        return _shared_model(self.name)

    def prompts(self, n: int) -> dict[str, Tensor]:
        """Inputs of `generate` for `n` prompts; the first k of them are `prompts(k)`.

        Decoder-only prompts are padded on the left, encoder prompts on the right. Speech has one fixed length.
        """
        if self.kind == "speech":
            shape = (_MEL_BINS, 2 * _SOURCE_POSITIONS)
            return {"input_features": torch.stack([torch.randn(shape, generator=_generator(i)) for i in range(n)])}
        lengths = [PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)] for i in range(n)]
        rows = [torch.randint(FIRST_WORD, VOCAB_SIZE, (n,), generator=_generator(i)) for i, n in enumerate(lengths)]
        width = max(lengths)
        input_ids = torch.full((n, width), PAD)
        attention_mask = torch.zeros(n, width, dtype=torch.long)
        for i, row in enumerate(rows):
            real = slice(width - len(row), width) if self.kind == "decoder" else slice(0, len(row))
            input_ids[i, real] = row
            attention_mask[i, real] = 1
        return {"input_ids": input_ids, "attention_mask": attention_mask}


def alone(inputs: Inputs, index: int) -> dict[str, Tensor]:
    """Prompt `index` of a batch as a batch of one, without its padding."""
    row = {name: value[index : index + 1] for name, value in inputs.items()}
    if "attention_mask" in row:
        real = row["attention_mask"][0].bool()
        row = {name: value[:, real] for name, value in row.items()}
    return row


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + index)


@cache
def _shared_model(name: str) -> hf.PreTrainedModel:
    return FAMILIES[name].build()


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "decoder", _llama, seed=31),
        Family("qwen3", "decoder", _qwen3, seed=35),
        Family("mistral", "decoder", _mistral, seed=43),
        Family("gemma2", "decoder", _gemma2, seed=27),
        Family("gemma3", "decoder", _gemma3, seed=42),
        Family("gpt2", "decoder", _gpt2, seed=22),
        Family("opt", "decoder", _opt, seed=20),
        Family("bloom", "decoder", _bloom, seed=51),
        Family("gpt_oss", "decoder", _gpt_oss, seed=163),
        Family("bart", "encoder-decoder", _bart, seed=72),
        Family("t5", "encoder-decoder", _t5, seed=49),
        Family("marian", "encoder-decoder", _marian, seed=7),
        Family("whisper", "speech", _whisper, seed=33),
    )
}
