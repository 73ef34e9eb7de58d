"""The Markov head of DSpark: what a draft's predecessor adds to its logits (drafters.md 4.2).

    vanilla  W2 e(x)
    gated    W2 (sigmoid(Wg [h; e(x)] + bg) * e(x))
    rnn      [u; c; o] = Wz [s; e(x); h] + bz, next s = sigmoid(u) s + (1 - sigmoid(u)) tanh(c), bias W2 tanh(o)

with x the predecessor, e its row of W1, h the row's hidden state, s a state that begins at 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.block.body import Linear
from jspec.drafters.block.config import BlockConfig
from jspec.drafters.block.weights import Markov
from jspec.target import primitives


def start(config: BlockConfig, shape: tuple[int, ...]) -> Array:
    """State before the first row: `[*shape, r]` float32; of use to `rnn` only."""
    return jnp.zeros((*shape, config.rank), jnp.float32)


def look_up(config: BlockConfig, head: Markov, columns: Array | None, tokens: Array) -> Array:
    """`e(x)`, `[..., r]` float32, of predecessors `tokens [...]` int32, target ids (known-failures DR-5)."""
    rows = tokens if not config.shared_row or columns is None else columns[tokens]
    return head.previous[rows].astype(jnp.float32)


def step(
    config: BlockConfig, head: Markov, hidden: Array, before: Array, state: Array, linear: Linear = primitives.linear
) -> tuple[Array, Array]:
    """One row of every sequence.

    Args:
      hidden: `[..., D]` float32 after the final norm.
      before: `[..., r]` float32, `look_up` of the predecessor.
      state: `[..., r]`.

    Returns:
      what is added to the logits, `[..., Vd]` float32, and the state behind the row.
    """
    inner, state = inside(config, head, hidden, before, state, linear)
    return linear(inner, head.following), state


def inside(
    config: BlockConfig, head: Markov, hidden: Array, before: Array, state: Array, linear: Linear = primitives.linear
) -> tuple[Array, Array]:
    """As `step`, up to the vector `[..., r]` that `following` turns into logits."""
    if config.markov == "vanilla":
        return before, state
    assert head.mix is not None and head.mix_bias is not None
    if config.markov == "gated":
        gate = primitives.add_bias(linear(jnp.concatenate([hidden, before], axis=-1), head.mix), head.mix_bias)
        return jax.nn.sigmoid(gate) * before, state
    joint = linear(jnp.concatenate([state, before, hidden], axis=-1), head.mix)
    update, candidate, output = jnp.split(primitives.add_bias(joint, head.mix_bias), 3, axis=-1)
    keep = jax.nn.sigmoid(update)
    return jnp.tanh(output), keep * state + (1.0 - keep) * jnp.tanh(candidate)
