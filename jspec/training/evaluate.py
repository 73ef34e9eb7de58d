"""How many tokens a round a drafter would make on texts that are there already.

Drafts are compared with the text, block by block, without decoding: the first block begins at the prompt's last token,
every next one behind what the one before got right and the token that the target adds (the walk of greedy
speculation). Where the text is the target's own greedy answer this is what decoding accepts, up to near ties that
another program shape decides differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.training import filters, forward, packing, products, students
from jspec.training.features import Look
from jspec.training.forward import Batch, Config, Weights
from jspec.training.packing import Shape
from jspec.training.texts import Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """What became of the blocks of some texts."""

    rounds: int
    tokens: int  # drafts accepted, and one more for each round that did not end the answer by a draft
    accepted: tuple[int, ...]  # [K], rounds in which the draft at this place was accepted

    @property
    def length(self) -> float:
        """Tokens a round."""
        return self.tokens / self.rounds if self.rounds else float("nan")

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of the rounds in which each place was accepted."""
        return tuple(n / max(self.rounds, 1) for n in self.accepted)


def right(
    config: Config,
    weights: Weights,
    texts: Sequence[Text],
    look: Look,
    shape: Shape,
    dtype: str = "bfloat16",
) -> list[np.ndarray]:
    """For each text, how many drafts of a block are right before the first wrong one, wherever it begins.

    Args:
      weights: whose linear weights are in the dtype they will be used in.
      texts: none longer than a row.
      shape: of the batches that are computed.
      dtype: of the operands of products.

    Returns:
      for each text `[n]` int32, by the place of the block's anchor; 0 where no block may begin.
    """
    out = [np.zeros(len(text.tokens), np.int32) for text in texts]
    units = []  # a text and at most A of its places
    for number, text in enumerate(texts):
        places = packing.candidates(text.loss_mask)
        units += [(number, places[i : i + shape.anchors]) for i in range(0, len(places), shape.anchors)]
    for start in range(0, len(units), shape.rows):
        part = units[start : start + shape.rows]
        seen = look([number for number, _ in part])
        rows = [[(texts[number], s)] for (number, _), s in zip(part, seen, strict=True)]
        anchors = np.full((shape.rows, shape.anchors), -1, np.int32)
        for row, (_, places) in zip(anchors, part, strict=False):
            row[: len(places)] = places
        batch = packing.assemble(rows, shape, None).replace(anchors=jnp.asarray(anchors))
        found = np.asarray(_right(config, dtype, weights, batch))
        for (number, places), row in zip(part, found, strict=False):
            out[number][places] = row[: len(places)]
    return out


def walk(texts: Sequence[Text], found: Sequence[np.ndarray], proposals: int) -> Walk:
    """Goes through every answer as greedy speculation with `proposals` drafts a round does.

    Args:
      found: what `right` returned for the texts.
    """
    rounds = tokens = 0
    accepted = np.zeros(proposals, np.int64)
    for text, row in zip(texts, found, strict=True):
        for start, end in text.answers:
            at = start - 1  # the anchor
            if at < 0:
                at, tokens = 0, tokens + 1  # nothing stands before: the first token is no draft
            while at < end - 1:
                count = min(int(row[at]), proposals)
                accepted[:count] += 1
                made = min(count + 1, end - 1 - at)
                rounds, tokens, at = rounds + 1, tokens + made, at + made
    return Walk(rounds=rounds, tokens=tokens, accepted=tuple(int(n) for n in accepted))


def loop_free(texts: Sequence[Text], found: Sequence[np.ndarray]) -> tuple[list[Text], list[np.ndarray]]:
    """Those whose answers repeat no run of 8 tokens: acceptance on loops says little about a drafter."""
    kept = [
        (text, row)
        for text, row in zip(texts, found, strict=True)
        if all(filters.loop_free(text.tokens[start:end].tolist()) for start, end in text.answers)
    ]
    return [text for text, _ in kept], [row for _, row in kept]


@partial(jax.jit, static_argnums=(0, 1))
def _right(config: Config, dtype: str, weights: Weights, batch: Batch) -> Array:
    """`[R, A]` int32."""
    contract = products.contraction(jnp.dtype(dtype))
    said = students.drafts(config, weights, batch, contract)
    columns, counted = forward.wanted(config, weights, batch)
    hit = counted & (jnp.argmax(said.logits, axis=-1).astype(jnp.int32) == columns)
    return jnp.sum(jnp.cumprod(hit.astype(jnp.int32), axis=-1), axis=-1)
