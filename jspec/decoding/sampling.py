"""The target's choice at every row: one function for greedy and sampled, settings as arrays.

Settings are arrays over slots, never Python values, so one compiled program serves any mix. The
choice at a row is

    z = (logits - max) / T,  kept = top-k, top-p and min-p on z,  choice = argmax over kept of z + g

with g the position-keyed noise of `noise.py`. A slot with T = 0 uses T = 1 and g = 0: greedy. Ties
go to the lowest id. This is exact sampling from the filtered softmax (the Gumbel-max identity), and
it is a function of the row's logits, the settings and the position alone.

Filters are defined by value, so that ties need no order:

    top-k  keeps a token iff fewer than k tokens have a larger z
    top-p  keeps a token iff the tokens with a larger z have less than p of the mass (after top-k)
    min-p  keeps a token iff its probability is at least min_p times the largest

Without ties these are the usual sorted definitions (Fan et al., 2018; Holtzman et al., 2019; Nguyen
et al., 2024). The most likely token is always kept.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.decoding import noise

GROUP = 64  # ids searched together by `first_largest`


class Sampling(flax.struct.PyTreeNode):
    """Sampling settings of `B` slots."""

    temperature: Array  # [B] float32, 0 is greedy
    top_k: Array  # [B] int32, 0 is off
    top_p: Array  # [B] float32, 1 is off
    min_p: Array  # [B] float32, 0 is off
    seed: Array  # [B, 2] uint32, low and high word
    choice_index: Array  # [B] int32


def greedy(slots: int) -> Sampling:
    """Settings under which every slot takes the most likely token."""
    return Sampling(
        temperature=jnp.zeros((slots,), jnp.float32),
        top_k=jnp.zeros((slots,), jnp.int32),
        top_p=jnp.ones((slots,), jnp.float32),
        min_p=jnp.zeros((slots,), jnp.float32),
        seed=jnp.zeros((slots, 2), jnp.uint32),
        choice_index=jnp.zeros((slots,), jnp.int32),
    )


def seed_words(seed: int) -> np.ndarray:
    """A seed of 0 .. 2**64 - 1 as `[2]` uint32, low word first."""
    return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)


def choose(logits: Array, position: Array, sampling: Sampling, ids: Array | None = None) -> Array:
    """The target's choice after every row.

    Args:
      logits: `[B, N, V]` float32.
      position: `[B, N]` int32, absolute position of the token that is chosen.
      sampling: settings of the `B` slots.
      ids: `[V]` int32, the token that each column stands for, if it is not the column's number: a
        drafter's, which then shares the noise of the tokens that it knows.

    Returns:
      `[B, N]` int32, columns.
    """
    return lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: _sample(logits, position, sampling, ids),
        lambda: first_largest(logits),
    )


def first_largest(x: Array) -> Array:
    """Index of the largest value over the last axis, the lowest where several are equal; int32.

    A vocabulary is searched in two steps on CPU, which is fast at maxima and slow at their places: the
    first of its groups that holds the maximum, then the first place in that group.
    """
    size = x.shape[-1]
    if size < 64 * GROUP or size % GROUP:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)

    def in_groups(x: Array) -> Array:
        grouped = x.reshape(*x.shape[:-1], size // GROUP, GROUP)
        group = jnp.argmax(jnp.max(grouped, axis=-1), axis=-1).astype(jnp.int32)
        inside = jnp.take_along_axis(grouped, group[..., None, None], axis=-2)[..., 0, :]
        return group * GROUP + jnp.argmax(inside, axis=-1).astype(jnp.int32)

    # Other backends lay the groups out anew, which costs more than it saves.
    return lax.platform_dependent(x, cpu=in_groups, default=lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32))


def _sample(logits: Array, position: Array, s: Sampling, ids: Array | None) -> Array:
    """Draws without sorting the vocabulary.

    The unfiltered winner, if it passes the filters, is the filtered winner: the largest of a set
    that lies in a subset is the largest of the subset. If it fails, then every token of its value or
    less fails with it, and the search goes on among the larger ones. Each turn is one pass over
    the logits, and most rows need one turn.
    """
    sampled = (s.temperature > 0)[:, None, None]
    # Counted from the row's best: a small T would leave a z far from 0 no digits for the noise.
    best = jnp.max(logits, axis=-1)
    z = (logits - best[..., None]) / jnp.where(s.temperature > 0, s.temperature, 1.0)[:, None, None]
    g = noise.gumbel(s.seed, s.choice_index, position, logits.shape[-1], ids)
    scores = jnp.where(sampled, z + g, z)
    top = best - best  # 0, or not a number as the row is
    mass = jnp.exp(z)

    top_k, top_p = s.top_k[:, None], s.top_p[:, None]
    floor = top + jnp.where(s.min_p > 0, jnp.log(s.min_p), -jnp.inf)[:, None]
    # One sum for every slot, whoever else is in the batch: two would be free to differ in the last bit.
    kth = lax.cond(
        jnp.any((s.top_k > 0) & (s.top_p < 1)),
        lambda: kth_largest(z, top_k),
        lambda: jnp.full_like(top, -jnp.inf),
    )
    total = jnp.sum(jnp.where(z >= kth[..., None], mass, 0.0), axis=-1)

    counted = jnp.any(s.top_k > 0)

    def passes(value: Array) -> Array:
        above = z > value[..., None]
        larger = lax.cond(
            counted,
            lambda: jnp.sum(z > value[..., None], axis=-1, dtype=jnp.int32),
            lambda: jnp.zeros_like(value, jnp.int32),
        )
        few = (top_k == 0) | (larger < top_k)
        light = (top_p >= 1) | (jnp.sum(jnp.where(above, mass, 0.0), axis=-1) < top_p * total)
        # A row that is not a number compares false everywhere; it must not loop for ever.
        return (few & light & (value >= floor)) | (value >= top) | ~jnp.isfinite(top)

    def pick(scores: Array) -> tuple[Array, Array]:
        choice = first_largest(scores)
        return choice, jnp.take_along_axis(z, choice[..., None], axis=-1)[..., 0]

    def again(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        choice, value, done = carry
        bound = jnp.where(done, -jnp.inf, value)[..., None]
        new_choice, new_value = pick(jnp.where(z > bound, scores, -jnp.inf))
        choice, value = jnp.where(done, choice, new_choice), jnp.where(done, value, new_value)
        return choice, value, done | passes(value)

    choice, value = pick(scores)
    choice, _, _ = lax.while_loop(lambda carry: ~jnp.all(carry[2]), again, (choice, value, passes(value)))
    return choice


def sort_key(z: Array) -> Array:
    """int32 keys that compare as the floats do: the bits, with those of negative floats flipped."""
    raw = lax.bitcast_convert_type(z, jnp.int32)
    return jnp.where(raw < 0, raw ^ jnp.int32(0x7FFFFFFF), raw)


def kth_largest(z: Array, k: Array) -> Array:
    """The k-th largest value over the last axis, `k [B, 1]` with 0 for the smallest, by bisection.

    32 halvings of the range of a 32-bit key end at a value of the row, exactly.
    """
    key = sort_key(z)
    wanted = jnp.where(k > 0, jnp.minimum(k, z.shape[-1]), z.shape[-1])
    low, _ = bisect(lambda middle: jnp.sum(key >= middle[..., None], axis=-1, dtype=jnp.int32) >= wanted, z.shape[:-1])
    return lax.bitcast_convert_type(jnp.where(low < 0, low ^ jnp.int32(0x7FFFFFFF), low), jnp.float32)


def bisect(holds: Callable[[Array], Array], shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The largest int32 for which `holds`, and the next one, `shape` each, by 32 halvings.

    `holds` takes and returns arrays of `shape`; it must hold for the smallest int32, and not hold again
    above one for which it does not.
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        up = holds(middle)
        return jnp.where(up, middle, low), jnp.where(up, high, middle)

    limits = jnp.iinfo(jnp.int32)
    edges = jnp.full(shape, limits.min, jnp.int32), jnp.full(shape, limits.max, jnp.int32)
    low, high = lax.fori_loop(0, 32, halve, edges)
    return low, high
