"""The confidence head: how likely a draft is to be accepted, given that all before it were (drafters.md 4.3).

It looks at the row and at the predecessor, never at the token that it judges, so that cutting a block
where it is low leaves the classical rule lossless.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.block.weights import Confidence


def logit(head: Confidence, hidden: Array, before: Array | None) -> Array:
    """`hidden [..., D]`, and `before [..., r]` if the head reads it, to logits `[...]` float32, uncalibrated."""
    x = hidden if before is None else jnp.concatenate([hidden, before], axis=-1)
    return jnp.sum(x * head.weight.reshape((1,) * (x.ndim - 1) + (-1,)), axis=-1) + head.bias


def calibrated(head: Confidence, logits: Array) -> Array:
    """Probabilities `[..., K]` of logits of the first K positions."""
    count = logits.shape[-1]
    return jax.nn.sigmoid(logits / head.temperature[:count].reshape((1,) * (logits.ndim - 1) + (-1,)))
