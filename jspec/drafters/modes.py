"""How a drafter's logits become tokens.

    greedy   its best token
    coupled  argmax(z + g) with the target's settings and the target's own noise g: where both agree on the
             law they agree on the token (Gumbel coupling, as in Daliri et al., 2024)
    sampled  drawn by noise of its own, with the law: what the classical rule is made for (Leviathan et al., 2023)

All three are lossless under both rules. Under `choice`, `sampled` accepts least.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jspec.decoding import rejection
from jspec.decoding import sampling as samplings
from jspec.decoding.sampling import Sampling
from jspec.errors import JspecError

MODES = ("greedy", "coupled", "sampled")


def mode_for(rule: str) -> str:
    """The mode that a rule of acceptance was made for."""
    return "sampled" if rule == "rejection" else "coupled"


def check(mode: str) -> None:
    """Refuses a mode that does not exist."""
    if mode not in MODES:
        raise JspecError(f"`mode` of the drafter is `{mode!r}`.", ", ".join(MODES) + ".", "choose one of these.")


def pick(
    mode: str, logits: Array, position: Array, sampling: Sampling, ids: Array | None = None, heat: float = 1.0
) -> tuple[Array, Array | None]:
    """Chooses a column of each row.

    Args:
      mode: one of `MODES`.
      logits: `[B, N, Vd]` float32.
      position: `[B, N]` int32, absolute position of the token that is chosen.
      sampling: the slots' settings.
      ids: `[Vd]` int32, the token of each column; None: the column's number.
      heat: the draft's temperature as a multiple of the target's.

    Returns:
      columns `[B, N]` int32, and for `sampled` the law they were drawn from, `[B, N, Vd]` float32.
    """
    if mode == "greedy":
        return samplings.first_largest(logits), None
    if heat != 1.0:
        sampling = sampling.replace(temperature=sampling.temperature * jnp.float32(heat))
    if mode == "coupled":
        return samplings.choose(logits, position, sampling, ids), None
    return rejection.draw(logits, position, sampling, ids)


def probability(logits: Array, columns: Array) -> Array:
    """Of the chosen column under the softmax, `[B, K]` float32."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(logits - best), axis=-1)
    chosen = jnp.take_along_axis(logits, columns[..., None], axis=-1)[..., 0]
    return jnp.exp(chosen - best[..., 0]) / total
