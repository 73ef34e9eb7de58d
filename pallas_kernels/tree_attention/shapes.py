"""What an implementation is asked to compute: its sizes, and the table of sizes that are checked and timed."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one call, in the letters of the rest of the project."""

    slots: int = 1  # R
    rows: int = 8  # N
    heads: int  # H
    groups: int  # G, key/value heads; divides H
    width: int  # hd
    capacity: int  # S
    key_block: int  # divides S
    dtype: str = "bfloat16"  # of the cache
    window: int | None = None
    cap: float | None = None

    @property
    def words(self) -> int:
        """32-bit words of a row's ancestors."""
        return -(-self.rows // 32)

    @property
    def fold(self) -> int:
        """Rows that share one key/value head: those of all its query heads."""
        return self.heads // self.groups * self.rows

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all slots, one layer: what a call at full length has to read."""
        return 2 * self.slots * self.groups * self.capacity * self.width * (4 if self.dtype == "float32" else 2)

    @property
    def flops(self) -> int:
        """Of both products at full length."""
        return 4 * self.slots * self.rows * self.heads * self.width * self.capacity

    def name(self) -> str:
        """A short name for tables and tests."""
        extra = (f" window {self.window}" if self.window else "") + (f" cap {self.cap:g}" if self.cap else "")
        return (
            f"B{self.slots} N{self.rows} H{self.heads}/{self.groups} hd{self.width} "
            f"S{self.capacity}/{self.key_block} {self.dtype}{extra}"
        )


def round_up(x: int, unit: int) -> int:
    """The least multiple of `unit` that is at least `x`."""
    return math.ceil(x / unit) * unit


def for_gpu(shape: Shape) -> Shape:
    """The same shape in key blocks that fit a GPU's shared memory."""
    return dataclasses.replace(shape, key_block=64 if shape.width > 128 else min(shape.key_block, 128))


# Small ones, for interpreters: every head width, groups of 1 to 8, one to four words of ancestors.
SMALL = (
    Shape(slots=2, rows=8, heads=4, groups=2, width=64, capacity=256, key_block=64, dtype="float32"),
    Shape(slots=2, rows=5, heads=3, groups=1, width=80, capacity=128, key_block=32, dtype="float32", cap=30.0),
    Shape(slots=1, rows=33, heads=8, groups=1, width=96, capacity=256, key_block=128, dtype="bfloat16"),
    Shape(slots=3, rows=1, heads=4, groups=4, width=128, capacity=128, key_block=64, dtype="bfloat16"),
    Shape(slots=1, rows=16, heads=2, groups=1, width=256, capacity=128, key_block=64, dtype="float32", window=19),
    Shape(slots=1, rows=128, heads=2, groups=2, width=64, capacity=256, key_block=64, dtype="bfloat16", window=100),
)

# Real ones, for compilers and devices: Qwen3-4B (32 and 8 heads of 128), SmolLM2 (9 and 3 of 64),
# Phi-3 (32 of 96), a width of 80, Gemma 2 (8 and 4 of 256, window and cap).
REAL = (
    Shape(slots=1, rows=8, heads=32, groups=8, width=128, capacity=4096, key_block=256),
    Shape(slots=8, rows=8, heads=32, groups=8, width=128, capacity=4096, key_block=256),
    Shape(slots=8, rows=32, heads=32, groups=8, width=128, capacity=4096, key_block=256),
    Shape(slots=1, rows=128, heads=32, groups=8, width=128, capacity=32768, key_block=256),
    Shape(slots=64, rows=8, heads=32, groups=8, width=128, capacity=2048, key_block=256),
    Shape(slots=8, rows=8, heads=9, groups=3, width=64, capacity=2048, key_block=256),
    Shape(slots=4, rows=8, heads=32, groups=32, width=96, capacity=4096, key_block=128),
    Shape(slots=4, rows=16, heads=20, groups=20, width=80, capacity=2048, key_block=128),
    Shape(slots=4, rows=16, heads=8, groups=4, width=256, capacity=8192, key_block=128, window=4096, cap=50.0),
    Shape(slots=4, rows=8, heads=8, groups=1, width=128, capacity=2048, key_block=256, dtype="float32"),
)
