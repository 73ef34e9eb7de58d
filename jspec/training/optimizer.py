"""`Optimizer`: how a step changes weights. AdamW, warm-up and cosine, all functions of the step's number."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jspec.errors import JspecError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW behind a clip of the gradient's norm. The defaults are DeepSpec's recipe for DSpark.

    Args:
      rate: learning rate at its peak.
      steps: of the whole run, after which the rate is 0.
      warmup: steps until the peak.
      clip: largest norm of the gradient.
      decay: of weight matrices; vectors (norms, biases) do not decay.
      average: of an exponential moving average of the weights, 0.999 for instance; 0 keeps none.
    """

    steps: int
    rate: float = 6e-4
    warmup: int = 0
    clip: float = 1.0
    decay: float = 0.0
    average: float = 0.0

    def __post_init__(self) -> None:
        for name, least, most in (("steps", 1, 1 << 31), ("warmup", 0, self.steps)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise JspecError(f"`{name}` is `{value!r}`.", f"a whole number from {least} to {most}.", "correct it.")
        for name, below in (("rate", 1e3), ("clip", 1e9), ("decay", 1e3), ("average", 1.0)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < below or (name in ("rate", "clip") and value == 0):
                raise JspecError(f"`{name}` is `{value!r}`.", f"a number from 0 to below {below:g}.", "correct it.")

    def schedule(self, step: Array | int) -> Array:
        """The learning rate of step `step`, counted from 0: `(step + 1) / warmup` of the peak, then half a cosine."""
        step = jnp.asarray(step, jnp.float32)
        rising = (step + 1.0) / max(self.warmup, 1)
        # The peak is the last step of the warm-up, and where the cosine begins.
        first = max(self.warmup - 1, 0)
        done = jnp.clip((step - first) / max(self.steps - first, 1), 0.0, 1.0)
        falling = 0.5 * (1.0 + jnp.cos(jnp.pi * done))
        return jnp.float32(self.rate) * jnp.minimum(jnp.minimum(rising, 1.0), falling)

    def transform(self) -> optax.GradientTransformation:
        """The optax chain."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(self.schedule, weight_decay=self.decay, mask=_matrices),
        )


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)
