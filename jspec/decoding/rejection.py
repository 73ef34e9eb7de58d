"""The classical rule of speculative sampling, as a choice at every row.

A draft token x, drawn from q, is accepted with probability min(1, p(x) / q(x)); where it is not, the
token is drawn from what p has more than q, `max(p - q, 0)` normalised; behind the last proposal it is
drawn from p (Leviathan et al., 2023; Chen et al., 2023). The text then has the target's law, but unlike
under the default rule it depends on the drafter.

Written as a choice the rule needs no acceptance of its own: the choice at a row is the draft token
that hangs below it if that passes the ratio test, and the residual draw if not. `accept.accept` then
compares, as it does for the default rule. At temperature 0 p and q are one-hot, so only the target's
best token passes (known-failures VS-3).

Draws are keyed by position. Each position is decided once, by noise that the drafter has not seen:
ratio and residual have kinds of their own, apart from the target's noise (which coupled drafters
share) and from the drafter's. A drafter that does not draw has a one-hot q (DR-2).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jspec.decoding import law, noise
from jspec.decoding import sampling as samplings
from jspec.decoding.sampling import Sampling
from jspec.decoding.tree import Block

# A residual of less mass than this is rounding, not law: p and q are the same there.
SMALLEST_RESIDUAL = 1e-8


def choose(logits: Array, log_q: Array | None, block: Block, position: Array, s: Sampling) -> tuple[Array, Array]:
    """The choice at every row of a chain.

    Args:
      logits: `[B, N, V]` float32, the target's, processed.
      log_q: `[B, K, V]` float32, entry j the law that the token of row j + 1 was drawn from; None
        declares every draft token certain.
      block: a chain.
      position: `[B, N]` int32, absolute position of the token that is chosen.
      s: settings of the `B` slots.

    Returns:
      `choice [B, N]` int32, and `lawful [B]` bool: False where a draft token came without a law that
      could have drawn it (VS-7); nothing of such a slot may be emitted.
    """
    vocab = logits.shape[-1]
    p = jnp.exp(law.log_law(logits, s))
    # Row j decides about the token of row j + 1; the last row has none below it.
    below = jnp.concatenate([block.tokens[:, 1:], jnp.zeros_like(block.tokens[:, :1])], axis=1)
    drafted = jnp.concatenate([block.valid[:, 1:], jnp.zeros_like(block.valid[:, :1])], axis=1)
    ids = jnp.arange(vocab, dtype=jnp.int32)[None, None]
    inside = (below >= 0) & (below < vocab)
    safe = jnp.where(inside, below, 0)
    if log_q is None:
        q = (ids == below[..., None]).astype(jnp.float32)
        lawful = jnp.ones(block.tokens.shape[:1], bool)
    else:
        q = jnp.pad(jnp.exp(log_q), ((0, 0), (0, block.rows - log_q.shape[1]), (0, 0)))
        whole = jnp.abs(jnp.sum(q, axis=-1) - 1.0) < 1e-3  # False for what is not a number
        possible = inside & (jnp.take_along_axis(q, safe[..., None], axis=-1)[..., 0] > 0)
        lawful = jnp.all(~drafted | (whole & possible), axis=-1)
    q = jnp.where(drafted[..., None], q, 0.0)  # behind the last proposal the residual is p itself

    px = jnp.take_along_axis(p, safe[..., None], axis=-1)[..., 0]
    qx = jnp.take_along_axis(q, safe[..., None], axis=-1)[..., 0]
    u = noise.uniform(noise.salted(s.seed, noise.RATIO), s.choice_index, position)
    passes = drafted & inside & (u * qx < px)

    residual = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(residual, axis=-1, keepdims=True)
    residual = jnp.where(mass < SMALLEST_RESIDUAL, p, residual)
    g = noise.gumbel(noise.salted(s.seed, noise.RESIDUAL), s.choice_index, position, vocab)
    # A single possible token needs no noise, and at temperature 0 there is one.
    drawn = samplings.first_largest(jnp.log(residual) + g)
    return jnp.where(passes, below, drawn), lawful


def draw(logits: Array, position: Array, s: Sampling, ids: Array | None = None) -> tuple[Array, Array]:
    """A drafter's draw, by noise of its own: for drafters that draw their tokens.

    Args:
      logits: `[B, N, V]` float32, the drafter's.
      position: `[B, N]` int32, absolute position of the token that is drawn.
      ids: `[V]` int32, the token that each column stands for, as in `sampling.choose`.

    Returns:
      columns `[B, N]` int32, and the law they were drawn from, `log_q [B, N, V]` float32: the same
      array, not one computed again.
    """
    log_q = law.log_law(logits, s)
    g = noise.gumbel(noise.salted(s.seed, noise.DRAFT), s.choice_index, position, logits.shape[-1], ids)
    return samplings.first_largest(log_q + g), log_q
