"""Batches of training: texts side by side in rows of one length, with anchors drawn anew every time.

Which batch a step reads is a function of the seed and the step's number alone, so a run that goes on after a stop
reads what it would have read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from jspec.errors import JspecError
from jspec.training.features import BFLOAT16, Look, Seen
from jspec.training.forward import Batch
from jspec.training.texts import Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The fixed shape of a batch."""

    rows: int = 4  # R
    length: int = 512  # S, tokens of a row
    anchors: int = 64  # A, of a row

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("length", 2), ("anchors", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise JspecError(
                    f"`{name}` of a batch is `{value!r}`.", f"a whole number of at least {least}.", "correct it."
                )


def cut(texts: Iterable[Text], length: int) -> list[Text]:
    """The texts cut to at most `length` tokens; those with no label left are left out."""
    out = []
    for text in texts:
        if len(text.tokens) > length:
            spans = tuple((start, min(end, length)) for start, end in text.answers if start < length)
            text = dataclasses.replace(text, tokens=text.tokens[:length], answers=spans)
        if len(candidates(text.loss_mask)):
            out.append(text)
    return out


def candidates(learned: np.ndarray) -> np.ndarray:
    """Places `[m]` of a text where a block may begin: the next token is one to learn.

    The last token of the prompt is one of them: the first block of an answer begins there.
    """
    return np.flatnonzero(learned[1:])


def pack(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Numbers of the texts of each row: longest first, each into the fullest row that has room for it."""
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = lengths[number]
        room = next((room for room in range(size, length) if by_room[room]), length)
        if room == length:
            rows.append([])
            by_room[length].append(len(rows) - 1)
        row = by_room[room].pop()
        rows[row].append(number)
        by_room[room - size].append(row)
    return rows


class Stream:
    """The batches of a run.

    Args:
      texts: none longer than a row (`cut`), each with something to learn.
      look: features of the texts by their numbers.
    """

    def __init__(self, texts: Sequence[Text], look: Look, shape: Shape, seed: int) -> None:
        if not texts:
            raise JspecError("there are no texts to train on.", "at least one with an answer.", "check the filters.")
        self.texts, self.look, self.shape, self.seed = texts, look, shape, seed
        self.packed = pack([len(text.tokens) for text in texts], shape.length)
        self.epoch = -(-len(self.packed) // shape.rows)  # batches of an epoch; the last may have empty rows

    def place(self, number: int) -> tuple[int, list[list[int]]]:
        """The epoch of a batch, and the texts of its rows. Each text stands once in every epoch."""
        epoch, index = divmod(number, self.epoch)
        order = np.random.default_rng([self.seed, 0, epoch]).permutation(len(self.packed))
        part = order[index * self.shape.rows : (index + 1) * self.shape.rows]
        return epoch, [self.packed[row] for row in part]

    def batch(self, number: int) -> Batch:
        """The batch of this number, from 0; NumPy arrays."""
        _, rows = self.place(number)
        seen = iter(self.look([i for row in rows for i in row]))
        rng = np.random.default_rng([self.seed, 1, number])
        return assemble([[(self.texts[i], next(seen)) for i in row] for row in rows], self.shape, rng)


def assemble(rows: Sequence[Sequence[tuple[Text, Seen]]], shape: Shape, rng: np.random.Generator | None) -> Batch:
    """Puts texts side by side.

    Args:
      rows: at most `shape.rows`, each of texts that fit into `shape.length` together.
      rng: draws the anchors, without replacement; None takes the first ones.

    Returns:
      a `Batch` of NumPy arrays; anchors of a row ascend, with -1 behind them.
    """
    r, s, a = shape.rows, shape.length, shape.anchors
    first = rows[0][0][1]
    tokens, position = np.zeros((r, s), np.int32), np.zeros((r, s), np.int32)
    document, learned = np.full((r, s), -1, np.int32), np.zeros((r, s), bool)
    anchors = np.full((r, a), -1, np.int32)
    features = np.zeros((r, s, first.taps.shape[1]), BFLOAT16)
    hidden, lse = np.zeros((r, s, first.hidden.shape[1]), BFLOAT16), np.zeros((r, s), np.float32)
    for i, row in enumerate(rows):
        at, places = 0, []
        for number, (text, seen) in enumerate(row):
            part = slice(at, at + len(text.tokens))
            tokens[i, part], position[i, part] = text.tokens, np.arange(len(text.tokens))
            document[i, part], learned[i, part] = number, text.loss_mask
            features[i, part], hidden[i, part], lse[i, part] = seen.taps, seen.hidden, seen.lse
            places.append(candidates(text.loss_mask) + at)
            at = part.stop
        found = np.concatenate(places) if places else np.zeros(0, np.int64)
        if len(found) > a:
            found = found[:a] if rng is None else np.sort(rng.choice(found, a, replace=False))
        anchors[i, : len(found)] = found
    arrays = (tokens, document, position, learned, anchors, features, hidden, lse)
    return Batch(*(jnp.asarray(x) for x in arrays))
