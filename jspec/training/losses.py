"""The terms that drafters are trained with, one value per predicted token, and the weights that average them.

Cross entropy against the text's own token is optax's (`softmax_cross_entropy_with_integer_labels`).

`logits` (of q) and `target` (log p) are float32 `[..., K, V_d]` over the drafter's own vocabulary of `V_d` ids, for
the K predicted tokens of a block, the first of which follows the anchor. Everything else is `[..., K]`: labels int32,
`counted` bool, the rest float32. What the target's distribution p holds outside of that vocabulary can not be
drafted, and counts as missed.
"""

import jax
import jax.numpy as jnp
import optax
from jax import Array


def overlap(logits: Array, target: Array) -> Array:
    """`sum_v min(p, q)`: the probability that rejection sampling keeps a token drawn from `q` (Leviathan et al. 2023,
    section 3.2). `target` holds `log p` at the drafter's ids and need not sum to 1 there."""
    return jnp.sum(jnp.minimum(jnp.exp(target), jax.nn.softmax(logits, axis=-1)), axis=-1)


def total_variation(logits: Array, target: Array) -> Array:
    """`1 - overlap`, half of the L1 distance over the whole vocabulary; in `[0, 1]`."""
    return 1.0 - overlap(logits, target)


def divergence(logits: Array, target: Array) -> Array:
    """`KL(p || q)` in nats, with `p` scaled to sum to 1 over the drafter's ids: outside of them it is infinite."""
    return optax.losses.kl_divergence(jax.nn.log_softmax(logits, axis=-1), jax.nn.softmax(target, axis=-1))


def confidence_error(logit: Array, kept: Array) -> Array:
    """Binary cross-entropy in nats between `sigmoid(logit)` and the probability `kept` that the token is accepted
    (`overlap`). No gradient reaches `kept`: the head must follow the drafter, not the drafter the head."""
    return optax.losses.sigmoid_binary_cross_entropy(logit, jax.lax.stop_gradient(kept))


def decay(count: int, gamma: float | Array) -> Array:
    """`exp(-j / gamma)` for the predicted tokens `j = 0 .. count - 1`: 1 for the first (DFlash, training)."""
    return jnp.exp(-jnp.arange(count, dtype=jnp.float32) / gamma)


def growing_gamma(epoch: float, first: float = 4.5, step: float = 1.0) -> float:
    """DFlare's schedule of `decay`'s gamma: first tokens first, later tokens as training goes on."""
    return first + step * epoch


def path_weights(entropy: Array, counted: Array, alpha: float = 0.5) -> Array:
    """D-PACE: a token weighs as much as the drafts that reach it and those that go on from it.

    With `q_j = exp(-entropy_j)` and `s_j = (1 - alpha) q_j + alpha` (1 where not counted): `P_j = prod_{i<=j} s_i`,
    `w_j = sum_{i>=j} P_i`, both over counted tokens; 0 where not counted. No gradient passes through the weights."""
    q = jax.lax.stop_gradient(jnp.exp(-entropy))
    reach = jnp.cumprod(jnp.where(counted, (1.0 - alpha) * q + alpha, 1.0), axis=-1)
    onward = jnp.cumsum(jnp.where(counted, reach, 0.0)[..., ::-1], axis=-1)[..., ::-1]
    return jnp.where(counted, onward, 0.0)


def text_shares(document: Array, anchors: Array) -> tuple[Array, Array]:
    """One over the length of each anchor's text, `[R, A]`, and the number of texts, `[]`, both float32.

    Args:
      document: `[R, S]` int32, the number of each column's text in its row, ascending from 0; -1 for none.
      anchors: `[R, A]` int32 columns.
    """
    mine = jnp.take_along_axis(document, anchors, axis=1)
    length = jnp.sum(document[:, None, :] == mine[..., None], axis=-1).astype(jnp.float32)
    return 1.0 / length, jnp.sum(jnp.max(document, axis=1) + 1).astype(jnp.float32)


def contiguous(counted: Array) -> Array:
    """`counted` up to its first False: what comes after a token without a label is never reached by a draft."""
    return jnp.cumprod(counted.astype(jnp.int32), axis=-1).astype(jnp.bool_)


def weighted_mean(terms: Array, weights: Array) -> Array:
    """`sum(w x) / sum(w)`, 0 where nothing is weighed. A term of weight 0 may be infinite or no number."""
    safe = jnp.where(weights > 0, terms, 0.0)
    total = jnp.sum(weights)
    return jnp.sum(safe * weights) / jnp.where(total > 0, total, 1.0)


def expected_length(kept: Array) -> Array:
    """`1 + sum_k prod_{j<=k} kept_j`: tokens a round under rejection sampling, were the drafts the text's own."""
    return 1.0 + jnp.sum(jnp.cumprod(kept, axis=-1), axis=-1)
