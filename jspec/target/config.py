"""`TargetConfig`: everything about a target model that is not an array.

Frozen and hashable, so that it can be a static argument of a jitted function and a part of the
compilation key. Foreign configurations (GGUF metadata, Hugging Face JSON) become a `TargetConfig`
in their readers and nowhere else.
"""

from __future__ import annotations

import dataclasses

from jspec.errors import JspecError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021), rotate-half pairing over the whole head.

    `theta` is the base of the frequencies: pair i of a head of width hd turns by
    `position * theta ** (-2 i / hd)`.
    """

    theta: float = 10_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A decoder-only transformer of the Llama block.

    Letters are those used across jspec: `V` vocabulary, `D` width, `L` layers, `H` query heads,
    `G` key/value heads, `hd` head width, `F` feed-forward width.
    """

    family: str  # "llama"
    vocab_size: int  # V, rows of the embedding
    width: int  # D
    layers: int  # L
    heads: int  # H
    kv_heads: int  # G, divides H
    head_width: int  # hd, even
    ff_width: int  # F
    max_positions: int  # the longest sequence the checkpoint was made for, in tokens
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tied_head: bool = True  # the embedding is the head

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_width", "ff_width", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise JspecError(
                    f"`{name}` of the target is `{value!r}`.",
                    "a whole number of at least 1.",
                    "check the checkpoint's configuration; the file may be damaged.",
                )
        if self.heads % self.kv_heads:
            raise JspecError(
                f"the target has `{self.heads}` query heads and `{self.kv_heads}` key/value heads.",
                "key/value heads that divide the query heads.",
                "check the checkpoint's configuration; the file may be damaged.",
            )
        if self.head_width % 2:
            raise JspecError(
                f"the target's head width is `{self.head_width}`.",
                "an even number, since rotary embedding turns pairs.",
                "check the checkpoint's configuration; the file may be damaged.",
            )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads
