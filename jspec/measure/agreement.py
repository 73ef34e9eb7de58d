"""Where the text leaves that of the N = 1 program, and by how little.

Equality with another program is never promised; it is reported: which prompts differ, the first
differing token, and how close the two best tokens were there. A difference at a gap that is large for
the dtype would be a fault, not rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jspec.decoding import tree
from jspec.engine import static
from jspec.engine.config import EngineConfig
from jspec.measure import report
from jspec.measure.conversations import Contender, Settings, request
from jspec.target import cache as kv
from jspec.target.checkpoint import Checkpoint

if TYPE_CHECKING:
    from jspec.measure.bench import Group

NATIVE = "baseline_native"


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length if one ends early, None if equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def gap_after(checkpoint: Checkpoint, config: EngineConfig, text: Sequence[int]) -> float:
    """Distance of the two largest logits after `text`, by the engine's own programs."""
    cache = kv.init(config.target, config.slots, config.capacity, checkpoint.params.dtype)
    ids = np.asarray(text, np.int32)
    for tokens, start, count in static.chunks(config, ids):
        _, _, cache = static.prefill(config, checkpoint.params, cache, jnp.int32(0), tokens, start, count)
    anchor = jnp.zeros((config.slots,), jnp.int32).at[0].set(int(ids[-1]))
    none = jnp.zeros((config.slots,), jnp.int32)
    block = tree.chain(anchor, jnp.zeros((config.slots, 0), jnp.int32), none, config.rows)
    logits, _, _, _ = static.verify(config, checkpoint.params, cache, block)
    second, first = np.sort(np.asarray(logits[0, 0]))[-2:]
    return float(first - second)


def lines(
    checkpoint: Checkpoint,
    config: EngineConfig,
    racers: Sequence[Contender],
    groups: Sequence[Group],
    settings: Settings,
) -> list[str]:
    """The promise and how it was kept, for the engine's plain run against the N = 1 program."""
    names = [r.name for r in racers]
    if NATIVE not in names or "baseline" not in names:
        return []
    differences: list[tuple[int, int, float | None]] = []
    place = 0
    for group in groups:
        for prompt, ours, native in zip(group.prompts, group.traces["baseline"], group.traces[NATIVE], strict=True):
            answers: list[str] = []
            for a, b in zip(ours, native, strict=True):
                at = first_difference(a.tokens, b.tokens)
                if at is not None:
                    ids = request(checkpoint, prompt, answers, settings).prompt + a.tokens[:at]
                    gap = gap_after(checkpoint, config, ids) if settings.temperature == 0 else None
                    differences.append((place, at, gap))
                    break  # a later turn holds another answer, so it has another prompt
                answers.append(checkpoint.tokenizer.decode(list(a.tokens)))
            place += 1
    promise = f"native: the engine of {config.rows} rows against the program of 1 row"
    return report.parity_lines(promise, place, differences)
