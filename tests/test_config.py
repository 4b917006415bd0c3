"""KVConfig accepts what its docstring lists, and names the field, the expectation and the value otherwise."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from branchkv.config import KVConfig, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1", 1),
        ("4096B", 4096),
        ("1k", 1000),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("500MB", 500_000_000),
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("8Gi", 8 * 2**30),
        (" 1.5 GiB ", 3 * 2**29),
        ("0.5k", 500),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 * 2**40),
    ],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", " ", "0", "0GiB", "0.4", "-1GiB", "GiB", "8 Gi B", "8XB", "8iB", "1e9", "1_000", ".5k", "8GiB!", "80 %"],
)
def test_parse_bytes_refuses_and_shows_the_text(text: str) -> None:
    with pytest.raises(ValueError, match="memory: expected a positive size") as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


def test_defaults() -> None:
    config = KVConfig()
    assert dataclasses.asdict(config) == {
        "block_size": 16,
        "num_blocks": None,
        "memory": None,
        "dtype": None,
        "attention": "auto",
        "prefix_caching": False,
        "preemption": "recompute",
        "trace": None,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 1},
        {"block_size": 512, "num_blocks": 1},
        {"memory": "8GiB"},
        {"memory": 0.5},
        {"memory": 1},
        {"memory": 1e-6},
        {"dtype": torch.bfloat16},
        {"attention": "triton"},
        {"attention": "torch"},
        {"attention": "reference"},
        {"preemption": "swap"},
        {"prefix_caching": True},
        {"trace": True},
        {"trace": False},
        {"trace": "events.jsonl"},
        {"trace": Path("events.jsonl")},
    ],
    ids=str,
)
def test_accepts(fields: dict[str, Any]) -> None:
    config = KVConfig(**fields)
    assert {name: getattr(config, name) for name in fields} == fields
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"block_size": 0}, ValueError),
        ({"block_size": -16}, ValueError),
        ({"block_size": 16.0}, TypeError),
        ({"block_size": "16"}, TypeError),
        ({"block_size": True}, TypeError),
        ({"block_size": None}, TypeError),
        ({"num_blocks": 0}, ValueError),
        ({"num_blocks": -1}, ValueError),
        ({"num_blocks": 2.5}, TypeError),
        ({"num_blocks": True}, TypeError),
        ({"memory": "lots"}, ValueError),
        ({"memory": "0GiB"}, ValueError),
        ({"memory": 0}, ValueError),
        ({"memory": 0.0}, ValueError),
        ({"memory": -0.5}, ValueError),
        ({"memory": 1.5}, ValueError),
        ({"memory": 8 * 2**30}, ValueError),
        ({"memory": float("nan")}, ValueError),
        ({"memory": True}, TypeError),
        ({"memory": b"8GiB"}, TypeError),
        ({"dtype": torch.int8}, ValueError),
        ({"dtype": "float16"}, ValueError),
        ({"attention": "flash"}, ValueError),
        ({"attention": None}, ValueError),
        ({"attention": ["triton"]}, ValueError),
        ({"preemption": "drop"}, ValueError),
        ({"prefix_caching": 1}, TypeError),
        ({"prefix_caching": None}, TypeError),
        ({"trace": 3}, TypeError),
    ],
    ids=str,
)
def test_refuses_and_names_the_field(fields: dict[str, Any], kind: type[Exception]) -> None:
    (name,) = fields
    with pytest.raises(kind, match=f"^{name}: expected") as error:
        KVConfig(**fields)
    assert type(error.value) is kind


def test_choices_are_listed_in_the_message() -> None:
    with pytest.raises(ValueError, match="auto, triton, torch, reference, got 'flash'"):
        KVConfig(attention="flash")
    with pytest.raises(ValueError, match="recompute, swap, got 'drop'"):
        KVConfig(preemption="drop")


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVConfig().block_size = 32  # type: ignore[misc]
    with pytest.raises(ValueError, match="block_size"):
        dataclasses.replace(KVConfig(), block_size=0)
