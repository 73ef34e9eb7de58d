"""Position-keyed noise: a Gumbel variable for every (seed, choice index, position, token id).

A counter-based hash of our own rather than a stream of keys: the value at a position does not
depend on how many numbers were drawn before it, so neither acceptance history nor batch mates can
shift it, and drafter and target may share it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

# What noise is drawn for. The target's own is unsalted; the classical rule needs three more kinds that
# are independent of it and of each other (`decoding/rejection.py`).
DRAFT, RATIO, RESIDUAL = (0xA4093822, 0x299F31D0), (0x082EFA98, 0xEC4E6C89), (0x452821E6, 0x38D01377)


def salted(seed: Array, purpose: tuple[int, int]) -> Array:
    """The seed of another kind of noise of the same request; `seed [B, 2]` uint32."""
    return seed ^ jnp.array(purpose, jnp.uint32)[None]


def scramble(h: Array) -> Array:
    """The finaliser of MurmurHash3 (Appleby): a bijection of 32-bit words in which each input bit
    flips each output bit about half the time. `h` uint32 of any shape."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def row_keys(seed: Array, choice_index: Array, position: Array) -> tuple[Array, Array]:
    """Two words that stand for a row.

    Args:
      seed: `[B, 2]` uint32, low and high word.
      choice_index: `[B]` int32, which of a request's `n` answers this is.
      position: `[B, N]` int32, absolute position of the token to be chosen.

    Returns:
      two `[B, N]` uint32 arrays.
    """
    low, high, index = (w.astype(jnp.uint32)[:, None] for w in (seed[:, 0], seed[:, 1], choice_index))
    words = (low, high, index, position.astype(jnp.uint32))
    keys = []
    for salt in (0x243F6A88, 0x13198A2E):  # digits of pi: nothing up the sleeve
        h = jnp.full(position.shape, salt, jnp.uint32)
        for word in words:
            h = scramble(h ^ word) + jnp.uint32(0x9E3779B9)
        keys.append(h)
    return keys[0], keys[1]


def bits(seed: Array, choice_index: Array, position: Array, vocab: int, ids: Array | None = None) -> Array:
    """32 random bits for each token id: `[B, N, V]` uint32. Arguments as in `row_keys`, and `gumbel`."""
    first, second = row_keys(seed, choice_index, position)
    if ids is None:
        ids = lax.iota(jnp.uint32, vocab)
    ids = ids.astype(jnp.uint32)[None, None]
    return scramble(scramble(ids ^ first[..., None]) + second[..., None])


def gumbel(seed: Array, choice_index: Array, position: Array, vocab: int, ids: Array | None = None) -> Array:
    """Standard Gumbel noise, `[B, N, V]` float32, finite. Arguments as in `row_keys`.

    With `ids [V]` int32, which token each column stands for, a drafter that knows some of the tokens
    shares the noise of these.

    `-log(E)` of an exponential `E = -log(1 - u)`. The winners of an argmax have small E, and u near
    0 is where a float has most resolution: 2^-32 here, so a token as rare as that still keeps its share.
    """
    word = bits(seed, choice_index, position, vocab, ids)
    u = (word.astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-32)
    u = jnp.minimum(u, jnp.float32(1.0 - 2.0**-24))  # the top words round to 1
    return -jnp.log(-jnp.log1p(-u))


def uniform(seed: Array, choice_index: Array, position: Array) -> Array:
    """Evenly from the open interval (0, 1) for each row, `[B, N]` float32. Arguments as in `row_keys`."""
    first, second = row_keys(seed, choice_index, position)
    word = scramble(first + scramble(second))
    return ((word >> 8).astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-24)
