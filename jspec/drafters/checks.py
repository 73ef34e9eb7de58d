"""What the configurations of all trained drafters are held to."""

from __future__ import annotations

from typing import Any, Protocol

from jspec.errors import JspecError
from jspec.target.config import TargetConfig

FIX = "correct the drafter's configuration, or get the checkpoint again."


class Made(Protocol):
    """Facts of the target that a drafter was made for."""

    @property
    def family(self) -> str: ...
    @property
    def target_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def width(self) -> int: ...


def whole_numbers(config: Any, *names: str) -> None:
    """Refuses what is not a whole number of at least 1."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise JspecError(f"`{name}` of the drafter is `{value!r}`.", "a whole number of at least 1.", FIX)


def heads(heads: int, kv_heads: int, head_width: int) -> None:
    """Refuses heads that do not share evenly, or that rope cannot turn."""
    if heads % kv_heads or head_width % 2:
        raise JspecError(
            f"the drafter has `{heads}` query and `{kv_heads}` key/value heads of width `{head_width}`.",
            "key/value heads that divide the query heads, and an even width.",
            FIX,
        )


def taps(taps: tuple[int, ...], layers: int) -> None:
    """Refuses taps that are missing, out of range, not in order, or of the target's last block."""
    # The last block is out: what inference sees behind it is normed, what training cached is not (LD-13).
    inside = all(isinstance(t, int) and -1 <= t < layers - 1 for t in taps)
    if not taps or not inside or list(taps) != sorted(set(taps)):
        raise JspecError(
            f"the drafter taps the target's blocks `{list(taps)}`.",
            f"at least one of -1 (the embedding) to {layers - 2}, ascending; not the last block.",
            FIX,
        )


def draft_vocab(size: int | None, vocab_size: int) -> None:
    """Refuses a draft vocabulary that is empty or larger than the target's."""
    if size is not None and not 1 <= size <= vocab_size:
        raise JspecError(f"the draft vocabulary has `{size}` tokens.", f"1 to {vocab_size}.", FIX)


def target(config: Made, target: TargetConfig) -> None:
    """Refuses a target of another shape than the drafter was made for."""
    wanted = {"vocab_size": config.vocab_size, "width": config.width, "layers": config.target_layers}
    for name, value in wanted.items():
        if getattr(target, name) != value:
            raise JspecError(
                f"`{config.family}` was made for a target whose `{name}` is `{value}`, and this one's is "
                f"`{getattr(target, name)}`.",
                "the target that the drafter was trained for.",
                "load that target, or a drafter for this one.",
            )
