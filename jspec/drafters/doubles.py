"""Drafters for tests: their acceptance is known beforehand, so the engine around them can be judged.

They are part of the package because every user of the interface needs them: an engine is exact only
if the text is the same with `Oracle`, whose every token is accepted, and with `Random`, whose
hardly any is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.decoding import growth, rejection, tree
from jspec.decoding import sampling as samplings
from jspec.decoding.growth import Growth
from jspec.decoding.noise import scramble
from jspec.decoding.sampling import Sampling
from jspec.drafters import history
from jspec.drafters.base import Drafter, Proposal, Rows
from jspec.engine.config import EngineConfig
from jspec.target import attention, model
from jspec.target import cache as kv
from jspec.target.cache import KVCache
from jspec.target.config import TargetConfig
from jspec.target.model import TargetParams


def script(texts: list[tuple[int, ...]], capacity: int) -> Array:
    """Whole texts, prompt and continuation, as the weights of `Oracle`: `[R, S]` int32, padded with -1."""
    table = np.full((len(texts), capacity), -1, np.int32)
    for row, text in enumerate(texts):
        table[row, : len(text)] = text[:capacity]
    return jnp.asarray(table)


class OracleState(flax.struct.PyTreeNode):
    """What an `Oracle` has seen."""

    text: Array  # [B, S] int32
    rounds: Array  # [B] int32, blocks of rows observed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(Drafter):
    """Proposes the continuation that its script holds for the text so far.

    Its weights come from `script`. `pattern`, if given, is the number of right proposals in turn,
    counted in observed blocks: the next proposal is spoilt, so accept lengths are chosen by the test. As a
    tree it holds the right continuation too, on a branch beside the spoilt token, so the path leaves the
    front chain where the test wants it.
    """

    pattern: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"oracle_k{self.proposals}"

    def init(self, weights: Array, slots: int, capacity: int) -> OracleState:
        return OracleState(text=history.init(slots, capacity), rounds=jnp.zeros((slots,), jnp.int32))

    def observe(self, weights: Array, state: OracleState, rows: Rows) -> OracleState:
        seen = lax.dynamic_update_slice(
            state.rounds,
            lax.dynamic_slice_in_dim(state.rounds, rows.slot, rows.count.shape[0]) + (rows.count > 0).astype(jnp.int32),
            (rows.slot,),
        )
        return OracleState(text=history.observe(state.text, rows), rounds=seen)

    def reset(self, state: OracleState, slot: Array) -> OracleState:
        return OracleState(text=history.reset(state.text, slot), rounds=state.rounds.at[slot].set(0))

    def propose(
        self, weights: Array, state: OracleState, anchor: Array, position: Array, sampling: Sampling
    ) -> Proposal:
        tokens, count, spoilt = self._read(weights, state, anchor, position)
        return Proposal(tokens=_spoilt(tokens, spoilt), count=count)

    def grow(
        self, weights: Array, state: OracleState, anchor: Array, position: Array, sampling: Sampling, nodes: int
    ) -> Growth:
        tokens, count, spoilt = self._read(weights, state, anchor, position)
        front, beside = (growth.chain(t, count, nodes) for t in (_spoilt(tokens, spoilt), tokens))
        # Each node is a little less likely than the one above it, and a branch than the chain.
        front = front.replace(score=front.score - 0.01 * front.depth.astype(jnp.float32))
        return growth.merged(front, beside.replace(score=front.score - 0.001), nodes)

    def _read(self, weights: Array, state: OracleState, anchor: Array, position: Array) -> tuple[Array, Array, Array]:
        """The script's continuation `[B, K]`, how much of it there is `[B]`, and which of it to spoil `[B]`."""
        columns = jnp.arange(state.text.shape[1], dtype=jnp.int32)[None]
        text = jnp.where(columns == position[:, None], anchor[:, None], state.text)
        known = (columns <= position[:, None])[:, None]
        same = jnp.all(~known | (weights[None] == text[:, None]), axis=-1)  # [B, R]
        row = jnp.argmax(same, axis=1)
        ahead = position[:, None] + 1 + jnp.arange(self.proposals, dtype=jnp.int32)[None]
        line = jnp.take(weights, row, axis=0)
        tokens = jnp.take_along_axis(line, jnp.minimum(ahead, line.shape[1] - 1), axis=1)
        there = (tokens >= 0) & jnp.any(same, axis=1)[:, None] & (ahead < line.shape[1])
        count = jnp.sum(jnp.cumprod(there.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        right = jnp.full(count.shape, self.proposals, jnp.int32)
        if self.pattern:
            right = jnp.asarray(self.pattern, jnp.int32)[state.rounds % len(self.pattern)]
        return jnp.maximum(tokens, 0), count, right


def _spoilt(tokens: Array, at: Array) -> Array:
    """`tokens [B, K]` with the token at `at [B]` made wrong."""
    there = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] == at[:, None]
    return jnp.where(there, jnp.where(tokens == 0, 1, tokens - 1), tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(Drafter):
    """Proposes ids drawn evenly from the vocabulary, by position."""

    vocab: int
    salt: int = 0

    @property
    def name(self) -> str:
        return f"random_k{self.proposals}"

    def init(self, weights: Any, slots: int, capacity: int) -> Any:
        return ()

    def observe(self, weights: Any, state: Any, rows: Rows) -> Any:
        return state

    def reset(self, state: Any, slot: Array) -> Any:
        return state

    def propose(self, weights: Any, state: Any, anchor: Array, position: Array, sampling: Sampling) -> Proposal:
        ahead = position[:, None] + 1 + jnp.arange(self.proposals, dtype=jnp.int32)[None]
        word = scramble(scramble(ahead.astype(jnp.uint32) ^ jnp.uint32(self.salt)) + anchor[:, None].astype(jnp.uint32))
        tokens = (word % jnp.uint32(self.vocab)).astype(jnp.int32)
        return Proposal(tokens=tokens, count=jnp.full(anchor.shape, self.proposals, jnp.int32))

    def grow(self, weights: Any, state: Any, anchor: Array, position: Array, sampling: Sampling, nodes: int) -> Growth:
        drawn = self.propose(weights, state, anchor, position, sampling).tokens
        ranks = jnp.arange(min(nodes, self.vocab), dtype=jnp.int32)[None, None]
        tokens = (drawn[..., None] + ranks) % self.vocab
        return growth.best(
            tokens, jnp.broadcast_to(jnp.log(0.5) * (ranks + 1).astype(jnp.float32), tokens.shape), nodes
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Self(Drafter):
    """The target drafts for itself, by the same functions and shapes, with the target's own noise.

    Every proposal should be accepted; what is not shows a program whose bits are not the verify
    program's. Costs `K + 1` verify passes a round. With `sampled` it draws by noise of its own and
    returns the law: under the classical rule q is p then, and everything is accepted as well.
    """

    engine: EngineConfig
    sampled: bool = False

    @property
    def name(self) -> str:
        return f"self_k{self.proposals}"

    @property
    def draws(self) -> bool:
        return self.sampled

    def weights(self, target: TargetParams, config: TargetConfig) -> TargetParams:
        return target

    def init(self, weights: TargetParams, slots: int, capacity: int) -> KVCache:
        return kv.init(self.engine.target, slots, capacity, weights.dtype)

    def observe(self, weights: TargetParams, state: KVCache, rows: Rows) -> KVCache:
        slots, width = rows.tokens.shape
        bits = jnp.broadcast_to(jnp.asarray(tree.chain_bits(width)), (slots, width, tree.words(width)))
        columns = attention.columns(rows.slot, rows.start, bits, state.capacity, self.engine.key_block)
        positions = rows.start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        _, _, _, state = model.forward(weights, self.engine.target, state, rows.tokens, positions, columns)
        return state

    def reset(self, state: KVCache, slot: Array) -> KVCache:
        return state

    def propose(
        self, weights: TargetParams, state: KVCache, anchor: Array, position: Array, sampling: Sampling
    ) -> Proposal:
        rows = self.engine.rows
        slots = anchor.shape[0]
        bits = jnp.broadcast_to(jnp.asarray(tree.chain_bits(rows)), (slots, rows, tree.words(rows)))
        columns = attention.columns(jnp.int32(0), position, bits, state.capacity, self.engine.key_block)
        positions = position[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]

        def extend(step: Array, carry: tuple[Array, Any, KVCache]) -> tuple[Array, Any, KVCache]:
            tokens, _, cache = carry
            hidden, _, _, cache = model.forward(weights, self.engine.target, cache, tokens, positions, columns)
            logits = model.logits(weights, hidden)
            # Rows before `step` see what they saw before, so their laws come out again.
            if self.sampled:
                choice, log_q = rejection.draw(logits, positions + 1, sampling)
            else:
                choice, log_q = samplings.choose(logits, positions + 1, sampling), None
            at = jnp.arange(rows, dtype=jnp.int32)[None] == step + 1
            return jnp.where(at, jnp.roll(choice, 1, axis=1), tokens), log_q, cache

        tokens = jnp.concatenate([anchor[:, None], jnp.zeros((slots, rows - 1), jnp.int32)], axis=1)
        law = jnp.zeros((slots, rows, self.engine.target.vocab_size), jnp.float32) if self.sampled else None
        tokens, law, _ = lax.fori_loop(0, self.proposals, extend, (tokens, law, state))
        return Proposal(
            tokens=tokens[:, 1 : 1 + self.proposals],
            count=jnp.full((slots,), self.proposals, jnp.int32),
            log_q=None if law is None else law[:, : self.proposals],
        )


class LensWeights(flax.struct.PyTreeNode):
    """What a `Lens` borrows from the target."""

    norm: Array  # [D]
    head: Array  # [V, D]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lens(Drafter):
    """Reads the target's tapped residuals and proposes what they say at the last `K` positions.

    A weak drafter, and the smallest that depends on every feature it is shown: a row that arrives
    late, twice, at the wrong position or from the wrong block changes its proposals. Needs one tap.
    """

    width: int  # D
    eps: float

    @property
    def name(self) -> str:
        return f"lens_k{self.proposals}"

    def weights(self, target: TargetParams, config: TargetConfig) -> LensWeights:
        return LensWeights(norm=target.final_norm, head=target.embed if target.head is None else target.head)

    def init(self, weights: LensWeights, slots: int, capacity: int) -> Array:
        return jnp.zeros((slots, capacity, self.width), jnp.float32)

    def observe(self, weights: LensWeights, state: Array, rows: Rows) -> Array:
        features = rows.features.of(self.taps)

        def put(r: Array | int, state: Array) -> Array:
            corner = (rows.slot + r, rows.start[r], jnp.int32(0))
            old = lax.dynamic_slice(state, corner, (1, features.shape[1], self.width))
            fresh = (jnp.arange(features.shape[1], dtype=jnp.int32) < rows.count[r])[None, :, None]
            return lax.dynamic_update_slice(
                state, jnp.where(fresh, lax.dynamic_slice_in_dim(features, r, 1), old), corner
            )

        return lax.fori_loop(0, features.shape[0], put, state)

    def reset(self, state: Array, slot: Array) -> Array:
        return state

    def propose(
        self, weights: LensWeights, state: Array, anchor: Array, position: Array, sampling: Sampling
    ) -> Proposal:
        back = position[:, None] - 1 - jnp.arange(self.proposals, dtype=jnp.int32)[None]
        rows = jnp.take_along_axis(state, jnp.maximum(back, 0)[..., None], axis=1)
        logits = model.linear(model.rms_norm(rows, weights.norm, self.eps), weights.head)
        tokens = samplings.first_largest(logits)
        return Proposal(tokens=tokens, count=jnp.minimum(position, self.proposals))
