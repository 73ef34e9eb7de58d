"""The law of the next token: one function from logits to probabilities, in float32 (known-failures DR-1).

The classical rule draws from it, takes ratios of it and leaves residuals of it; log-probabilities
"as processed" are read from it. It is the law that `sampling.choose` draws from without ever
writing it down: temperature, then top-k, top-p and min-p by value.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jspec.decoding import sampling as samplings
from jspec.decoding.sampling import Sampling


def log_law(logits: Array, s: Sampling) -> Array:
    """Log-probabilities under a slot's settings; all on one token where the temperature is 0.

    Args:
      logits: `[B, N, V]` float32, processed.
      s: settings of the `B` slots.

    Returns:
      `[B, N, V]` float32, -inf where a filter removed the token.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    z = (logits - best) / jnp.where(s.temperature > 0, s.temperature, 1.0)[:, None, None]
    kept = lax.cond(
        jnp.any((s.top_k > 0) | (s.top_p < 1) | (s.min_p > 0)),
        lambda: passing(z, s),
        lambda: jnp.ones(z.shape, bool),
    )
    z = jnp.where(kept, z, -jnp.inf)
    sampled = z - jnp.log(jnp.sum(jnp.exp(z), axis=-1, keepdims=True))
    ids = lax.broadcasted_iota(jnp.int32, (1, 1, z.shape[-1]), 2)
    certain = jnp.where(ids == samplings.first_largest(logits)[..., None], 0.0, -jnp.inf)
    return jnp.where((s.temperature > 0)[:, None, None], sampled, certain)


def passing(z: Array, s: Sampling) -> Array:
    """What the filters leave of `z [B, N, V]` float32, whose largest is 0; `[B, N, V]` bool."""
    mass = jnp.exp(z)
    key = samplings.sort_key(z)
    kth = samplings.kth_largest(z, s.top_k[:, None])[..., None]
    total = jnp.sum(jnp.where(z >= kth, mass, 0.0), axis=-1)
    light = s.top_p[:, None] * total

    # The smallest key above which less than p of the mass lies; that mass only shrinks as the key grows.
    _, nucleus = samplings.bisect(
        lambda middle: ~(jnp.sum(jnp.where(key > middle[..., None], mass, 0.0), axis=-1) < light), z.shape[:-1]
    )
    off = (s.top_p >= 1)[:, None, None]
    floor = jnp.where(s.min_p > 0, jnp.log(s.min_p), -jnp.inf)[:, None, None]
    return ((z >= kth) & (off | (key >= nucleus[..., None])) & (z >= floor)) | (z >= 0)
