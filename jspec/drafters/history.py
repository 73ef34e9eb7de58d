"""A per-slot record of committed tokens, for drafters that look back at the text."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jspec.drafters.base import Rows


def init(slots: int, capacity: int) -> Array:
    """An empty record `[B, S]` int32; -1 stands where no token is known."""
    return jnp.full((slots, capacity), -1, jnp.int32)


def observe(record: Array, rows: Rows) -> Array:
    """Writes the rows' tokens at their positions; rows beyond `count` leave the record as it is."""

    def put(r: Array | int, record: Array) -> Array:
        corner = (rows.slot + r, rows.start[r])
        old = lax.dynamic_slice(record, corner, (1, rows.tokens.shape[1]))
        fresh = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None] < rows.count[r]
        new = jnp.where(fresh, lax.dynamic_slice_in_dim(rows.tokens, r, 1), old)
        return lax.dynamic_update_slice(record, new, corner)

    return lax.fori_loop(0, rows.tokens.shape[0], put, record)


def reset(record: Array, slot: Array) -> Array:
    """Forgets one slot."""
    return lax.dynamic_update_slice(record, jnp.full((1, record.shape[1]), -1, jnp.int32), (slot, jnp.int32(0)))
