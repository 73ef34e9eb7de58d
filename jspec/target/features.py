"""`Features`: what the target shows drafters of the rows it read."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import Array


class Features(flax.struct.PyTreeNode):
    """Residuals of the target behind its tapped blocks, side by side.

    An engine taps for every drafter that it serves, and each takes its own (`of`). Tap i is the output
    of block i, 0-based; -1 is the embedding, which enters block 0.
    """

    values: Array  # [..., T * D] float32
    taps: tuple[int, ...] = flax.struct.field(pytree_node=False)  # T of them, ascending

    def of(self, taps: tuple[int, ...]) -> Array:
        """The residuals of some taps, in the order given: `[..., len(taps) * D]`."""
        if taps == self.taps:
            return self.values
        width = self.values.shape[-1] // max(len(self.taps), 1)
        parts = [self.values[..., i * width : (i + 1) * width] for i in map(self.taps.index, taps)]
        return jnp.concatenate(parts, axis=-1) if parts else self.values[..., :0]
