"""`Block`: the rows that one verify reads, as a tree rooted at the last committed token.

Row 0 is the last committed token, whose key and value are not written yet. Every other row is a
proposal; parents come before children. Ancestors are packed bits: bit u of row j (word u // 32,
bit u % 32) is set iff u is j itself or lies above it. For the tree 0-(1-(3), 2):

    row 0: 1 0 0 0
    row 1: 1 1 0 0
    row 2: 1 0 1 0
    row 3: 1 1 0 1

A chain is the tree in which row j hangs under row j - 1.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import Array


class Block(flax.struct.PyTreeNode):
    """`N` rows for each of `B` slots."""

    tokens: Array  # [B, N] int32
    parents: Array  # [B, N] int32, row 0 has parent 0
    depth: Array  # [B, N] int32, row 0 has depth 0
    valid: Array  # [B, N] bool, False for rows that hold no proposal
    ancestors: Array  # [B, N, W] uint32, W = ceil(N / 32)

    @property
    def rows(self) -> int:
        return self.tokens.shape[1]


def words(rows: int) -> int:
    """32-bit words that hold one bit for each of `rows` rows."""
    return -(-rows // 32)


def chain_bits(rows: int) -> np.ndarray:
    """Ancestors of a chain, `[N, W]` uint32: row j sees rows 0 .. j."""
    lower = np.tril(np.ones((rows, rows), np.uint8))
    padded = np.pad(lower, ((0, 0), (0, words(rows) * 32 - rows)))
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def chain(anchor: Array, proposals: Array, count: Array, rows: int) -> Block:
    """A block of `rows` rows that drafts one chain.

    Args:
      anchor: `[B]` int32, the last committed token.
      proposals: `[B, K]` int32, K <= rows - 1.
      count: `[B]` int32, how many of them are proposed; 0 is plain decoding.
      rows: N, whatever K is: the verify program has one shape.
    """
    slots, width = proposals.shape
    order = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (slots, rows))
    valid = order <= jnp.minimum(count, width)[:, None]
    tokens = jnp.concatenate([anchor[:, None], proposals, jnp.zeros((slots, rows - 1 - width), jnp.int32)], axis=1)
    return Block(
        tokens=jnp.where(valid, tokens, 0),
        parents=jnp.maximum(order - 1, 0),
        depth=order,
        valid=valid,
        ancestors=jnp.broadcast_to(jnp.asarray(chain_bits(rows)), (slots, rows, words(rows))),
    )
