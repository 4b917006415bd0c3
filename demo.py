"""``branchkv demo``: one real model, one long prompt, beams and samples by HF generate and by branchkv."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from branchkv.config import KVConfig
from branchkv.models.compare import Comparison, compare
from branchkv.models.loading import LoadedModel, load
from branchkv.models.real_models import smollm2

__all__ = ["run_demo"]

NEW_TOKENS = 64
WIDTH = 8
MODES: dict[str, dict[str, Any]] = {
    f"{WIDTH} beams": {"num_beams": WIDTH, "num_return_sequences": WIDTH, "do_sample": False},
    f"{WIDTH} samples": {"num_return_sequences": WIDTH, "do_sample": True, "temperature": 0.8, "top_p": 0.95},
}

PROMPT = """Read the following text about lighthouses and then answer the question at the end.

A lighthouse is a tower with a bright light at the top, built on a coast or on a rock in the sea to guide ships. For as
long as people have sailed at night, they have lit fires on hills so that those at sea could find the way home. The
first towers made for this purpose stood at the mouths of busy harbours. The most famous one was built on an island in
front of Alexandria more than two thousand years ago. It was over a hundred metres high, burned wood and oil, and its
light could be seen from a distance of fifty kilometres. It stood for more than fifteen centuries until a series of
earthquakes brought it down, and divers still find blocks of it on the floor of the harbour.

Building on a rock in the open sea was much harder. The waves could reach the rock only for a few hours at low tide, so
the masons had to work quickly, and they left before the water returned. The first tower on such a rock was made of
wood. It lasted four years, until a storm carried it away together with the man who had designed it. The next one, also
of wood, burned down. The third was the work of an engineer who studied how an oak tree stands in the wind. He gave the
tower a broad base and a curved side, and he cut every stone so that it locked into the ones beside it, above it and
below it. He also found a kind of mortar that becomes hard under water. His tower stood for more than a century, and
when it was finally replaced, it was not because the tower had become weak, but because the rock under it was wearing
away.

The light itself changed as well. At first it was a coal fire or a group of candles, which gave little light and much
smoke. Then came lamps with a round wick and a glass chimney, and mirrors behind them. The greatest step was a new lens,
made of many rings of glass, each of which bends the light a little more than the one inside it. Such a lens is thin and
light, yet it gathers almost all the light of the lamp into a single beam. With a clockwork turning the lens, each
lighthouse could send flashes in a rhythm of its own, so that a captain could tell from the number of seconds between
two flashes which tower was in front of the ship.

For most of this history a keeper lived in the tower, often with a family. The keeper trimmed the wick, wound the
clockwork every few hours, cleaned the glass in the morning and wrote the weather into a book. Today the lamps are
electric, the towers work without keepers, and ships find their position by satellite. Many lighthouses are still lit,
because a light that can be seen with the naked eye needs no receiver and no battery on board.

Question: How did the building of lighthouses change over time, and what made the later towers better than the earlier
ones? Answer in a few sentences."""


def run_demo(console: Console, *, kv: KVConfig, as_json: bool = False) -> list[dict[str, Any]]:
    """Run the demo and print its table to ``console``; returns the rows as plain numbers."""
    import torch

    torch.set_num_threads(_cores())
    loaded = _model(None if as_json else console.print)
    inputs = loaded.encode([PROMPT], chat=True)
    tokens = inputs["input_ids"].shape[1]
    if not as_json:
        console.print(f"Prompt: {tokens} tokens. New tokens: {NEW_TOKENS}. Block size: {kv.block_size}. Decoding ...")
    rows = []
    for mode, options in MODES.items():
        result = compare(loaded.model, inputs, {**options, "max_new_tokens": NEW_TOKENS}, kv=kv)
        rows.append(_row(mode, result))
    if not as_json:
        console.print(_table(rows, tokens))
        _explain(console, rows)
    return rows


def _model(say: Callable[[str], None] | None) -> LoadedModel:
    folder = smollm2(progress=say or (lambda _: None))
    if say is not None:
        say(f"Model: SmolLM2-135M-Instruct, fp32, in {folder}")
    return load(str(folder), dtype="float32")


def _row(mode: str, result: Comparison) -> dict[str, Any]:
    kv = result.kv
    return {
        "mode": mode,
        "same_tokens": result.same_tokens,
        "hf_seconds": result.hf.seconds,
        "branchkv_seconds": result.branchkv.seconds,
        "speedup": result.speedup,
        "hf_tokens_per_second": result.hf.tokens_per_second,
        "branchkv_tokens_per_second": result.branchkv.tokens_per_second,
        "hf_peak_kv_bytes": result.hf.kv_bytes,
        "branchkv_peak_kv_bytes": result.branchkv.kv_bytes,
        "blocks_unshared": kv.peak_blocks_unshared,
        "blocks_held": kv.peak_blocks,
        "blocks_saved": kv.peak_blocks_unshared - kv.peak_blocks,
        "saved": kv.saved,
        "blocks_copied": kv.blocks_copied,
    }


def _table(rows: list[dict[str, Any]], prompt: int) -> Table:
    table = Table(title=f"SmolLM2-135M-Instruct, prompt of {prompt} tokens, {NEW_TOKENS} new tokens")
    headings = ("", "same tokens", "seconds", "tok/s", "peak KV", "blocks saved", "copied")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap=place == 0)
    for row in rows:
        table.add_row(
            f"{row['mode']}, HF",
            "",
            f"{row['hf_seconds']:.1f}",
            f"{row['hf_tokens_per_second']:.0f}",
            f"{row['hf_peak_kv_bytes'] / 1e6:.0f} MB",
            "",
            "",
        )
        table.add_row(
            f"{row['mode']}, branchkv",
            "yes" if row["same_tokens"] else "NO",
            f"{row['branchkv_seconds']:.1f}",
            f"{row['branchkv_tokens_per_second']:.0f}",
            f"{row['branchkv_peak_kv_bytes'] / 1e6:.0f} MB",
            f"{row['blocks_saved']}/{row['blocks_unshared']}",
            str(row["blocks_copied"]),
            end_section=True,
        )
    return table


def _explain(console: Console, rows: list[dict[str, Any]]) -> None:
    beams = rows[0]
    outcome = "the same tokens as" if all(row["same_tokens"] for row in rows) else "OTHER TOKENS THAN"
    console.print(
        f"What you saw: branchkv computed the prompt once, let {WIDTH} beams and {WIDTH} samples share its K/V blocks, "
        f"and returned {outcome} HF generate; the beams took {beams['speedup']:.1f} times less time and "
        f"{beams['hf_peak_kv_bytes'] / max(beams['branchkv_peak_kv_bytes'], 1):.1f} times less K/V memory."
    )
    console.print("Next, on your own model:")
    console.print("  branchkv generate 'Once upon a time' --model FOLDER_OR_NAME --num-beams 8", markup=False)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
