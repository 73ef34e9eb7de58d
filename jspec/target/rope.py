"""Rotary position embedding: angles from absolute positions, in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.target.config import RopeConfig

Tree = TypeVar("Tree")


def frequencies(rope: RopeConfig, head_width: int) -> np.ndarray:
    """Turn per position of each pair, in radians, `[hd / 2]` float32, computed in float64.

    `default` is theta ** (-2 i / hd). With it called f, and `factor` s, the other kinds are

        linear   f / s: positions are squeezed (kaiokendev, 2023)
        dynamic  f at a larger theta, for a text of `length` > `original` tokens ("NTK-aware", 2023)
        llama3   f where a pair turns more than `high` times in `original` positions, f / s where less
                 than `low` times, and a mix in between (Llama 3.1, 2024)
        yarn     the same idea, with the mix running over the pair's number i (Peng et al., 2023)

    `dynamic` as published grows theta with the text, so that old keys no longer fit new queries, and
    the same token at the same place has other bits earlier and later. Here the table is made once,
    for texts of `length` tokens: equal to the published one for a text of exactly that length, read
    in one piece, and to `default` for `length` <= `original`.
    """
    pairs = np.arange(0, head_width, 2, dtype=np.float64)
    theta = rope.theta
    if rope.kind == "dynamic" and rope.length > rope.original:
        stretch = rope.factor * rope.length / rope.original - (rope.factor - 1)
        theta *= stretch ** (head_width / (head_width - 2))
    table = theta ** (-pairs / head_width)
    if rope.kind == "linear":
        table = table / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original * table / (2 * math.pi)
        fast = np.clip((turns - rope.low) / (rope.high - rope.low), 0, 1)
        table = table * fast + table / rope.factor * (1 - fast)
    elif rope.kind == "yarn":
        first, last = (_pair_turning(rope, head_width, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_width - 1)
        last += 0.001 if first == last else 0
        slow = np.clip((pairs / 2 - first) / (last - first), 0, 1)
        table = table * (1 - slow) + table / rope.factor * slow
    return table.astype(np.float32)


def _pair_turning(rope: RopeConfig, head_width: int, turns: float) -> float:
    """The (fractional) number of the pair that turns so many times in `original` positions."""
    return head_width * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def angles(rope: RopeConfig, head_width: int, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine for `positions [...]`, each `[..., 1, hd / 2]` float32: the 1 is the head axis."""
    table = jnp.asarray(frequencies(rope, head_width))
    turn = positions[..., None, None].astype(jnp.float32) * table.reshape((1,) * (positions.ndim + 1) + (-1,))
    cos, sin = jnp.cos(turn), jnp.sin(turn)
    if rope.scale != 1.0:
        cos, sin = cos * jnp.float32(rope.scale), sin * jnp.float32(rope.scale)
    return cos, sin


def once(make: Callable[[], Tree], positions: Array) -> Tree:
    """`make()`, computed where it stands.

    XLA's CPU backend would otherwise compute sine and cosine again for every head of every layer,
    inside the loops that use them. A branch on a value that the compiler does not know keeps it out.
    """
    shapes = jax.eval_shape(make)
    empty = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)  # noqa: E731
    return lax.cond(jnp.max(positions) >= 0, make, empty)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turns `x [..., heads, hd]`, whose first half pairs with its second (rotate-half)."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
