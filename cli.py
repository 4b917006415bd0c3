"""The command line. Exit codes: 0 done, 1 the call failed, 2 the arguments are wrong, 130 interrupted."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from branchkv.config import KVConfig
from branchkv.errors import BranchKVError, InvalidArgumentError

if TYPE_CHECKING:
    from branchkv.models.loading import LoadedModel

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Beam search and parallel sampling for HuggingFace models, with every prompt computed once.",
)


def main() -> None:
    """Entry point of the ``branchkv`` command."""
    errors = Console(stderr=True)
    try:
        app()
    except (BranchKVError, ValueError, TypeError, OSError) as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        errors.print("interrupted", style="red")
        raise SystemExit(130) from None


@app.command()
def generate(  # one parameter per option: this is how typer describes a command line
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; without it, --file or standard input is read.")
    ] = None,
    model: Annotated[str, typer.Option(help="Folder or hub name of the model.")] = ...,  # type: ignore[assignment]
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    num_beams: Annotated[int | None, typer.Option(min=1, help="Beams of a beam search.")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="How many outputs to return (num_return_sequences).")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the best.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Softmax temperature of samples.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample within this probability mass.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Exponent of the length in a beam's score.")] = None,
    early_stopping: Annotated[str | None, typer.Option(help="true, false or never.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 64,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeatable samples, one stream each.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt with the model's chat template.")] = False,
    block_size: Annotated[int, typer.Option(min=1, help="Token slots per K/V block.")] = 16,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Most K/V blocks to hold.")] = None,
    memory: Annotated[str | None, typer.Option(help="Most K/V memory to hold, such as 2GiB.")] = None,
    attention: Annotated[str, typer.Option(help="auto, triton, torch or reference.")] = "auto",
    trace: Annotated[Path | None, typer.Option(help="Write every change of a block to this file.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Decode one prompt and say what sharing its K/V saved."""
    text = _read_prompt(prompt, file)
    kv = _kv_config(
        block_size=block_size, num_blocks=num_blocks, memory=memory, attention=attention,
        trace=None if trace is None else str(trace),
    )  # fmt: skip
    options = {
        "num_beams": num_beams, "num_return_sequences": n, "do_sample": sample or None, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "length_penalty": length_penalty,
        "early_stopping": _early_stopping(early_stopping), "max_new_tokens": max_new_tokens,
    }  # fmt: skip
    options = {name: value for name, value in options.items() if value is not None}
    loaded = _load(model, dtype, device, threads, trust_remote_code)
    with _progress("tokens", max_new_tokens, quiet=as_json) as on_step:
        result = _decode(loaded, text, options, kv, {"chat": chat, "seed": seed, "on_step": on_step})
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        _print_result(result)


@app.command()
def demo(
    block_size: Annotated[int, typer.Option(min=1, help="Token slots per K/V block.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """SmolLM2-135M on a 500-token prompt: HF generate and branchkv side by side."""
    from branchkv.demo import run_demo

    rows = run_demo(Console(), kv=KVConfig(block_size=block_size), as_json=as_json)
    if as_json:
        print(json.dumps(rows))
    if not all(row["same_tokens"] for row in rows):
        raise SystemExit(1)


@app.command()
def kernels(
    target: Annotated[str, typer.Option(help="cuda:80, cuda:90, cuda:100 or hip:gfx942.")] = "cuda:90",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; one per core unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """Compile every Triton kernel for a GPU that need not be there: registers, spills, shared memory."""
    from branchkv.kernels.aot import check_target, compile_all, variants

    try:
        check_target(target)
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error)) from None
    with _progress("kernels", len(variants()), quiet=as_json) as on_compiled:
        rows = [kernel.to_dict() for kernel in compile_all(target, jobs, on_compiled=on_compiled)]
    if as_json:
        print(json.dumps(rows))
        return
    names = ("kernel", "dtype", "head_dim", "block_size", "registers", "spills", "shared_bytes")
    table = Table(*(name.replace("_", " ") for name in names), "matrix", title=target)
    for row in rows:
        table.add_row(*(str(row[name]) for name in names), "yes" if row["matrix_instructions"] else "no")
    Console().print(table)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise typer.BadParameter("give the prompt as an argument or with --file, not both")
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"--file: {error}") from None
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("no prompt: give it as an argument, with --file, or on standard input")
    text = prompt if prompt is not None else sys.stdin.read()
    if not text.strip():
        raise typer.BadParameter("the prompt is empty")
    return text


def _early_stopping(text: str | None) -> bool | str | None:
    if text is None:
        return None
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text.lower() not in values:
        raise typer.BadParameter(f"--early-stopping: expected true, false or never, got {text!r}")
    return values[text.lower()]


def _kv_config(**fields: Any) -> KVConfig:
    try:
        return KVConfig(**fields)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None


def _load(model: str, dtype: str, device: str, threads: int | None, trust_remote_code: bool) -> LoadedModel:
    import torch

    from branchkv.models.loading import load

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if threads is not None:
        torch.set_num_threads(threads)
    return load(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)


def _decode(
    loaded: LoadedModel, text: str, options: dict[str, Any], kv: KVConfig, run: dict[str, Any]
) -> dict[str, Any]:
    import branchkv

    inputs: dict[str, Any] = loaded.encode([text], chat=run["chat"])
    output = branchkv.generate(
        loaded.model, **inputs, **options, kv=kv, seed=run["seed"], on_step=run["on_step"],
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    start = 1 if loaded.model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    scores = getattr(output, "sequences_scores", None)
    return {
        "prompt_tokens": int(inputs["input_ids"].shape[1]),
        "outputs": [
            {"text": loaded.decode(row[start:]), "score": _finite(None if scores is None else float(scores[place]))}
            for place, row in enumerate(output.sequences)
        ],
        "kv": output.kv.to_dict(),
    }


def _finite(score: float | None) -> float | None:
    """JSON has no infinity: a row that cannot be reached has no score."""
    return score if score is not None and math.isfinite(score) else None


def _print_result(result: dict[str, Any]) -> None:
    console = Console()
    for place, output in enumerate(result["outputs"], start=1):
        if len(result["outputs"]) > 1:
            score = "" if output["score"] is None else f"  score {output['score']:.4f}"
            console.print(f"--- {place}{score}", style="dim", markup=False, highlight=False)
        console.print(output["text"].strip(), markup=False, highlight=False)
    kv = result["kv"]
    Console(stderr=True).print(
        f"K/V: {kv['peak_blocks']} blocks of {kv['block_size']} tokens held, {kv['peak_blocks_unshared']} without "
        f"sharing ({kv['saved']:.0%} saved, {kv['peak_bytes'] / 1e6:.1f} MB at the peak, {kv['blocks_copied']} copied)",
        style="dim",
        highlight=False,
    )


@contextmanager
def _progress(what: str, most: int, *, quiet: bool) -> Iterator[Callable[[Any], None] | None]:
    """A bar on standard error that counts tokens or kernels; None where nobody looks."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(what, total=most)
        yield lambda _: progress.advance(task)
