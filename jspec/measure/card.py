"""The cost card: what the model and the memory allow, before anything is measured.

One step of plain decoding reads all weights once, for however many slots, and the K/V of every
slot's tokens. It cannot take less time than that reading does. The card's bound is for one token
per slot and step; speculation passes it by making several.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.errors import JspecError


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_width: int, bytes_per_value: int) -> int:
    """Bytes of keys and values that one token of one slot keeps in the cache, over all layers."""
    return 2 * layers * kv_heads * head_width * bytes_per_value


def floor_tps(B: int, *, weight_bytes: int, kv_bytes: int, bandwidth_gb_s: float) -> float:
    """The most output tok/s that plain decoding can reach with weights in main memory.

    `B * R / (weight bytes + K/V bytes read)`: `B` tokens a step, divided by the step's least time.

    Args:
      B: slots, each making one token a step.
      weight_bytes: bytes of weights that a step reads. A tied embedding counts once, as the head.
      kv_bytes: bytes of K/V that a step reads, all slots together.
      bandwidth_gb_s: R, read-only bandwidth in GB/s.
    """
    return B * bandwidth_gb_s * 1e9 / (weight_bytes + kv_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """The figures of one model on one machine."""

    model: str
    dtype: str
    weight_bytes: int  # read by one step
    kv_bytes_per_token: int
    context: int  # tokens per slot for which the bound is stated
    bandwidth_gb_s: float
    bandwidth_source: str  # "measured: ..." or "given"
    l3_bytes: int | None

    def __post_init__(self) -> None:
        if self.weight_bytes < 1 or self.kv_bytes_per_token < 0 or self.context < 0 or not self.bandwidth_gb_s > 0:
            raise JspecError(
                f"the cost card got {self.weight_bytes} weight bytes, {self.kv_bytes_per_token} K/V bytes a token, "
                f"a context of {self.context} tokens and {self.bandwidth_gb_s} GB/s.",
                "weight bytes and bandwidth above 0, the others at least 0.",
                "check the model's configuration.",
            )

    def floor_tps(self, B: int) -> float:
        """Bound on plain decoding at `B` slots with `context` tokens each, in tok/s of all slots."""
        return floor_tps(
            B,
            weight_bytes=self.weight_bytes,
            kv_bytes=B * self.context * self.kv_bytes_per_token,
            bandwidth_gb_s=self.bandwidth_gb_s,
        )

    def lines(self, batches: tuple[int, ...] = (1, 8)) -> list[str]:
        """The card for people, one aligned line a figure."""
        entries = [
            ("model", f"{self.model}, {self.dtype}"),
            ("weights", f"{self.weight_bytes / 1e6:,.1f} MB read by every step"),
            ("K/V", f"{self.kv_bytes_per_token / 1e3:,.1f} kB a token"),
            ("bandwidth", f"{self.bandwidth_gb_s:,.1f} GB/s ({self.bandwidth_source})"),
            ("L3", f"{self.l3_bytes / (1 << 20):,.0f} MiB" if self.l3_bytes else "not known"),
        ]
        if self.l3_bytes and self.weight_bytes <= self.l3_bytes:
            entries.append(("note", "the weights fit in L3, so the floor below does not bind"))
        entries += [
            (f"floor B={B}", f"{self.floor_tps(B):,.1f} tok/s for plain decoding at {self.context} tokens of context")
            for B in batches
        ]
        width = max(len(label) for label, _ in entries)
        return [f"{label:<{width}}  {text}" for label, text in entries]

    def as_dict(self, batches: tuple[int, ...] = (1, 8)) -> dict[str, Any]:
        """The card for programs, with `floor_tps` by number of slots."""
        return {**dataclasses.asdict(self), "floor_tps": {str(B): self.floor_tps(B) for B in batches}}
