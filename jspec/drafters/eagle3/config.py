"""`EagleConfig`: everything about an EAGLE-3 drafter that is not an array (Li et al., arXiv 2503.01840)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jspec.drafters import checks
from jspec.errors import JspecError
from jspec.target.config import RopeConfig, TargetConfig

FUSE_NORMS = ("whole", "each")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """An EAGLE-3 drafter of one layer. Letters as in `block/config.py`.

    The switches are those in which published files differ; a wrong one only shows in what is accepted
    (known-failures DR-7):

        qk_norm        queries and keys are normed before rope (Qwen3), or not (Llama)
        fuse_norm      taps are normed before they are fused: one norm over the `whole` row, or one for `each` tap
        norm_residual  the residual starts from the normed state, not from the state
        norm_output    the state that the next step reads is the one behind the final norm
    """

    family: ClassVar[str] = "eagle3"  # what reports call it
    least: ClassVar[int] = 1  # tokens that must stand before an anchor: the first has no state of the target

    taps: tuple[int, ...]  # 0-based target blocks, ascending; -1 is the embedding
    steps: int = 7  # that training unrolls; drafting may go on for longer

    # Of the target, which lends the embedding.
    target_layers: int
    vocab_size: int  # V
    width: int  # D, of target and drafter

    heads: int
    kv_heads: int
    head_width: int
    ff_width: int
    norm_eps: float = 1e-6
    rope: RopeConfig

    draft_vocab: int | None = None  # Vd; None: the whole vocabulary
    own_head: bool = True  # False: the target's rows of the draft vocabulary
    qk_norm: bool = True
    fuse_norm: str | None = None  # one of FUSE_NORMS
    norm_residual: bool = False
    norm_output: bool = False

    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        checks.whole_numbers(
            self, "steps", "target_layers", "vocab_size", "width", "heads", "kv_heads", "head_width", "ff_width"
        )
        checks.heads(self.heads, self.kv_heads, self.head_width)
        checks.taps(self.taps, self.target_layers)
        checks.draft_vocab(self.draft_vocab, self.vocab_size)
        for name in ("own_head", "qk_norm", "norm_residual", "norm_output"):
            if not isinstance(getattr(self, name), bool):
                raise JspecError(f"`{name}` of the drafter is `{getattr(self, name)!r}`.", "True or False.", checks.FIX)
        if self.fuse_norm is not None and self.fuse_norm not in FUSE_NORMS:
            raise JspecError(
                f"`fuse_norm` of the drafter is `{self.fuse_norm!r}`.", f"None, {', '.join(FUSE_NORMS)}.", checks.FIX
            )

    @property
    def longest(self) -> int:
        """Tokens of a chain that training unrolls."""
        return self.steps

    @property
    def head_size(self) -> int:
        """Vd, columns of its logits."""
        return self.vocab_size if self.draft_vocab is None else self.draft_vocab

    def check_target(self, target: TargetConfig) -> None:
        """Refuses a target of another shape than the drafter was made for."""
        checks.target(self, target)
