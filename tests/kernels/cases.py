"""Random calls of tree attention: trees, lengths, and rows that hold what nobody may read."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention.api import Rows


def tree_bits(rng, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed ancestors `[N, W]` and depths `[N]` of a random tree whose parents come first."""
    seen = np.zeros((rows, -(-rows // 32) * 32), np.uint8)
    depth = np.zeros(rows, np.int32)
    for row in range(rows):
        if row:
            parent = int(rng.integers(max(0, row - 3), row))
            seen[row], depth[row] = seen[parent], depth[parent] + 1
        seen[row, row] = 1
    return np.packbits(seen, axis=1, bitorder="little").view("<u4").astype(np.uint32), depth


def case(shape, seed, start, poison=1e30):
    """`q, keys, values, rows` of one call at the given starts.

    Slots are `1 ..`: slot 0 belongs to somebody else, and as every column behind a block holds `poison`.
    """
    s, rng = shape, np.random.default_rng(seed)
    q = rng.normal(size=(s.slots, s.rows, s.heads, s.width)).astype(np.float32)
    keys, values = rng.normal(size=(2, s.slots + 1, s.groups, s.capacity, s.width)).astype(np.float32)
    for r, at in enumerate(start):
        for x in (keys, values):
            x[r + 1, :, at + s.rows :] = poison
    keys[0], values[0] = poison, poison
    trees = [tree_bits(rng, s.rows) for _ in range(s.slots)]
    starts = np.asarray(start, np.int32)
    rows = Rows(
        slot=jnp.int32(1),
        start=jnp.asarray(starts),
        ancestors=jnp.asarray(np.stack([bits for bits, _ in trees])),
        positions=jnp.asarray(np.stack([depth for _, depth in trees]) + starts[:, None]) if s.window else None,
        window=s.window,
    )
    dtype = jnp.dtype(s.dtype)
    return jnp.asarray(q), jnp.asarray(keys, dtype), jnp.asarray(values, dtype), rows
