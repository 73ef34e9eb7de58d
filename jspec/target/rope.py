"""Rotary position embedding: angles from absolute positions, in float32."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.target.config import RopeConfig


def frequencies(rope: RopeConfig, head_width: int) -> np.ndarray:
    """Turns per position of each pair, `[hd / 2]` float32, computed in float64."""
    pairs = np.arange(0, head_width, 2, dtype=np.float64)
    return (rope.theta ** (-pairs / head_width)).astype(np.float32)


def angles(rope: RopeConfig, head_width: int, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine for `positions [...]`, each `[..., 1, hd / 2]` float32: the 1 is the head axis."""
    table = jnp.asarray(frequencies(rope, head_width))
    turn = positions[..., None, None].astype(jnp.float32) * table.reshape((1,) * (positions.ndim + 1) + (-1,))
    return jnp.cos(turn), jnp.sin(turn)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turns `x [..., heads, hd]`, whose first half pairs with its second (rotate-half)."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
