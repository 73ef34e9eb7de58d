"""The interface of every drafter.

A drafter proposes tokens; the target decides. It may be wrong, never harmful: the text is the same
with any drafter and with none.

A drafter is a frozen, hashable dataclass of settings (a static argument of the compiled programs).
Its arrays live in two trees: `weights`, which never change, and `state`, which does. All methods
are pure and compiled; `B` slots, `K` proposals, `S` columns of capacity.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import Array

from jspec.decoding import growth
from jspec.decoding.growth import Growth
from jspec.decoding.sampling import Sampling
from jspec.target.config import TargetConfig
from jspec.target.features import Features
from jspec.target.model import TargetParams


class Rows(flax.struct.PyTreeNode):
    """Rows that the target has read and accepted, for `R` slots.

    Row j of slot block r sits at absolute position `start[r] + j`; rows at and beyond `count[r]`
    hold nothing and must leave no trace. `R` is 1 in prefill and `B` after a round.
    """

    slot: Array  # [] int32: block r belongs to slot `slot + r`
    tokens: Array  # [R, N] int32
    features: Features  # [R, N, T * D] float32, tapped residuals
    start: Array  # [R] int32
    count: Array  # [R] int32


class Proposal(flax.struct.PyTreeNode):
    """What a drafter proposes to follow the anchor, for `B` slots."""

    tokens: Array  # [B, K] int32
    count: Array  # [B] int32: the first `count` are proposed, 0 is none
    log_q: Array | None = None  # [B, K, V] float32, the law each token was drawn from, if the drafter draws
    confidence: Array | None = None  # [B, K] float32, estimated chance of acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafter(abc.ABC):
    """Settings of a drafter, and the pure functions that make it draft."""

    proposals: int  # K, at most N - 1
    taps: tuple[int, ...] = ()  # 0-based target blocks whose residual it reads, ascending; -1 is the embedding

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What reports call it, for instance `ngram_k7`."""

    @property
    def draws(self) -> bool:
        """Whether it draws its tokens at random, from the law that it returns as `log_q`.

        One that does not declares them certain, whatever its model thinks of them (known-failures
        DR-2); the classical rule reads this, the default rule does not.
        """
        return False

    def weights(self, target: TargetParams, config: TargetConfig) -> Any:
        """The arrays it needs; may lend the target's embedding and head."""
        return ()

    @abc.abstractmethod
    def init(self, weights: Any, slots: int, capacity: int) -> Any:
        """State of `slots` empty slots."""

    @abc.abstractmethod
    def observe(self, weights: Any, state: Any, rows: Rows) -> Any:
        """Takes in rows that the target has accepted; they arrive in order.

        Committed rows come once. Those of a path that left a tree's front chain come before that: they, or
        others instead, come again from where the committed ones end (`decoding/branching.py`).
        """

    @abc.abstractmethod
    def reset(self, state: Any, slot: Array) -> Any:
        """Empties one slot for its next request."""

    @abc.abstractmethod
    def propose(self, weights: Any, state: Any, anchor: Array, position: Array, sampling: Sampling) -> Proposal:
        """Proposes `K` tokens to follow each slot's anchor.

        Args:
          anchor: `[B]` int32, the last committed token; not observed yet.
          position: `[B]` int32, its absolute position; rows `0 .. position-1` were observed.
          sampling: the slots' settings, for drafters that share the target's noise.
        """

    def grow(self, weights: Any, state: Any, anchor: Array, position: Array, sampling: Sampling, nodes: int) -> Growth:
        """Proposes a tree of at most `nodes` nodes to follow each slot's anchor; a chain unless a drafter knows better.

        Arguments as in `propose`; the anchor may be provisional.
        """
        made = self.propose(weights, state, anchor, position, sampling)
        return growth.chain(made.tokens, made.count, nodes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(Drafter):
    """No drafter: every proposal is empty. Plain decoding is the verify program with this."""

    proposals: int = 0

    @property
    def name(self) -> str:
        return "baseline"

    def init(self, weights: Any, slots: int, capacity: int) -> Any:
        return ()

    def observe(self, weights: Any, state: Any, rows: Rows) -> Any:
        return state

    def reset(self, state: Any, slot: Array) -> Any:
        return state

    def propose(self, weights: Any, state: Any, anchor: Array, position: Array, sampling: Sampling) -> Proposal:
        slots = anchor.shape[0]
        return Proposal(tokens=jnp.zeros((slots, 0), jnp.int32), count=jnp.zeros((slots,), jnp.int32))
