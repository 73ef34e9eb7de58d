"""The key/value cache: fixed capacity, one array per layer.

A tuple over layers rather than one stacked array, so that each layer's update is in place when the
cache is donated. Columns are absolute positions: column c of a slot belongs to the token at
position c, in every program, always.

On CPU a bfloat16 cache is held as raw bits, two numbers to a word (uint32). XLA's CPU backend widens
a bfloat16 operand of an update to float32 and back, the whole array of it: at 8 slots of 512 columns
that turned a write of 0.5 ms into one of 155 ms. And its loops copy element by element: words halve
what reading a key block costs.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.target.config import TargetConfig


class KVCache(flax.struct.PyTreeNode):
    """Keys and values of `B` slots with capacity for `S` columns."""

    keys: tuple[Array, ...]  # per layer [B, G, S, hd], or hd / 2 words
    values: tuple[Array, ...]  # per layer [B, G, S, hd], or hd / 2 words
    length: Array  # [B] int32: columns 0 .. length-1 are committed

    @property
    def slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that a cache of `dtype` is held in on the default backend."""
    if dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        return jnp.dtype(jnp.uint32)
    return jnp.dtype(dtype)


def pack(x: Array, storage: jnp.dtype) -> Array:
    """Float32 `x [..., hd]` rounded to what a cache held in `storage` keeps, `[..., hd]` or `[..., hd / 2]`."""
    if storage == jnp.uint32:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16).reshape(*x.shape[:-1], -1, 2), jnp.uint32)
    return x.astype(storage)


def unpack(x: Array) -> Array:
    """Columns of a cache as numbers `[..., hd]`, the inverse of `pack`."""
    if x.dtype == jnp.uint32:
        return lax.bitcast_convert_type(x, jnp.bfloat16).reshape(*x.shape[:-1], -1)
    return x


def init(config: TargetConfig, slots: int, capacity: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache for a target; all columns are zero."""
    return empty(config.layers, slots, config.kv_heads, capacity, config.head_width, dtype)


def empty(layers: int, slots: int, groups: int, capacity: int, head_width: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache of `layers` layers with `groups` key/value heads."""
    held = storage_dtype(dtype)
    shape = (slots, groups, capacity, head_width // 2 if held == jnp.uint32 else head_width)
    return KVCache(
        keys=tuple(jnp.zeros(shape, held) for _ in range(layers)),
        values=tuple(jnp.zeros(shape, held) for _ in range(layers)),
        length=jnp.zeros((slots,), jnp.int32),
    )


def reordered(cache: KVCache, order: Array) -> KVCache:
    """The block behind each slot's length in another order of rows: row `order[b, j]` moves to row j.

    Args:
      order: `[B, N]` int32.
    """
    rows = order.shape[1]

    def move(array: Array) -> Array:
        def put(slot: Array | int, array: Array) -> Array:
            corner = (slot, jnp.int32(0), cache.length[slot], jnp.int32(0))
            block = lax.dynamic_slice(array, corner, (1, array.shape[1], rows, array.shape[3]))
            return lax.dynamic_update_slice(array, jnp.take(block, order[slot], axis=2), corner)

        return lax.fori_loop(jnp.int32(0), cache.slots, put, array)

    return cache.replace(keys=tuple(map(move, cache.keys)), values=tuple(map(move, cache.values)))


def bytes_per_token(config: TargetConfig, dtype: jnp.dtype) -> int:
    """Bytes of keys and values that one token adds, over all layers."""
    return 2 * config.layers * config.kv_heads * config.head_width * jnp.dtype(dtype).itemsize
