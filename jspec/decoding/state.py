"""What a round needs and what it tells: `DecodeState` and `RoundInfo`."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import Array

from jspec.decoding import processors
from jspec.decoding.logprobs import Scores
from jspec.decoding.processors import Occurrences, Processors
from jspec.decoding.sampling import Sampling, greedy
from jspec.engine.config import EngineConfig
from jspec.target import cache as kv
from jspec.target.cache import KVCache

RUNNING, STOP, LENGTH, ERROR, LAWLESS, ABORT = 0, 1, 2, 3, 4, 5  # the last is the host's own
FINISH_NAMES = {
    RUNNING: "running",
    STOP: "stop",
    LENGTH: "length",
    ERROR: "error",
    LAWLESS: "error",
    ABORT: "abort",
}

END_IDS = 8  # end tokens a request may name


class DecodeState(flax.struct.PyTreeNode):
    """All that changes from round to round, for `B` slots.

    `length` counts the committed tokens, prompt included. The last of them is the anchor: its key
    and value are not written yet, so `cache.length` is `length - 1` in a slot that runs.
    """

    cache: KVCache
    drafter: Any
    anchor: Array  # [B] int32, the last committed token
    length: Array  # [B] int32
    limit: Array  # [B] int32, the length at which the request ends
    end_ids: Array  # [B, E] int32, -1 where unused
    finish: Array  # [B] int32: RUNNING, or why the slot is done; an empty slot is done
    sampling: Sampling
    processors: Processors
    seen: Occurrences
    # Tokens that follow the anchor on a branch that was accepted: provisional until the next block reads them
    # as a chain (`decoding/branching.py`).
    trunk: Array  # [B, N - 1] int32
    trunk_count: Array  # [B] int32

    @property
    def running(self) -> Array:
        return self.finish == RUNNING


class RoundInfo(flax.struct.PyTreeNode):
    """What an observer wants to know of a round, for `B` slots."""

    tokens: Array  # [B, N] int32, emitted tokens in order
    count: Array  # [B] int32, how many of them; cut at an end token and at the limit
    proposals: Array  # [B, N - 1] int32, the tokens below the root: trunk, chain, branches
    proposed: Array  # [B] int32, how many of them were verified
    accepted: Array  # [B] int32, of them accepted and committed, before any cut
    finish: Array  # [B] int32, as in `DecodeState`
    trunk: Array  # [B] int32, rows that read provisional tokens of the round before once more
    provisional: Array  # [B] int32, tokens that a branch added and that the next round's trunk will read
    path: Array | None = None  # [B, N] int32, the row behind each emitted token, where that is not its number
    scores: Scores | None = None  # when asked for


def init(config: EngineConfig, dtype: jnp.dtype, drafter_state: Any) -> DecodeState:
    """A state whose slots are all empty. `dtype` is that of the target's weights."""
    slots = config.slots
    return DecodeState(
        cache=kv.init(config.target, slots, config.capacity, dtype),
        drafter=drafter_state,
        anchor=jnp.zeros((slots,), jnp.int32),
        length=jnp.ones((slots,), jnp.int32),
        limit=jnp.ones((slots,), jnp.int32),
        end_ids=jnp.full((slots, END_IDS), -1, jnp.int32),
        finish=jnp.full((slots,), LENGTH, jnp.int32),
        sampling=greedy(slots),
        processors=processors.off(slots),
        seen=processors.nothing(slots, config.target.vocab_size),
        trunk=jnp.zeros((slots, config.rows - 1), jnp.int32),
        trunk_count=jnp.zeros((slots,), jnp.int32),
    )
