"""What forking saved: the public KVStats, and the collector that the manager feeds once a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from branchkv.paged_cache.events import BlockEvent

__all__ = ["KVStats", "KindSample", "KindStats", "StatsCollector"]


@dataclass(frozen=True)
class KindStats:
    """The part of one layer kind; the fields mean what they mean in KVStats."""

    bytes_per_block: int
    peak_blocks: int
    peak_blocks_unshared: int
    saved: float
    saved_mean: float
    utilisation: float
    blocks_copied: int
    peak_bytes: int


@dataclass(frozen=True)
class KVStats:
    """Memory that the K/V of one call took, and what the same call would have taken without sharing.

    Counts are taken after the writes of a forward and before that step's frees. The length of a sequence is the number
    of tokens whose K/V are written. Totals are sums over the layer kinds in ``by_kind``.

    Attributes:
        block_size: token slots per block.
        bytes_per_block: bytes of ``block_size`` slots of all layers.
        peak_blocks: most physical blocks held.
        peak_blocks_unshared: most that the same live sequences would have held without sharing. From the prefill on a
            prompt counts as its num_beams or n sequences, as HF holds it.
        saved: 1 - peak_blocks / peak_blocks_unshared.
        saved_mean: mean over steps of the same ratio within the step.
        utilisation: distinct slots written / (blocks held * block_size), mean over steps.
        forks: sequences made by forking another one.
        blocks_copied: copy-on-write copies.
        preemptions: groups that had to give their blocks back.
        prefill_tokens: prompt tokens computed.
        prefill_tokens_reused: prompt tokens found in blocks that were already there.
        peak_bytes: bytes of the self-attention blocks at the peak.
        cross_bytes: most bytes of cross-attention K/V held, once per prompt.
        state_bytes: most bytes of recurrent states held.
        by_kind: the parts, by layer kind (``full``, ``window-<tokens>``).
        steps: forwards that the means are over.
        events: every change of a block, when ``KVConfig.trace`` is set.
    """

    block_size: int
    bytes_per_block: int = 0
    peak_blocks: int = 0
    peak_blocks_unshared: int = 0
    saved: float = 0.0
    saved_mean: float = 0.0
    utilisation: float = 0.0
    forks: int = 0
    blocks_copied: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    prefill_tokens_reused: int = 0
    peak_bytes: int = 0
    cross_bytes: int = 0
    state_bytes: int = 0
    by_kind: Mapping[str, KindStats] = field(default_factory=dict)
    steps: int = 0
    events: tuple[BlockEvent, ...] | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: everything but the events."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("by_kind", "events")}
        plain["by_kind"] = {
            kind: {f.name: getattr(part, f.name) for f in fields(part)} for kind, part in self.by_kind.items()
        }
        return plain

    def merged(self, other: KVStats) -> KVStats:
        """Of two calls: counters summed, peaks the larger, means weighted by steps. Events are not kept."""
        counters = ("forks", "blocks_copied", "preemptions", "prefill_tokens", "prefill_tokens_reused", "steps")
        peaks = ("bytes_per_block", "peak_blocks", "peak_blocks_unshared", "peak_bytes", "cross_bytes", "state_bytes")
        values: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in counters}
        values |= {name: max(getattr(self, name), getattr(other, name)) for name in peaks}
        values["saved"] = _saved(values["peak_blocks"], values["peak_blocks_unshared"])
        for name in ("saved_mean", "utilisation"):
            weighted = getattr(self, name) * self.steps + getattr(other, name) * other.steps
            values[name] = weighted / max(values["steps"], 1)
        kinds = {**self.by_kind, **other.by_kind}
        both = self.by_kind.keys() & other.by_kind.keys()
        merged = {k: _merge_kind(self.by_kind[k], other.by_kind[k], self.steps, other.steps) for k in both}
        return replace(self, **values, by_kind=kinds | merged, events=None)


@dataclass(frozen=True)
class KindSample:
    """One step of one kind: blocks held, blocks that unshared sequences would hold, distinct slots written."""

    held: int
    unshared: int
    slots: int


class _Series:
    """Peaks and running means over the steps of one kind, or of all together."""

    def __init__(self) -> None:
        self.peak_held = self.peak_unshared = self.steps = self.copied = 0
        self.saved_sum = self.used_sum = 0.0

    def add(self, sample: KindSample, block_size: int) -> None:
        if sample.held == 0:
            return  # a step that holds nothing has no ratio
        self.peak_held = max(self.peak_held, sample.held)
        self.peak_unshared = max(self.peak_unshared, sample.unshared)
        self.steps += 1
        self.saved_sum += _saved(sample.held, sample.unshared)
        self.used_sum += sample.slots / (sample.held * block_size)

    def means(self) -> tuple[float, float]:
        steps = max(self.steps, 1)
        return self.saved_sum / steps, self.used_sum / steps


class StatsCollector:
    """Counts of one call, per kind and in total."""

    def __init__(self, block_size: int, kinds: tuple[str, ...]) -> None:
        self.block_size = block_size
        self.block_bytes: dict[str, int] = dict.fromkeys(kinds, 0)
        self.prefill_tokens = 0
        self.cross_bytes = 0
        self.state_bytes = 0
        self._forks = 0
        self._peak_bytes = 0
        self._total = _Series()
        self._kinds = {kind: _Series() for kind in kinds}

    def copied(self, blocks: Mapping[str, int]) -> None:
        """Add copy-on-write copies, per kind."""
        for kind, count in blocks.items():
            self._kinds[kind].copied += count
            self._total.copied += count

    def forked(self, sequences: int) -> None:
        """Add sequences made by forking."""
        self._forks += sequences

    def observe(self, samples: Mapping[str, KindSample]) -> None:
        """Take one step."""
        for kind, sample in samples.items():
            self._kinds[kind].add(sample, self.block_size)
        self._total.add(_sum(samples.values()), self.block_size)
        held = sum(sample.held * self.block_bytes[kind] for kind, sample in samples.items())
        self._peak_bytes = max(self._peak_bytes, held)

    def result(self, events: tuple[BlockEvent, ...] | None = None) -> KVStats:
        """The statistics so far."""
        total = self._total
        saved_mean, utilisation = total.means()
        return KVStats(
            block_size=self.block_size,
            bytes_per_block=sum(self.block_bytes.values()),
            peak_blocks=total.peak_held,
            peak_blocks_unshared=total.peak_unshared,
            saved=_saved(total.peak_held, total.peak_unshared),
            saved_mean=saved_mean,
            utilisation=utilisation,
            forks=self._forks,
            blocks_copied=total.copied,
            prefill_tokens=self.prefill_tokens,
            peak_bytes=self._peak_bytes,
            cross_bytes=self.cross_bytes,
            state_bytes=self.state_bytes,
            by_kind={kind: self._kind(kind) for kind in self._kinds},
            steps=total.steps,
            events=events,
        )

    def _kind(self, kind: str) -> KindStats:
        series = self._kinds[kind]
        saved_mean, utilisation = series.means()
        return KindStats(
            bytes_per_block=self.block_bytes[kind],
            peak_blocks=series.peak_held,
            peak_blocks_unshared=series.peak_unshared,
            saved=_saved(series.peak_held, series.peak_unshared),
            saved_mean=saved_mean,
            utilisation=utilisation,
            blocks_copied=series.copied,
            peak_bytes=series.peak_held * self.block_bytes[kind],
        )


def _sum(samples: Iterable[KindSample]) -> KindSample:
    parts = list(samples)
    return KindSample(sum(p.held for p in parts), sum(p.unshared for p in parts), sum(p.slots for p in parts))


def _saved(held: int, unshared: int) -> float:
    return 1 - held / unshared if unshared else 0.0


def _merge_kind(a: KindStats, b: KindStats, steps_a: int, steps_b: int) -> KindStats:
    steps = max(steps_a + steps_b, 1)
    held, unshared = max(a.peak_blocks, b.peak_blocks), max(a.peak_blocks_unshared, b.peak_blocks_unshared)
    return KindStats(
        bytes_per_block=max(a.bytes_per_block, b.bytes_per_block),
        peak_blocks=held,
        peak_blocks_unshared=unshared,
        saved=_saved(held, unshared),
        saved_mean=(a.saved_mean * steps_a + b.saved_mean * steps_b) / steps,
        utilisation=(a.utilisation * steps_a + b.utilisation * steps_b) / steps,
        blocks_copied=a.blocks_copied + b.blocks_copied,
        peak_bytes=max(a.peak_bytes, b.peak_bytes),
    )
