"""A mixture of experts whose rows do not know each other.

Batched engines sort tokens by expert and multiply group by group. Then the shape of a product, and
with it the last bits of a row, depends on where the neighbours were sent, and a row that finds its
expert full is dropped. Here every expert reads every row in one product of fixed shape, takes part
only in the rows that were sent to it, and the experts are added in their own order. So a row's bits
are a function of the row alone (known-failures DT-9).

An expert that no row was sent to is skipped, which saves reading its weights and changes no bit:
sums are left as they are, not increased by zero.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.target.config import MoeConfig
from jspec.target.primitives import gated, linear
from jspec.target.products import Products


class Experts(flax.struct.PyTreeNode):
    """Weights of one mixture; `E` experts of width `F`."""

    router: Array  # [E, D] float32: a choice between experts should not hang on rounding
    gate_up: Array  # [E, 2 F, D], rows of an expert: gate, up
    down: Array  # [E, D, F]


def shares(x: Array, router: Array, moe: MoeConfig) -> Array:
    """How much of each expert's output a row takes: `x [rows, D]` to `[rows, E]` float32.

    The softmax over all experts, kept for the `per_token` largest (of equal ones the first) and 0 for
    the others.
    """
    chance = jax.nn.softmax(linear(x, router), axis=-1)
    top, index = lax.top_k(chance, moe.per_token)
    if moe.normalize:
        top = top / jnp.sum(top, axis=-1, keepdims=True)
    numbers = lax.broadcasted_iota(index.dtype, (1, 1, moe.experts), 2)
    return jnp.sum(jnp.where(index[..., None] == numbers, top[..., None], 0.0), axis=1)


def mix(x: Array, experts: Experts, moe: MoeConfig, activation: str, form: Products | None = None) -> Array:
    """Runs `x [..., D]` float32 through the mixture; returns `[..., D]` float32."""
    rows = x.reshape(-1, x.shape[-1])
    share = shares(rows, experts.router, moe)

    def add(expert: Array | int, total: Array) -> Array:
        mine = lax.dynamic_slice_in_dim(share, expert, 1, axis=1)  # [rows, 1]

        def run() -> Array:
            gate_up = lax.dynamic_index_in_dim(experts.gate_up, expert, keepdims=False)
            down = lax.dynamic_index_in_dim(experts.down, expert, keepdims=False)
            out = linear(gated(linear(rows, gate_up, form), activation), down, form)
            return jnp.where(mine > 0, total + mine * out, total)

        return lax.cond(jnp.any(mine > 0), run, lambda: total)

    return lax.fori_loop(0, moe.experts, add, jnp.zeros_like(rows)).reshape(x.shape)
