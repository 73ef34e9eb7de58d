"""Which answers are worth learning from: small targets fall into loops, and a loop teaches only itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.training.texts import Text

GRAM = 8  # tokens


def repeated(tokens: Sequence[int] | np.ndarray, size: int = GRAM) -> float:
    """Share of the runs of `size` tokens that stood before in the same text; 0 for shorter texts."""
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def loop_free(tokens: Sequence[int] | np.ndarray) -> bool:
    """Whether no run of 8 tokens occurs twice."""
    return repeated(tokens) == 0.0


def looping(tokens: Sequence[int], *, run: int = 32, every: int = 16) -> bool:
    """Whether an answer has gone in circles for `run` tokens: each run of 8 that ends there stood before.

    Looked at after each `every` tokens only, so that asking after every token costs little.
    """
    if len(tokens) % every or len(tokens) < 2 * run:
        return False
    runs = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return set(runs[-run:]) <= set(runs[:-run])


def worth(text: Text, *, least: int = 16, most_repeated: float = 0.3) -> bool:
    """Whether every answer of a text has at least `least` tokens, and repeats no more of itself than allowed."""
    spans = [text.tokens[start:end] for start, end in text.answers]
    return bool(spans) and all(len(s) >= least and repeated(s.tolist()) <= most_repeated for s in spans)
