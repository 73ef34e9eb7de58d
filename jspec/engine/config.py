"""`EngineConfig`: the shapes that a compiled engine fixes, and with them its bits."""

from __future__ import annotations

import dataclasses
import math

from jspec.errors import JspecError
from jspec.target.config import TargetConfig

LONGEST_BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """A static engine: everything that the compiled programs depend on, besides the drafter.

    Inside one engine the text is a function of prompt, sampling settings and seed alone. Two
    engines that differ in any field may differ in the last bits.
    """

    target: TargetConfig
    slots: int = 1  # B, requests decoded together
    rows: int = 8  # N, rows of a block: the last committed token and up to N - 1 proposals
    max_length: int = 1024  # prompt and output together, in tokens
    chunk: int = 64  # C, prompt tokens a prefill call reads
    key_block: int = 64  # columns of one key block
    taps: tuple[int, ...] = ()  # blocks whose residual any drafter reads

    def __post_init__(self) -> None:
        for name, low, high in (
            ("slots", 1, 4096),
            ("rows", 1, LONGEST_BLOCK),
            ("max_length", 2, self.target.max_positions),
            ("chunk", 1, 4096),
            ("key_block", 1, 4096),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise JspecError(
                    f"`{name}` of the engine is `{value!r}`.",
                    f"a whole number from {low} to {high}.",
                    f"choose `{name}` in that range"
                    + (": the target was made for no longer text." if name == "max_length" else "."),
                )
        bad = [t for t in self.taps if not 0 <= t < self.target.layers]
        if bad or list(self.taps) != sorted(set(self.taps)):
            raise JspecError(
                f"`taps` of the engine is `{self.taps}`.",
                f"ascending, different 0-based blocks from 0 to {self.target.layers - 1}.",
                "correct the drafter's list of tapped layers.",
            )

    @property
    def capacity(self) -> int:
        """S, columns of the cache: room for a whole block behind the last token, on whole key
        blocks and whole chunks, since an update that does not fit would be shifted silently."""
        unit = math.lcm(self.key_block, self.chunk)
        return -(-(self.max_length + self.rows - 1) // unit) * unit
