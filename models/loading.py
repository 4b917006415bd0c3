"""Models and tokenizers by name or folder, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

__all__ = ["LoadedModel", "load"]


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode and its tokenizer."""

    model: Any
    tokenizer: Any

    def encode(self, prompts: list[str], *, chat: bool = False) -> dict[str, Any]:
        """Left-padded (encoder-decoder: right-padded) inputs for ``generate``.

        Args:
            prompts: one text per prompt.
            chat: wrap each text as a user message with the tokenizer's chat template.

        Raises:
            ValueError: ``chat`` without a chat template.
        """
        if chat:
            if not getattr(self.tokenizer, "chat_template", None):
                raise ValueError("chat: the tokenizer has no chat template; leave the option out")
            prompts = [
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
                )
                for prompt in prompts
            ]
        self.tokenizer.padding_side = "right" if self.model.config.is_encoder_decoder else "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=not chat)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    def decode(self, tokens: torch.Tensor) -> str:
        """Text of generated tokens, special ones left out."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def load(name: str, *, dtype: str = "auto", device: str = "cpu", trust_remote_code: bool = False) -> LoadedModel:
    """Load a causal or sequence-to-sequence language model.

    Args:
        name: folder or hub name.
        dtype: ``"auto"`` or the name of a torch dtype, such as ``"float32"``.
        device: torch device.
        trust_remote_code: allow the model's own code to run.

    Raises:
        OSError: nothing of that name can be found (from transformers).
        ValueError: the dtype is not known.
    """
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype: expected 'auto' or a torch dtype such as 'float32', got {dtype!r}")
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"model: there is no folder {name!r}")
    transformers.utils.logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: Any = kind.from_pretrained(name, dtype=dtype, trust_remote_code=trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    return LoadedModel(model.to(device).eval(), tokenizer)
