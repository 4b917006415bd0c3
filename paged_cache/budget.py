"""How many blocks may be held at once, over all layer kinds."""

from __future__ import annotations

from collections.abc import Mapping

from branchkv.errors import OutOfBlocksError

__all__ = ["BlockBudget", "ByteBudget"]


class BlockBudget:
    """At most ``limit`` blocks, whatever their kind; None means no limit."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit

    def check(self, needed: Mapping[str, int], held: Mapping[str, int]) -> None:
        """Raise OutOfBlocksError unless ``needed`` more blocks fit beside those ``held``."""
        if self.limit is None:
            return
        free = self.limit - sum(held.values())
        if sum(needed.values()) > free:
            raise OutOfBlocksError(sum(needed.values()), free, self.limit)

    def room(self, kind: str) -> int | None:
        """Most blocks of ``kind`` that could ever be held; None if unknown."""
        del kind
        return self.limit


class ByteBudget:
    """At most ``limit`` bytes. A kind costs nothing until the size of its blocks is known (``set_block_bytes``)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bytes: dict[str, int] = {}

    def set_block_bytes(self, kind: str, size: int) -> None:
        """State what one block of ``kind`` occupies, in bytes."""
        self._bytes[kind] = size

    def check(self, needed: Mapping[str, int], held: Mapping[str, int]) -> None:
        """Raise OutOfBlocksError unless ``needed`` more blocks fit beside those ``held``."""
        free = self.limit - self._cost(held)
        if self._cost(needed) > free:
            unit = max(self._bytes.values())
            raise OutOfBlocksError(sum(needed.values()), max(free, 0) // unit, self.limit // unit)

    def room(self, kind: str) -> int | None:
        """Most blocks of ``kind`` that could ever be held; None if unknown."""
        size = self._bytes.get(kind)
        return None if size is None else self.limit // size

    def _cost(self, blocks: Mapping[str, int]) -> int:
        return sum(count * self._bytes.get(kind, 0) for kind, count in blocks.items())
