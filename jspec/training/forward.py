"""A training step's look at a block drafter: many blocks of a text at once, each as inference would see it.

    queries   A blocks of F rows, each an anchor and masks, of every packed row of S tokens
    keys      the row's S context tokens, and the block's own rows

A block sees a context token iff it stands before the anchor, in the same text (drafters.md 3.3). "Before" and
not "up to": the target's state at the anchor knows the first token that is to be drafted, and does not exist yet
when it is. Blocks do not see each other. Row positions, rope, norms and products are those of `block/body.py`, which
inference runs too.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.block import body, confidence, markov
from jspec.drafters.block.config import BlockConfig
from jspec.drafters.block.weights import BlockWeights
from jspec.drafters.eagle3.config import EagleConfig
from jspec.drafters.eagle3.weights import EagleWeights
from jspec.target import rope
from jspec.training import losses, products
from jspec.training.products import Contract

Config = BlockConfig | EagleConfig
Weights = BlockWeights | EagleWeights

MASKED = -1e30


class Batch(flax.struct.PyTreeNode):
    """`R` packed rows of `S` tokens and `A` anchors in each. See `packing.py`."""

    tokens: Array  # [R, S] int32
    document: Array  # [R, S] int32, number of the text in the row; -1 where there is none
    position: Array  # [R, S] int32, inside the text
    learned: Array  # [R, S] bool: written by the target
    anchors: Array  # [R, A] int32, columns; -1 where there is none
    features: Array  # [R, S, T * D], the drafter's taps
    # The target's own distribution, which only the cross entropy does without: logits are its head times `hidden`.
    hidden: Array  # [R, S, D], after the final norm
    lse: Array  # [R, S] float32, log of the sum of the exponentials of all V logits


class Drafts(flax.struct.PyTreeNode):
    """What the drafter says for each predicted token: the first K behind every anchor."""

    logits: Array  # [R, A, K, Vd] float32, with the Markov head's share
    sure: Array | None  # [R, A, K] float32, the confidence head's logits, uncalibrated


class Labels(flax.struct.PyTreeNode):
    """What it should say."""

    columns: Array  # [R, A, K] int32, of the draft vocabulary; 0 where not counted
    counted: Array  # [R, A, K] bool
    log_p: Array  # [R, A, K, Vd] float32, the target's log probabilities


def wanted(config: Config, weights: Weights, batch: Batch) -> tuple[Array, Array]:
    """The draft columns of the tokens behind every anchor, and which of them count: both `[R, A, K]`.

    A token counts if the target wrote it, it is in the anchor's text and in the draft vocabulary, and all before it
    in the block count: behind a token that can not be drafted nothing is ever accepted. So it is behind an anchor with
    fewer tokens before it than the drafter needs.
    """
    length = batch.tokens.shape[1]
    anchors = jnp.maximum(batch.anchors, 0)
    at = _behind(config, anchors)
    inside = (at < length) & (batch.anchors >= 0)[..., None]
    at = jnp.minimum(at, length - 1)
    tokens = _at(batch.tokens, at)
    columns = tokens if weights.columns is None else weights.columns[tokens]
    counted = inside & _at(batch.learned, at) & (columns < config.head_size)
    counted &= _at(batch.document, at) == _at(batch.document, anchors)[..., None]
    counted &= _at(batch.position, anchors)[..., None] >= config.least
    counted = losses.contiguous(counted)
    return jnp.where(counted, columns, 0), counted


def labels(config: Config, weights: Weights, batch: Batch, contract: Contract) -> Labels:
    """What is wanted of every block, and the target's distributions there."""
    columns, counted = wanted(config, weights, batch)
    at = jnp.minimum(_behind(config, jnp.maximum(batch.anchors, 0)), batch.tokens.shape[1] - 1)
    assert weights.head is not None  # the target's, which `lend` gives a teacher
    # Once a token, not once a block: blocks overlap.
    scores = body.logits(config, batch.hidden.astype(jnp.float32), weights.head, _linear(contract))
    log_p = scores - batch.lse[..., None]
    return Labels(
        columns=columns,
        counted=counted,
        log_p=jax.lax.stop_gradient(_at(log_p, at - 1)),  # the state at t says what stands at t + 1
    )


def _behind(config: Config, anchors: Array) -> Array:
    return anchors[..., None] + 1 + jnp.arange(config.longest, dtype=jnp.int32).reshape(1, 1, -1)  # [R, A, K]


def drafts(config: BlockConfig, weights: BlockWeights, batch: Batch, contract: Contract) -> Drafts:
    """The logits of every block, drafts before them being the text's own tokens."""
    hidden = blocks(config, weights, batch, contract)
    linear = _linear(contract)
    logits = body.logits(config, hidden, weights.head, linear)
    params, before = weights.params, None
    if params.markov is not None:
        at = jnp.maximum(batch.anchors, 0)[..., None] + jnp.arange(config.longest, dtype=jnp.int32).reshape(1, 1, -1)
        previous = _at(batch.tokens, jnp.minimum(at, batch.tokens.shape[1] - 1))
        before = markov.look_up(config, params.markov, weights.columns, previous)
        memory = markov.start(config, previous.shape[:2])
        inner = []
        for k in range(config.longest):
            one, memory = markov.inside(config, params.markov, hidden[:, :, k], before[:, :, k], memory, linear)
            inner.append(one)
        logits = logits + linear(jnp.stack(inner, axis=2), params.markov.following)
    sure = None
    if params.confidence is not None:
        sure = confidence.logit(params.confidence, hidden, before if config.confidence == "markov" else None)
    return Drafts(logits=logits, sure=sure)


