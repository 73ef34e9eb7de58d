"""`EagleDrafter`: EAGLE-3 behind the interface of every drafter, as a chain.

Column t of the context cache holds key and value of the pair at position t, made from the target's own state
and never from the drafter's (known-failures DR-10); column 0 holds nothing and is never seen. The pair of the
anchor is the first that a draft computes: its state is that of the last row the target has read, kept beside the
cache. A draft writes its pairs into a copy that is dropped with the round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.struct
import jax.numpy as jnp
from jax import Array

from jspec.decoding import tree
from jspec.decoding.sampling import Sampling
from jspec.drafters import modes, vocabulary
from jspec.drafters.base import Drafter, Proposal, Rows
from jspec.drafters.block import body as ends
from jspec.drafters.eagle3 import body
from jspec.drafters.eagle3.config import EagleConfig
from jspec.drafters.eagle3.weights import EagleWeights
from jspec.errors import JspecError
from jspec.target import attention, rope
from jspec.target import cache as kv
from jspec.target.attention import Columns
from jspec.target.cache import KVCache
from jspec.target.config import TargetConfig
from jspec.target.model import TargetParams


class EagleState(flax.struct.PyTreeNode):
    """What the drafter has seen of `B` slots."""

    cache: KVCache  # one layer
    last: Array  # [B, D] float32, the target's state behind the last row that was observed


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleDrafter(Drafter):
    """A drafter of `config` that proposes a chain of `proposals` tokens; its weights come from a file (`named.load`).

    Args:
      mode: `greedy`, `coupled` or `sampled` (`drafters/modes.py`).
      heat: the draft's temperature as a multiple of the target's.
    """

    config: EagleConfig
    mode: str = "coupled"
    heat: float = 1.0
    key_block: int = 128

    def __post_init__(self) -> None:
        modes.check(self.mode)
        if not isinstance(self.proposals, int) or isinstance(self.proposals, bool) or self.proposals < 1:
            raise JspecError(
                f"`{self.config.family}` was asked for `{self.proposals!r}` proposals.",
                "a whole number of at least 1.",
                "set `proposals`; for none, decode without a drafter.",
            )
        if not (isinstance(self.heat, float) and 0.0 < self.heat <= 100.0):
            raise JspecError(
                f"`heat` of `{self.config.family}` is `{self.heat!r}`.", "above 0, up to 100.", "leave it out."
            )
        object.__setattr__(self, "taps", self.config.taps)

    @property
    def name(self) -> str:
        return f"{self.config.family}_k{self.proposals}"

    @property
    def draws(self) -> bool:
        return self.mode == "sampled"

    def weights(self, target: TargetParams, config: TargetConfig) -> EagleWeights:
        raise JspecError(
            f"`{self.name}` was given without its weights.",
            "the pair of drafter and weights that loading a drafter's file returns.",
            "pass the pair as `drafter=`, or its second part as `weights=`.",
        )

    def init(self, weights: EagleWeights, slots: int, capacity: int) -> EagleState:
        c = self.config
        held = -(-(capacity + self.proposals) // self.key_block) * self.key_block
        cache = kv.empty(1, slots, c.kv_heads, held, c.head_width, weights.params.q.dtype)
        return EagleState(cache=cache, last=jnp.zeros((slots, c.width), jnp.float32))

    def observe(self, weights: EagleWeights, state: EagleState, rows: Rows) -> EagleState:
        c, params = self.config, weights.params
        count, width = rows.tokens.shape
        slots = rows.slot + jnp.arange(count, dtype=jnp.int32)
        before = state.last[slots]
        states = body.fuse(params, c, rows.features.of(c.taps))
        given = jnp.concatenate([before[:, None], states[:, :-1]], axis=1)
        pairs = body.pair(params, c, ends.embed(c, weights.embed, rows.tokens), given)
        turn = self._turn(rows.start[:, None] + jnp.arange(width, dtype=jnp.int32)[None])
        made = body.keys_values(params, c, pairs, turn)
        cache = _write(state.cache, *made, self._columns(rows.slot, rows.start, width, state.cache))
        # Rows beyond the count were written too; they are masked, and written again.
        some = rows.count > 0
        held = jnp.where(some, rows.start + rows.count, state.cache.length[slots])
        newest = jnp.take_along_axis(states, jnp.maximum(rows.count - 1, 0)[:, None, None], axis=1)[:, 0]
        return EagleState(
            cache=cache.replace(length=cache.length.at[slots].set(held)),
            last=state.last.at[slots].set(jnp.where(some[:, None], newest, before)),
        )

    def reset(self, state: EagleState, slot: Array) -> EagleState:
        length = state.cache.length.at[slot].set(0)
        return state.replace(cache=state.cache.replace(length=length), last=state.last.at[slot].set(0.0))

    def chain(
        self,
        weights: EagleWeights,
        state: EagleState,
        anchor: Array,
        position: Array,
        choose: Callable[[int, Array], Array],
    ) -> None:
        """Runs a chain of K pairs, of which the first is the anchor's.

        Args:
          anchor, position: as for `propose`.
          choose: turns the number of the step and its logits `[B, Vd]` float32 into the next tokens `[B]` int32.
        """
        c, params = self.config, weights.params
        cache, given, token = state.cache, state.last, anchor
        cos, sin = self._turn(position[:, None] + jnp.arange(self.proposals, dtype=jnp.int32)[None])
        # Unrolled: in a loop XLA's CPU backend would widen the whole embedding in each turn.
        for k in range(self.proposals):
            columns = self._columns(jnp.int32(0), position + k, 1, cache)

            def attend(q: Array, key: Array, value: Array, columns: Columns = columns) -> Array:
                nonlocal cache
                cache = _write(cache, key, value, columns)
                return attention.read(q, cache.keys[0], cache.values[0], columns)

            embedded = ends.embed(c, weights.embed, token[:, None])
            turn = cos[:, k : k + 1], sin[:, k : k + 1]
            hidden, fed = body.finish(params, c, body.layer(params, c, embedded, given[:, None], turn, attend))
            head = weights.head if params.head is None else params.head
            assert head is not None  # `lend` sees to it
            token, given = choose(k, ends.logits(c, hidden[:, 0], head)), fed[:, 0]

    def propose(
        self, weights: EagleWeights, state: EagleState, anchor: Array, position: Array, sampling: Sampling
    ) -> Proposal:
        picked, laws, sure = [], [], []

        def choose(k: int, logits: Array) -> Array:
            ahead = (position + 1 + k)[:, None]
            column, law = modes.pick(self.mode, logits[:, None], ahead, sampling, weights.ids, self.heat)
            if law is None:
                sure.append(modes.probability(logits[:, None], column))
            else:
                laws.append(law)
            picked.append(column if weights.ids is None else weights.ids[column])
            return picked[-1][:, 0]

        self.chain(weights, state, anchor, position, choose)
        return Proposal(
            tokens=jnp.concatenate(picked, axis=1),
            # The very first token of a text has no state of the target before it, and no draft behind it.
            count=jnp.where(position >= self.config.least, self.proposals, 0).astype(jnp.int32),
            log_q=vocabulary.whole(jnp.concatenate(laws, axis=1), weights.columns) if laws else None,
            confidence=jnp.concatenate(sure, axis=1) if sure else None,
        )

    def _turn(self, positions: Array) -> ends.Turn:
        return rope.once(lambda: rope.angles(self.config.rope, self.config.head_width, positions), positions)

    def _columns(self, slot: Array, start: Array, width: int, cache: KVCache) -> Columns:
        """Rows written at `start`, which see the pairs before them."""
        bits = jnp.broadcast_to(jnp.asarray(tree.chain_bits(width)), (*start.shape, width, tree.words(width)))
        columns = attention.columns(slot, start, bits, cache.capacity, self.key_block)
        # A row at position 0 sees itself, so that its numbers stay numbers.
        pair = (jnp.arange(cache.capacity)[None] > 0) | (start == 0)[:, None]
        return columns.replace(visible=columns.visible & pair[:, None])


def _write(cache: KVCache, key: Array, value: Array, columns: Columns) -> KVCache:
    """Writes keys and values of pairs; what is not a number is written as 0, as in the target."""
    good = jnp.isfinite(key) & jnp.isfinite(value)
    return cache.replace(
        keys=(attention.write(cache.keys[0], jnp.where(good, key, 0.0), columns),),
        values=(attention.write(cache.values[0], jnp.where(good, value, 0.0), columns),),
    )
