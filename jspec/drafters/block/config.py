"""`BlockConfig`: everything about a block drafter that is not an array.

Three published drafters share one body and differ in parts that are settings here:

    DFlash   one fusion for all layers, context and block share their key and value weights (arXiv 2602.06036)
    DFlare   a mix of taps for each layer, context rows have key and value weights of their own (arXiv 2606.02091)
    DSpark   DFlash's body, a Markov head that lets each draft see the one before, a confidence head (arXiv 2607.05147)
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jspec.drafters import checks
from jspec.errors import JspecError
from jspec.target.config import RopeConfig, TargetConfig

FAMILIES = ("dflash", "dflare", "dspark")
MARKOV = ("vanilla", "gated", "rnn")
CONFIDENCE = ("hidden", "markov")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A block drafter. Letters are those of jspec: `D` width, `H`/`G` query/KV heads, `Vd` draft vocabulary.

    The slot convention decides which row predicts what. With the anchor at position s:

        infill       row k predicts position s + k,     row 0 nothing; K up to `block - 1`
        from_anchor  row k predicts position s + k + 1, row 0 included; K up to `block`
    """

    least: ClassVar[int] = 0  # tokens that must stand before an anchor

    family: str  # one of FAMILIES: what reports call it
    block: int  # rows it was trained with, the anchor's included
    from_anchor: bool
    mask_id: int  # the token whose embedding stands in rows 1 .. block - 1
    taps: tuple[int, ...]  # 0-based target blocks, ascending; -1 is the embedding

    # Of the target, which lends embedding and head.
    target_layers: int
    vocab_size: int  # V
    width: int  # D, of target and drafter

    layers: int
    heads: int
    kv_heads: int
    head_width: int
    ff_width: int
    norm_eps: float = 1e-6
    rope: RopeConfig

    draft_vocab: int | None = None  # Vd; None: the whole vocabulary
    layerwise: bool = False  # DFlare: fusion and key/value weights of the context for each layer
    markov: str | None = None  # one of MARKOV
    rank: int = 0  # r of the Markov head
    shared_row: bool = False  # the Markov table has a row for each draft token and one for all others
    confidence: str | None = None  # what the confidence head reads besides the hidden state: one of CONFIDENCE

    window: int = 0  # positions that a windowed layer looks back; 0 is none
    windowed: tuple[int, ...] = ()
    causal: tuple[int, ...] = ()  # layers whose rows do not see later rows of the block

    embed_scale: float = 1.0
    logit_scale: float = 1.0  # logits are multiplied by it, before the cap
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise JspecError(f"the drafter's family is `{self.family!r}`.", ", ".join(FAMILIES) + ".", checks.FIX)
        checks.whole_numbers(
            self, "target_layers", "vocab_size", "width", "layers", "heads", "kv_heads", "head_width", "ff_width"
        )
        checks.heads(self.heads, self.kv_heads, self.head_width)
        least = 1 if self.from_anchor else 2
        if not isinstance(self.block, int) or isinstance(self.block, bool) or not least <= self.block <= 128:
            raise JspecError(
                f"the drafter's block has `{self.block!r}` rows.",
                f"{least} to 128: it must predict at least one token.",
                checks.FIX,
            )
        if not 0 <= self.mask_id < self.vocab_size:
            raise JspecError(
                f"the drafter's mask token is `{self.mask_id}`.",
                f"a row of the target's embedding, 0 to {self.vocab_size - 1}.",
                checks.FIX,
            )
        checks.taps(self.taps, self.target_layers)
        checks.draft_vocab(self.draft_vocab, self.vocab_size)
        if self.markov is not None and (self.markov not in MARKOV or self.rank < 1):
            raise JspecError(
                f"the Markov head is `{self.markov!r}` of rank `{self.rank}`.",
                f"{', '.join(MARKOV)} of a rank of at least 1; none at all for rank 0.",
                checks.FIX,
            )
        if self.markov is None and (self.rank or self.shared_row):
            raise JspecError(
                f"the drafter has rank `{self.rank}` and no Markov head.", "a rank only with a Markov head.", checks.FIX
            )
        if self.confidence is not None and (
            self.confidence not in CONFIDENCE or (self.confidence == "markov" and self.markov is None)
        ):
            raise JspecError(
                f"the confidence head reads `{self.confidence!r}`, and the Markov head is `{self.markov}`.",
                "`hidden`, or `markov` beside a Markov head.",  # known-failures DR-9
                checks.FIX,
            )
        for name in ("windowed", "causal"):
            value = getattr(self, name)
            if list(value) != sorted(set(value)) or not all(0 <= i < self.layers for i in value):
                raise JspecError(
                    f"`{name}` of the drafter is `{value}`.",
                    f"ascending layers from 0 to {self.layers - 1}.",
                    checks.FIX,
                )
        if self.windowed and self.window < 1:
            raise JspecError(f"the drafter's window is `{self.window}`.", "at least 1 position.", checks.FIX)

    @property
    def longest(self) -> int:
        """K at most."""
        return self.block if self.from_anchor else self.block - 1

    @property
    def first(self) -> int:
        """The row that predicts the first token behind the anchor."""
        return 0 if self.from_anchor else 1

    @property
    def head_size(self) -> int:
        """Vd, columns of its logits."""
        return self.vocab_size if self.draft_vocab is None else self.draft_vocab

    @property
    def markov_rows(self) -> int:
        """Rows of the Markov head's table of predecessors."""
        return self.head_size + 1 if self.shared_row else self.vocab_size

    def check_target(self, target: TargetConfig) -> None:
        """Refuses a target of another shape than the drafter was made for."""
        checks.target(self, target)


def spread(layers: int, count: int) -> tuple[int, ...]:
    """Taps by the rule of the DFlash family: `count` blocks from the second to the third last (drafters.md 1.3)."""
    if count == 1:
        return (layers // 2,)
    # Python's round: half to even, as the published lists have it.
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