def blocks(config: BlockConfig, weights: BlockWeights, batch: Batch, contract: Contract) -> Array:
    """The rows that predict, after the final norm: `[R, A, K, D]` float32."""
    c, linear = config, _linear(contract)
    turn = rope.angles(c.rope, c.head_width, batch.position)
    context = body.context(weights.params, c, batch.features.astype(jnp.float32), turn, linear)
    anchors = jnp.maximum(batch.anchors, 0)
    first = _at(batch.tokens, anchors)
    masks = jnp.full((*first.shape, c.block - 1), c.mask_id, jnp.int32)
    x = body.embed(c, weights.embed, jnp.concatenate([first[..., None], masks], axis=-1))
    row = jnp.arange(c.block, dtype=jnp.int32)
    positions = _at(batch.position, anchors)[..., None] + row.reshape(1, 1, -1)  # [R, A, F]
    seen = {
        near: _visible(config, batch, anchors, positions, near) for near in {i in c.windowed for i in range(c.layers)}
    }
    own = {
        (chain, near): jnp.asarray(
            [[(not chain or u <= k) and (not near or u > k - c.window) for u in range(c.block)] for k in range(c.block)]
        )
        for chain in (False, True)
        for near in (False, True)
    }

    def attend(number: int, q: Array, k: Array, v: Array) -> Array:
        near = number in c.windowed
        return attend_both(contract, q, k, v, *context[number], seen[near], own[number in c.causal, near])

    out = body.rows(weights.params, c, x, rope.angles(c.rope, c.head_width, positions), attend, linear)
    return out[:, :, c.first : c.first + c.longest]


def _visible(config: BlockConfig, batch: Batch, anchors: Array, positions: Array, near: bool) -> Array:
    """Which context tokens the rows of each block see: `[R, A, 1 or F, S]` bool."""
    column = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32).reshape(1, 1, -1)
    same = batch.document[:, None, :] == _at(batch.document, anchors)[..., None]
    seen = ((column < anchors[..., None]) & same & (batch.anchors >= 0)[..., None])[:, :, None]
    if not near:
        return seen
    return seen & (batch.position[:, None, None, :] > positions[..., None] - config.window)


def attend_both(
    contract: Contract, q: Array, k: Array, v: Array, ck: Array, cv: Array, seen: Array, own: Array
) -> Array:
    """One softmax over context and block, whose scores are never copied into one array.

    Args:
      q: `[R, A, F, H, hd]`; k, v: `[R, A, M, G, hd]`, of the block.
      ck, cv: `[R, S, G, hd]`, of the context.
      seen: `[R, A, 1 or F, S]`, own: `[F, M]`.

    Returns:
      `[R, A, F, H * hd]`.
    """
    r, a, f, h, hd = q.shape
    m, g, s = k.shape[2], k.shape[3], ck.shape[1]
    q = (q * jnp.float32(hd**-0.5)).reshape(r, a, f, g, h // g, hd).transpose(0, 3, 1, 4, 2, 5)  # [R, G, A, h/g, F, hd]
    ck, cv = ck.transpose(0, 2, 1, 3), cv.transpose(0, 2, 3, 1)  # [R, G, S, hd], [R, G, hd, S]
    k, v = k.transpose(0, 3, 1, 2, 4), v.transpose(0, 3, 1, 4, 2)  # [R, G, A, M, hd], [R, G, A, hd, M]
    far = contract(q.reshape(r, g, -1, hd), ck).reshape(r, g, a, h // g, f, s)
    far = jnp.where(seen[:, None, :, None], far, MASKED)
    near = contract(q.reshape(r, g, a, -1, hd), k).reshape(r, g, a, h // g, f, m)
    near = jnp.where(own.reshape(1, 1, 1, 1, f, m), near, MASKED)
    top = jnp.maximum(jnp.max(far, axis=-1, keepdims=True), jnp.max(near, axis=-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = jnp.sum(far, axis=-1, keepdims=True) + jnp.sum(near, axis=-1, keepdims=True)
    out = contract(far.reshape(r, g, -1, s), cv).reshape(r, g, a, h // g, f, hd)
    out = out + contract(near.reshape(r, g, a, -1, m), v).reshape(r, g, a, h // g, f, hd)
    return (out / total).transpose(0, 2, 4, 1, 3, 5).reshape(r, a, f, h * hd)


def _linear(contract: Contract) -> body.Linear:
    return lambda x, weight: products.linear(contract, x, weight)


def _at(rows: Array, index: Array) -> Array:
    """`rows [R, S, ...]` at `index [R, ...]`."""
    return jax.vmap(lambda row, i: row[i])(rows, index)
