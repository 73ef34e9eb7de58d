"""A drafter that proposes what the test wrote down: any tokens, any number of them, at any position.

Its script is an array, not a setting, so one compiled program serves every script: the oracle, the
wrong one, ragged drafts, rounds without a draft. A request is known by its first token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.decoding.request import Request
from jspec.decoding.sampling import Sampling
from jspec.drafters import history
from jspec.drafters.base import Drafter, Proposal, Rows

REQUESTS, COLUMNS = 16, 96


class Script(flax.struct.PyTreeNode):
    """What to propose for each request."""

    tokens: Array  # [REQUESTS, COLUMNS] int32, the token proposed for each position
    counts: Array  # [REQUESTS, COLUMNS] int32, how many are proposed behind an anchor at each position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted(Drafter):
    """Proposes by a `Script`."""

    @property
    def name(self) -> str:
        return f"scripted_k{self.proposals}"

    def init(self, weights: Script, slots: int, capacity: int) -> Array:
        return history.init(slots, capacity)

    def observe(self, weights: Script, state: Array, rows: Rows) -> Array:
        return history.observe(state, rows)

    def reset(self, state: Array, slot: Array) -> Array:
        return history.reset(state, slot)

    def propose(self, weights: Script, state: Any, anchor: Array, position: Array, sampling: Sampling) -> Proposal:
        which = jnp.clip(jnp.where(position == 0, anchor, state[:, 0]), 0, REQUESTS - 1)
        ahead = position[:, None] + 1 + jnp.arange(self.proposals, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(weights.tokens[which], jnp.minimum(ahead, COLUMNS - 1), axis=1)
        return Proposal(tokens=tokens, count=weights.counts[which, jnp.minimum(position, COLUMNS - 1)])


def script(
    requests: list[Request],
    outputs: list[tuple[int, ...]],
    *,
    counts: int | list[int] = 99,
    right: list[bool] | bool = True,
    every: int = 1,
    wrong_by: int = 1,
) -> Script:
    """A script from the texts that plain decoding wrote.

    Args:
      requests, outputs: prompts and what followed them.
      counts: proposals a round; a list gives one number for each request.
      right: whether proposals are right; a list is used in turn, by position.
      every: a draft is offered only at positions that are multiples of it.
      wrong_by: what is added to a token to make it wrong.
    """
    tokens = np.zeros((REQUESTS, COLUMNS), np.int32)
    made = np.zeros((REQUESTS, COLUMNS), np.int32)
    for r, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        row = request.prompt[0]
        text = np.array([*request.prompt, *output], np.int32)
        good = np.resize([right] if isinstance(right, bool) else right, len(text))
        tokens[row, : len(text)] = np.where(good, text, text + wrong_by)
        made[row] = counts[r] if isinstance(counts, list) else counts
        made[row, np.arange(COLUMNS) % every != 0] = 0
    return Script(tokens=jnp.asarray(tokens), counts=jnp.asarray(made))
