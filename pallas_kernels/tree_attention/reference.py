"""Obviously right and slow: one softmax over all columns, from a mask that is written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.tree_attention.api import Rows
from pallas_kernels.tree_attention.shapes import Shape


def refuses(shape: Shape) -> str | None:
    """Computes every shape."""
    return None


def mask(rows: Rows, capacity: int) -> Array:
    """`[R, N, S]` bool: which column each row reads."""
    count = rows.ancestors.shape[1]

    def one(start: Array, ancestors: Array, positions: Array | None) -> Array:
        bits = (ancestors[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
        own = bits.reshape(count, -1)[:, :count].astype(bool)  # [N, N]
        column = jnp.arange(capacity, dtype=jnp.int32)
        before = jnp.broadcast_to((column < start)[None], (count, capacity))
        seen = lax.dynamic_update_slice(before, own, (jnp.int32(0), start))
        if positions is None or rows.window is None:
            return seen
        at = lax.dynamic_update_slice(column, positions, (start,))
        return seen & (at[None] > positions[:, None] - rows.window)

    return jax.vmap(one)(rows.start, rows.ancestors, rows.positions)


def attend(
    q: Array, keys: Array, values: Array, rows: Rows, *, key_block: int, scale: float, cap: float | None
) -> Array:
    """See `api.attend`. Columns that no row reads may hold anything."""
    slots, count, heads, width = q.shape
    groups, capacity = keys.shape[1:3]
    dtype, precision = keys.dtype, lax.Precision.HIGHEST
    seen = mask(rows, capacity)
    used = jnp.any(seen, axis=1)[:, None, :, None]
    keys, values = (lax.dynamic_slice_in_dim(x, rows.slot, slots, axis=0) for x in (keys, values))
    keys, values = (jnp.where(used, x, 0).astype(jnp.float32) for x in (keys, values))
    q = (q * jnp.float32(scale)).astype(dtype).astype(jnp.float32)
    q = q.reshape(slots, count, groups, heads // groups, width)
    scores = jnp.einsum("rngfd,rgsd->rngfs", q, keys, precision=precision)
    if cap is not None:
        scores = jnp.float32(cap) * jnp.tanh(scores / jnp.float32(cap))
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    weight = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = weight.astype(dtype).astype(jnp.float32)
    out = jnp.einsum("rngfs,rgsd->rngfd", weight, values, precision=precision) / total
    return out.reshape(slots, count, heads * width)
