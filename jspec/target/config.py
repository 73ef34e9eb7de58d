"""`TargetConfig`: everything about a target model that is not an array.

Frozen and hashable, so that it can be a static argument of a jitted function and a part of the
compilation key. Foreign configurations (GGUF metadata, Hugging Face JSON) become a `TargetConfig`
in their readers and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jspec.errors import JspecError

ACTIVATIONS = ("silu", "gelu_tanh")
ROPES = ("default", "linear", "dynamic", "llama3", "yarn")

_DAMAGED = "check the checkpoint's configuration; the file may be damaged."
_HUGE = 2**31 - 1  # beyond any model; keeps a damaged number from overflowing somewhere behind


def _check_whole(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _HUGE:
        raise JspecError(f"`{name}` of the target is `{value!r}`.", f"a whole number of at least {low}.", _DAMAGED)


def _check_positive(name: str, value: object) -> None:
    # The comparison is False for what is not a number, too.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e30:
        raise JspecError(f"`{name}` of the target is `{value!r}`.", "a finite number above 0, up to 1e30.", _DAMAGED)


def _check_blocks(name: str, blocks: Sequence[int], layers: int) -> None:
    if list(blocks) != sorted(set(blocks)) or not all(0 <= i < layers for i in blocks):
        raise JspecError(
            f"`{name}` of the target is `{tuple(blocks)}`.",
            f"ascending, different 0-based blocks from 0 to {layers - 1}.",
            _DAMAGED,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021), rotate-half pairing over the whole head.

    `theta` is the base of the frequencies: pair i of a head of width hd turns by
    `position * theta ** (-2 i / hd)`. The other kinds change that table for texts longer than the
    `original` ones (`rope.frequencies`). Fields that a kind does not name in its line are unused by it.

        default
        linear   factor
        dynamic  factor, original, length
        llama3   factor, original, low, high
        yarn     factor, original, beta_fast, beta_slow, truncate, scale
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0  # tokens of the longest text before the scaling
    length: int = 0  # dynamic: the text length, in tokens, that the table is made for; see `rope.frequencies`
    low: float = 1.0  # llama3: turns in `original` positions below which a pair is slowed by `factor`
    high: float = 4.0  # llama3: turns above which a pair is left alone
    beta_fast: float = 32.0  # yarn: the same bounds, from above
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: bounds are rounded to whole pairs
    scale: float = 1.0  # yarn: cosine and sine are multiplied by it, so attention scores by its square

    def __post_init__(self) -> None:
        if self.kind not in ROPES:
            raise JspecError(
                f"the rope type is `{self.kind}`.",
                f"{', '.join(f'`{name}`' for name in ROPES)}.",
                "use a checkpoint with one of these rope types.",
            )
        for name in ("theta", "factor", "low", "high", "beta_fast", "beta_slow", "scale"):
            _check_positive(f"rope's {name}", getattr(self, name))
        if self.kind in ("dynamic", "llama3", "yarn"):
            _check_whole("rope's original", self.original, 1)
        if self.kind == "llama3" and self.low >= self.high:
            raise JspecError(
                f"rope's bounds are low `{self.low}` and high `{self.high}`.",
                "a low bound below the high one.",
                _DAMAGED,
            )
        if self.kind == "yarn" and (self.theta <= 1 or self.beta_slow > self.beta_fast):
            raise JspecError(
                f"rope has base `{self.theta}`, beta_fast `{self.beta_fast}` and beta_slow `{self.beta_slow}`.",
                "a base above 1 and a beta_fast of at least beta_slow.",
                _DAMAGED,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """A mixture of experts: a router sends each token to `per_token` of `experts` feed-forward nets."""

    experts: int  # E
    per_token: int  # of 1 .. E
    width: int  # F of each expert
    normalize: bool  # the chosen experts' probabilities are scaled to a sum of 1
    layers: tuple[int, ...]  # blocks that are such a mixture, ascending; the others are dense

    def __post_init__(self) -> None:
        for name in ("experts", "per_token", "width"):
            _check_whole(f"{name} of the mixture", getattr(self, name), 1)
        if self.per_token > self.experts:
            raise JspecError(
                f"each token goes to `{self.per_token}` of `{self.experts}` experts.",
                "no more than there are.",
                _DAMAGED,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A decoder-only transformer of the Llama block, with the variations of its relatives.

    Letters are those used across jspec: `V` vocabulary, `D` width, `L` layers, `H` query heads,
    `G` key/value heads, `hd` head width, `F` feed-forward width, `E` experts.

    What is a matter of weights alone is not here: Gemma's norms multiply by one plus what the
    checkpoint stores, and the readers add that one (`families.py`).
    """

    family: str  # "llama", "qwen2", ...: what the checkpoint calls itself
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
    activation: str = "silu"  # of the feed-forward gate; one of `ACTIVATIONS`

    # Biases
    qkv_bias: bool = False
    out_bias: bool = False  # behind the attention
    ff_bias: bool = False  # gate, up and down

    # Norms and scales
    qk_norm: bool = False  # queries and keys are normed over the head, before rope
    post_norms: bool = False  # what attention and feed-forward add is normed first
    embed_scale: float = 1.0  # embeddings are multiplied by it, rounded to the weights' dtype
    query_scale: float | None = None  # scores are multiplied by it; None is hd ** -0.5
    score_cap: float | None = None  # c: attention scores s become c * tanh(s / c)
    logit_cap: float | None = None  # the same for the logits

    # Sliding windows
    window: int = 0  # tokens that a row of a windowed layer reads, itself included; 0 is none
    windowed: tuple[int, ...] = ()  # blocks with that window, ascending; the others read everything
    window_rope: RopeConfig | None = None  # of the windowed blocks; None is `rope`

    moe: MoeConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_width", "ff_width", "max_positions"):
            _check_whole(name, getattr(self, name), 1)
        if self.heads % self.kv_heads:
            raise JspecError(
                f"the target has `{self.heads}` query heads and `{self.kv_heads}` key/value heads.",
                "key/value heads that divide the query heads.",
                _DAMAGED,
            )
        if self.head_width % 2:
            raise JspecError(
                f"the target's head width is `{self.head_width}`.",
                "an even number, since rotary embedding turns pairs.",
                _DAMAGED,
            )
        if self.activation not in ACTIVATIONS:
            raise JspecError(
                f"the target's activation is `{self.activation}`.",
                f"{', '.join(f'`{name}`' for name in ACTIVATIONS)}.",
                "use a checkpoint with one of these activations.",
            )
        for name in ("norm_eps", "embed_scale", "query_scale", "score_cap", "logit_cap"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        ropes = (self.rope, self.window_rope)
        if self.head_width == 2 and any(r is not None and r.kind == "dynamic" for r in ropes):
            raise JspecError("the rope type is `dynamic` and the head width `2`.", "a head width above 2.", _DAMAGED)
        _check_blocks("windowed", self.windowed, self.layers)
        _check_blocks("the mixture's layers", self.moe.layers if self.moe else (), self.layers)
        if bool(self.windowed) != (self.window > 0):
            raise JspecError(
                f"the target has a window of `{self.window}` tokens and `{len(self.windowed)}` windowed layers.",
                "a window of at least 1 with windowed layers, or 0 without.",
                _DAMAGED,
            )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotary embedding of a block."""
        return self.window_rope if self.window_rope is not None and layer in self.windowed else self.rope

    def is_sparse(self, layer: int) -> bool:
        """Whether a block is a mixture of experts."""
        return self.moe is not None and layer in self.moe.layers
