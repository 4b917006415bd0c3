"""Block tables as a step of decoding has them: rows of a prompt share blocks and go on with blocks of their own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tables:
    """What a plan is made from.

    Attributes:
        blocks: [rows, width] block ids, -1 where nothing is held.
        lengths: [rows] tokens.
        null_slot: one past the slots of all blocks.
    """

    blocks: Ints
    lengths: Ints
    block_size: int
    window: int | None
    null_slot: int

    def first(self, row: int) -> int:
        """First position that the row sees."""
        return 0 if self.window is None else max(0, int(self.lengths[row]) - self.window)

    def slots(self, row: int) -> dict[int, int]:
        """Position -> slot of every token that the row sees, block by block."""
        size = self.block_size
        return {
            position: int(self.blocks[row, position // size]) * size + position % size
            for position in range(self.first(row), int(self.lengths[row]))
        }


def random_tables(
    rng: np.random.Generator,
    *,
    block_size: int,
    window: int | None = None,
    prompts: int = 3,
    longest: int = 40,
    sharing: bool = True,
    scattered: bool = True,
) -> Tables:
    """Tables of `prompts` prompts with 1 to 5 rows each.

    Args:
        sharing: rows of a prompt have equal blocks up to where a row parts from the row before it.
        scattered: block ids are drawn; else they ascend from row to row.
    """
    rows: list[list[int]] = []
    lengths: list[int] = []
    used = 0
    for _ in range(prompts):
        length = int(rng.integers(1, longest + 1))
        count = -(-length // block_size)
        for number in range(int(rng.integers(1, 6))):
            shared = int(rng.integers(0, count + 1)) if sharing and number else 0
            rows.append((rows[-1][:shared] if shared else []) + list(range(used, used + count - shared)))
            used += count - shared
            lengths.append(length)
    names = rng.permutation(2 * used) if scattered else np.arange(used)
    blocks = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for row, mine in enumerate(rows):
        blocks[row, : len(mine)] = names[mine]
        if window is not None:  # what has left the window is given back
            blocks[row, : max(0, lengths[row] - window) // block_size] = -1
    null_slot = (int(names.max()) + 1) * block_size
    return Tables(blocks, np.array(lengths), block_size, window, null_slot)
