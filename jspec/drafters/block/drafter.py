"""`BlockDrafter`: DFlash, DFlare and DSpark behind the interface of every drafter.

The context cache holds, per layer, keys and values made from the target's features of committed tokens, at
their absolute positions. A draft writes the block's own keys behind them in a copy that is dropped with
the round, so the block is read with the context in one pass over the key blocks, and the next
`observe` overwrites nothing but garbage (known-failures DR-10, DR-11).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.decoding import tree
from jspec.decoding.sampling import Sampling
from jspec.drafters import modes, vocabulary
from jspec.drafters.base import Drafter, Proposal, Rows
from jspec.drafters.block import body, confidence, markov
from jspec.drafters.block.config import BlockConfig
from jspec.drafters.block.weights import BlockWeights
from jspec.errors import JspecError
from jspec.target import attention, rope
from jspec.target import cache as kv
from jspec.target.attention import Columns
from jspec.target.cache import KVCache
from jspec.target.config import TargetConfig
from jspec.target.model import TargetParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDrafter(Drafter):
    """A block drafter of `config` that proposes `proposals` tokens; its weights come from a file (`files.load`).

    Args:
      mode: `greedy`, `coupled` or `sampled` (`drafters/modes.py`).
      heat: the draft's temperature as a multiple of the target's.
      fed: rows of the block that are computed; None: those it was trained with. Fewer cost less and
        change what the others can see.
      threshold: a block is cut before the first token whose confidence is lower; 0 is off.
    """

    config: BlockConfig
    mode: str = "coupled"
    heat: float = 1.0
    fed: int | None = None
    threshold: float = 0.0
    key_block: int = 128

    def __post_init__(self) -> None:
        modes.check(self.mode)
        c = self.config
        if (
            not isinstance(self.proposals, int)
            or isinstance(self.proposals, bool)
            or not (1 <= self.proposals <= c.longest)
        ):
            raise JspecError(
                f"`{c.family}` was asked for `{self.proposals!r}` proposals.",
                f"1 to {c.longest}: it was trained with a block of {c.block} rows, and rows beyond are noise.",
                "ask for fewer.",
            )
        if not c.first + self.proposals <= self.rows <= c.block:
            raise JspecError(
                f"`fed` of `{c.family}` is `{self.fed}`.",
                f"{c.first + self.proposals} to {c.block} rows for {self.proposals} proposals.",
                "leave it out for the block it was trained with.",
            )
        if not (isinstance(self.heat, float) and 0.0 < self.heat <= 100.0):
            raise JspecError(f"`heat` of `{c.family}` is `{self.heat!r}`.", "above 0, up to 100.", "leave it out.")
        if not (isinstance(self.threshold, float) and 0.0 <= self.threshold <= 1.0):
            raise JspecError(f"`threshold` of `{c.family}` is `{self.threshold!r}`.", "0 to 1.", "leave it out.")
        if self.threshold and self.mode == "sampled" and c.confidence is None:
            # The probability of the drawn token looks at the token it judges (drafters.md 4.6).
            raise JspecError(
                f"`{c.family}` has no confidence head, and `threshold` was asked for with drawn tokens.",
                "a threshold with a confidence head, or with tokens that are not drawn.",
                "leave `threshold` out.",
            )
        object.__setattr__(self, "taps", c.taps)

    @property
    def rows(self) -> int:
        """Rows of the block that are computed."""
        return self.config.block if self.fed is None else self.fed

    @property
    def name(self) -> str:
        return f"{self.config.family}_k{self.proposals}"

    @property
    def draws(self) -> bool:
        return self.mode == "sampled"

    def weights(self, target: TargetParams, config: TargetConfig) -> BlockWeights:
        raise JspecError(
            f"`{self.name}` was given without its weights.",
            "the pair of drafter and weights that loading a drafter's file returns.",
            "pass the pair as `drafter=`, or its second part as `weights=`.",
        )

    def init(self, weights: BlockWeights, slots: int, capacity: int) -> KVCache:
        c = self.config
        held = -(-(capacity + self.rows) // self.key_block) * self.key_block
        return kv.empty(c.layers, slots, c.kv_heads, held, c.head_width, weights.params.layers[0].q.dtype)

    def observe(self, weights: BlockWeights, state: KVCache, rows: Rows) -> KVCache:
        c = self.config
        count, width = rows.tokens.shape
        positions = rows.start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        made = body.context(weights.params, c, rows.features.of(c.taps), self._turn(positions))
        columns = self._columns(rows.slot, rows.start, width, state, whole=True)
        state = _write(state, made, columns)
        # Rows beyond the count were written too; what is behind `length` is masked and written again.
        held = jnp.where(rows.count > 0, rows.start + rows.count, _of(state.length, rows.slot, count))
        return state.replace(length=state.length.at[rows.slot + jnp.arange(count)].set(held))

    def reset(self, state: KVCache, slot: Array) -> KVCache:
        return state.replace(length=state.length.at[slot].set(0))

    def hidden(self, weights: BlockWeights, state: KVCache, anchor: Array, position: Array) -> Array:
        """The rows that predict, after the final norm: `[B, K, D]` float32."""
        c = self.config
        slots = anchor.shape[0]
        masks = jnp.full((slots, self.rows - 1), c.mask_id, jnp.int32)
        x = body.embed(c, weights.embed, jnp.concatenate([anchor[:, None], masks], axis=1))
        positions = position[:, None] + jnp.arange(self.rows, dtype=jnp.int32)[None]
        seen = {}
        for whole in (True, False):
            full = self._columns(jnp.int32(0), position, self.rows, state, whole=whole)
            seen[whole, False] = full
            if c.windowed:
                seen[whole, True] = attention.windowed(full, positions, c.window)
        scratch = state

        def attend(number: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal scratch
            columns = seen[number not in c.causal, number in c.windowed]
            scratch = _write(scratch, {number: (k, v)}, columns)
            return attention.read(q, scratch.keys[number], scratch.values[number], columns)

        out = body.rows(weights.params, c, x, self._turn(positions), attend)
        return out[:, c.first : c.first + self.proposals]

    def propose(
        self, weights: BlockWeights, state: KVCache, anchor: Array, position: Array, sampling: Sampling
    ) -> Proposal:
        c, params = self.config, weights.params
        hidden = self.hidden(weights, state, anchor, position)
        ahead = position[:, None] + 1 + jnp.arange(self.proposals, dtype=jnp.int32)[None]
        scores = body.logits(c, hidden, weights.head)
        before = None
        if params.markov is None:
            columns, law = modes.pick(self.mode, scores, ahead, sampling, weights.ids, self.heat)
            corrected = scores
        else:
            columns, law, before, corrected = self._chain(weights, hidden, scores, anchor, ahead, sampling)
        tokens = columns if weights.ids is None else weights.ids[columns]
        sure = None
        if params.confidence is not None:
            given = before if c.confidence == "markov" else None
            sure = confidence.calibrated(params.confidence, confidence.logit(params.confidence, hidden, given))
        elif not self.draws:
            sure = modes.probability(corrected, columns)
        count = jnp.full(anchor.shape, self.proposals, jnp.int32)
        if self.threshold and sure is not None:
            count = jnp.sum(jnp.cumprod((sure >= self.threshold).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        return Proposal(tokens=tokens, count=count, log_q=vocabulary.whole(law, weights.columns), confidence=sure)

    def _chain(
        self, weights: BlockWeights, hidden: Array, scores: Array, anchor: Array, ahead: Array, sampling: Sampling
    ) -> tuple[Array, Array | None, Array, Array]:
        """Drafts one token after the other: columns, law, `before [B, K, r]` and corrected logits."""
        c, head = self.config, weights.params.markov
        assert head is not None
        previous, memory = anchor, markov.start(c, anchor.shape)
        columns, laws, befores, corrected = [], [], [], []
        # Unrolled: in a loop XLA's CPU backend would widen the whole table of predecessors in each turn.
        for k in range(self.proposals):
            before = markov.look_up(c, head, weights.columns, previous)
            added, memory = markov.step(c, head, hidden[:, k], before, memory)
            z = (scores[:, k] + added)[:, None]
            column, law = modes.pick(self.mode, z, ahead[:, k : k + 1], sampling, weights.ids, self.heat)
            columns.append(column)
            befores.append(before)
            corrected.append(z)
            if law is not None:
                laws.append(law)
            previous = (column if weights.ids is None else weights.ids[column])[:, 0]
        law = jnp.concatenate(laws, axis=1) if laws else None
        return jnp.concatenate(columns, axis=1), law, jnp.stack(befores, axis=1), jnp.concatenate(corrected, axis=1)

    def _turn(self, positions: Array) -> tuple[Array, Array]:
        return rope.once(lambda: rope.angles(self.config.rope, self.config.head_width, positions), positions)

    def _columns(self, slot: Array, start: Array, width: int, state: KVCache, *, whole: bool) -> Columns:
        """Rows written at `start`, which see what is before it, and each other wholly or as a chain."""
        bits = tree.chain_bits(width)
        if whole:
            bits = np.broadcast_to(bits[-1:], bits.shape)
        spread = jnp.broadcast_to(jnp.asarray(bits), (start.shape[0], *bits.shape))
        return attention.columns(slot, start, spread, state.capacity, self.key_block)


def _write(state: KVCache, made: Any, columns: Columns) -> KVCache:
    """Writes keys and values of some layers; what is not a number is written as 0, as in the target."""
    keys, values = list(state.keys), list(state.values)
    for number, (k, v) in made.items() if isinstance(made, dict) else enumerate(made):
        good = jnp.isfinite(k) & jnp.isfinite(v)
        keys[number] = attention.write(keys[number], jnp.where(good, k, 0.0), columns)
        values[number] = attention.write(values[number], jnp.where(good, v, 0.0), columns)
    return state.replace(keys=tuple(keys), values=tuple(values))


def _of(every: Array, slot: Array, count: int) -> Array:
    return every[slot + jnp.arange(count)]
