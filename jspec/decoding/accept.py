"""Acceptance: a proposal counts iff it is the token the target would have chosen itself.

One rule for greedy and sampled: how the target chooses is `sampling.choose`; here its choices are
only compared. Nothing else decides, so the text cannot depend on the drafter.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jspec.decoding.tree import Block


def accept(block: Block, choice: Array) -> Array:
    """Marks the path that the target would have produced itself.

    Args:
      block: the rows that were verified.
      choice: `[B, N]` int32, the target's next token after each row.

    Returns:
      `[B, N]` bool. Row 0 is always marked; siblings carry different tokens, so the marked rows form
      one path.
    """
    wanted = jnp.take_along_axis(choice, block.parents, axis=1)
    agrees = (block.valid & (block.tokens == wanted)).at[:, 0].set(True)
    rows = block.rows
    row = jnp.arange(rows, dtype=jnp.uint32)
    above = (block.ancestors[:, :, row >> 5] >> (row & 31)[None, None]) & jnp.uint32(1)  # [B, N, N]
    return jnp.all(agrees[:, None, :] | (above == 0), axis=-1)


def path(accepted: Array) -> Array:
    """The accepted rows from the root down, then the others: `[B, N]` int32. Parents stand before children."""
    return jnp.argsort(~accepted, axis=1, stable=True).astype(jnp.int32)


def committed(block: Block, accepted: Array) -> Array:
    """How many leading rows may commit, `[B]` int32, at least 1.

    A row commits iff it is accepted and hangs, like all rows before it, under the row just before:
    only such rows saw their ancestors in the columns where a chain has them, so only their
    keys, values and choices are bit for bit those of plain decoding. In a chain that is every
    accepted row.
    """
    order = jnp.arange(block.rows, dtype=jnp.int32)[None]
    in_line = block.parents == jnp.maximum(order - 1, 0)
    return jnp.sum(jnp.cumprod((accepted & in_line).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
