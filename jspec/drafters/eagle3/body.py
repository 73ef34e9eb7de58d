"""The body of EAGLE-3, as pure functions for inference and training.

Everything is about pairs: a token, and the state behind the token before it. The pair at position t holds the
token there and the state of position t - 1, the target's own (`fuse`) where the target has read that far and
the drafter's (`fed`) beyond; it says what stands at t + 1 (drafters.md 6.2). Position 0 has no pair.

    position        0     1         2         3
    token           x0    x1        x2        x3
    state           -     of x0     of x1     of x2

Pairs of committed tokens are keys and values and nothing else, as a single layer's do not depend on its own
attention.
"""

from __future__ import annotations

from collections.abc import Callable

from jax import Array
from jax import numpy as jnp

from jspec.drafters.block.body import Linear, Turn
from jspec.drafters.eagle3.config import EagleConfig
from jspec.drafters.eagle3.weights import EagleParams
from jspec.target import primitives, rope
from jspec.target.primitives import gated, rms_norm

Attend = Callable[[Array, Array, Array], Array]  # q, k, v of the pairs to [..., H * hd]


def fuse(params: EagleParams, config: EagleConfig, features: Array, linear: Linear = primitives.linear) -> Array:
    """The target's states `[..., D]` float32 of tapped residuals `features [..., T * D]` float32."""
    if params.fuse_norm is not None:
        shape = features.shape
        if config.fuse_norm == "each":
            features = features.reshape(*shape[:-1], len(config.taps), config.width)
        weight = jnp.ones((features.shape[-1],), jnp.float32)
        features = rms_norm(features, weight, config.norm_eps).reshape(shape)
        features = features * params.fuse_norm.reshape((1,) * (len(shape) - 1) + (-1,))
    return linear(features, params.fuse)


def pair(params: EagleParams, config: EagleConfig, embedded: Array, state: Array) -> Array:
    """What queries, keys and values are made of: `[..., 2 D]` float32.

    Args:
      embedded: `[..., D]` float32, of the token.
      state: `[..., D]` float32, of the token before it.
    """
    token = rms_norm(embedded, params.embed_norm, config.norm_eps)
    return jnp.concatenate([token, rms_norm(state, params.state_norm, config.norm_eps)], axis=-1)


def keys_values(
    params: EagleParams, config: EagleConfig, pairs: Array, turn: Turn, linear: Linear = primitives.linear
) -> tuple[Array, Array]:
    """Keys, turned, and values of `pairs [..., 2 D]`: each `[..., G, hd]` float32."""
    c = config
    kv = linear(pairs, params.kv).reshape(*pairs.shape[:-1], 2 * c.kv_heads, c.head_width)
    k, v = jnp.split(kv, 2, axis=-2)
    return rope.rotate(_normed(k, params.k_norm, c), *turn), v


def layer(
    params: EagleParams,
    config: EagleConfig,
    embedded: Array,
    state: Array,
    turn: Turn,
    attend: Attend,
    linear: Linear = primitives.linear,
) -> Array:
    """Runs pairs through the layer.

    Args:
      embedded, state: as for `pair`.
      turn: of the tokens' positions, from `rope.angles`.
      attend: attention, given queries, keys and values of these pairs.

    Returns:
      `[..., D]` float32 before the final norm.
    """
    c = config
    pairs = pair(params, c, embedded, state)
    q = linear(pairs, params.q).reshape(*pairs.shape[:-1], c.heads, c.head_width)
    q = rope.rotate(_normed(q, params.q_norm, c), *turn)
    x = pairs[..., c.width :] if c.norm_residual else state
    x = x + linear(attend(q, *keys_values(params, c, pairs, turn, linear)), params.out)
    h = rms_norm(x, params.ff_norm, c.norm_eps)
    return x + linear(gated(linear(h, params.gate_up), "silu"), params.down)


def finish(params: EagleParams, config: EagleConfig, y: Array) -> tuple[Array, Array]:
    """What the head reads, and the state that the next pair holds: both `[..., D]` float32, of `layer`'s output."""
    hidden = rms_norm(y, params.final_norm, config.norm_eps)
    return hidden, hidden if config.norm_output else y


def _normed(x: Array, weight: Array | None, config: EagleConfig) -> Array:
    return x if weight is None else rms_norm(x, weight, config.norm_eps)
