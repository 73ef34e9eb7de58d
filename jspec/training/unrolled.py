"""A training step's look at EAGLE-3: chains unrolled as drafting runs them, its "training-time test".

The chain of an anchor at column t begins with the pair of t's token and the target's state of t - 1. Step j reads the
text's own token at t + j and the state that step j - 1 left, and says what stands at t + j + 1; it sees the context's
pairs before t, all made from the target's states, and the chain's own (drafters.md 6.4). So the state of step j - 1 is
the drafter's own, mistakes included: that is what drafting will read.

Anchors may be all columns of a text, as in the paper, or some of them, which costs less.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.block import body as ends
from jspec.drafters.block.body import Linear
from jspec.drafters.eagle3 import body
from jspec.drafters.eagle3.config import EagleConfig
from jspec.drafters.eagle3.weights import EagleWeights
from jspec.target import rope
from jspec.training import products
from jspec.training.forward import Batch, Drafts, attend_both
from jspec.training.products import Contract


def drafts(config: EagleConfig, weights: EagleWeights, batch: Batch, contract: Contract) -> Drafts:
    """The logits of `steps` steps of every chain, drafts before them being the text's own tokens."""
    c, params = config, weights.params
    head = weights.head if params.head is None else params.head
    assert head is not None

    def linear(x: Array, weight: Array) -> Array:
        return products.linear(contract, x, weight)

    states = body.fuse(params, c, batch.features.astype(jnp.float32), linear)
    # Beside a text's first token stands another text's state, or none; no chain sees that pair.
    before = jnp.concatenate([jnp.zeros_like(states[:, :1]), states[:, :-1]], axis=1)
    context = _context(c, weights, batch, before, linear)
    anchors = jnp.maximum(batch.anchors, 0)
    seen = _visible(batch, anchors)
    state = _at(before, anchors)
    keys: list[Array] = []
    values: list[Array] = []
    logits = []
    for step in range(c.steps):
        token = _at(batch.tokens, jnp.minimum(anchors + step, batch.tokens.shape[1] - 1))
        turn = rope.angles(c.rope, c.head_width, _at(batch.position, anchors) + step)

        def attend(q: Array, k: Array, v: Array) -> Array:
            keys.append(k)
            values.append(v)
            own = jnp.ones((1, len(keys)), bool)
            near, said = jnp.stack(keys, axis=2), jnp.stack(values, axis=2)  # [R, A, step + 1, G, hd]
            return attend_both(contract, q[:, :, None], near, said, *context, seen, own)[:, :, 0]

        y = body.layer(params, c, ends.embed(c, weights.embed, token), state, turn, attend, linear)
        hidden, state = body.finish(params, c, y)
        logits.append(ends.logits(c, hidden, head, linear))
    return Drafts(logits=jnp.stack(logits, axis=2), sure=None)


def _context(
    config: EagleConfig, weights: EagleWeights, batch: Batch, before: Array, linear: Linear
) -> tuple[Array, Array]:
    """Keys and values of every column's pair, `[R, S, G, hd]`."""
    embedded = ends.embed(config, weights.embed, batch.tokens)
    pairs = body.pair(weights.params, config, embedded, before)
    turn = rope.angles(config.rope, config.head_width, batch.position)
    return body.keys_values(weights.params, config, pairs, turn, linear)


def _visible(batch: Batch, anchors: Array) -> Array:
    """Whose pairs a chain sees: of the columns of its text before its anchor, all but the first. `[R, A, 1, S]`."""
    column = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32).reshape(1, 1, -1)
    same = batch.document[:, None, :] == _at(batch.document, anchors)[..., None]
    paired = (batch.position > 0)[:, None, :]
    return ((column < anchors[..., None]) & same & paired)[:, :, None]


def _at(rows: Array, index: Array) -> Array:
    """`rows [R, S, ...]` at `index [R, A]`."""
    return jax.vmap(lambda row, i: row[i])(rows, index)
