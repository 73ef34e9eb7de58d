"""Prompt lookup: propose what followed the last tokens when they occurred before.

The longest suffix of the text, at most `longest` tokens, that occurs earlier in prompt or output is
found, its most recent occurrence is taken, and the tokens that followed it are proposed (Saxena,
"Prompt Lookup Decoding", 2023; the `ngram` method of vLLM). An occurrence so near the end that fewer
than `K` tokens followed it is taken to repeat. On the device and of fixed shape: one comparison of
the record with itself shifted, for all slots at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from jspec.decoding.sampling import Sampling
from jspec.drafters import history
from jspec.drafters.base import Drafter, Proposal, Rows
from jspec.errors import JspecError


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram(Drafter):
    """Prompt lookup with `proposals` tokens.

    `longest` and `shortest` bound the length, in tokens, of the suffix that must match.
    """

    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        if self.proposals < 1 or not 1 <= self.shortest <= self.longest:
            raise JspecError(
                f"`ngram` was asked for {self.proposals} proposals from a match of "
                f"`{self.shortest}` to `{self.longest}` tokens.",
                "at least 1 proposal, and 1 <= shortest <= longest.",
                "set `proposals`, `shortest` and `longest` accordingly.",
            )

    @property
    def name(self) -> str:
        return f"ngram_k{self.proposals}"

    def init(self, weights: Any, slots: int, capacity: int) -> Array:
        return history.init(slots, capacity)

    def observe(self, weights: Any, state: Array, rows: Rows) -> Array:
        return history.observe(state, rows)

    def reset(self, state: Array, slot: Array) -> Array:
        return history.reset(state, slot)

    def propose(self, weights: Any, state: Array, anchor: Array, position: Array, sampling: Sampling) -> Proposal:
        columns = jnp.arange(state.shape[1], dtype=jnp.int32)[None]
        text = jnp.where(columns == position[:, None], anchor[:, None], state)  # [B, S]
        known = columns <= position[:, None]
        # matched[b, c]: how many tokens ending at column c equal those ending at the anchor.
        matched = jnp.zeros(text.shape, jnp.int32)
        running = (columns < position[:, None]) & known
        for back in range(self.longest):
            suffix = jnp.take_along_axis(text, jnp.maximum(position - back, 0)[:, None], axis=1)
            shifted = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, : text.shape[1]]
            inside = (columns >= back) & (position[:, None] >= back)
            running = running & inside & (shifted == suffix)
            matched = matched + running.astype(jnp.int32)
        # Longest match first, then the most recent.
        rank = jnp.where(matched >= self.shortest, matched * text.shape[1] + columns, -1)
        best = jnp.argmax(rank, axis=1).astype(jnp.int32)
        found = jnp.max(rank, axis=1) >= 0
        # A match that reaches into its own continuation repeats with its period, as in LZ77.
        period = jnp.maximum(position - best, 1)[:, None]
        ahead = best[:, None] + 1 + jnp.arange(self.proposals, dtype=jnp.int32)[None] % period
        tokens = jnp.take_along_axis(text, jnp.minimum(ahead, text.shape[1] - 1), axis=1)
        return Proposal(
            tokens=jnp.where(found[:, None], tokens, 0), count=jnp.where(found, jnp.int32(self.proposals), 0)
        )
