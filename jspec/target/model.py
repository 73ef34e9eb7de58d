"""The target: plain functions over a parameter tree, one pass over the rows of a block.

What is unusual compared with a textbook transformer:

- Weights are stored `[out, in]` and contracted on their last axis; q, k and v are one matrix, and so
  are gate and up. Fewer, larger products: with few rows a product costs its weights' bytes.
- Layers are a tuple, unrolled. A scan over stacked weights copies each layer's slice.
- The residual stream is float32 in every engine; only the operands of products take the weights'
  dtype, and every product accumulates and returns float32.
- Keys and values are written first and then read from the cache alone (`attention.py`).
- Taps: the residual after chosen blocks, for drafters.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.target import attention, rope
from jspec.target.cache import KVCache
from jspec.target.config import TargetConfig

# XLA's CPU backend runs a bfloat16 product of one row 10 times slower than one of two or more rows.
MIN_ROWS = 4


class Layer(flax.struct.PyTreeNode):
    """Weights of one block, each linear weight `[out, in]`."""

    attn_norm: Array  # [D] float32
    qkv: Array  # [(H + 2 G) * hd, D], rows: queries, keys, values
    out: Array  # [D, H * hd]
    ff_norm: Array  # [D] float32
    gate_up: Array  # [2 F, D], rows: gate, up
    down: Array  # [D, F]


class TargetParams(flax.struct.PyTreeNode):
    """All weights of a target. Norm weights are float32, the others share one dtype (`dtype`)."""

    embed: Array  # [V, D]
    layers: tuple[Layer, ...]
    final_norm: Array  # [D] float32
    head: Array | None  # [V, D], None when tied: the embedding is the head

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the linear weights, of the operands of products and of the cache."""
        return self.embed.dtype


def init(key: Array, config: TargetConfig, dtype: jnp.dtype = jnp.float32) -> TargetParams:
    """Random weights of a plausible scale, for tests and for timings at real shapes."""
    c = config
    keys = iter(jax.random.split(key, 4 * c.layers + 2))

    def normal(out: int, width: int) -> Array:
        scale = jnp.float32(width**-0.5)
        return (jax.random.normal(next(keys), (out, width), jnp.float32) * scale).astype(dtype)

    ones = jnp.ones((c.width,), jnp.float32)
    layers = tuple(
        Layer(
            attn_norm=ones,
            qkv=normal((c.heads + 2 * c.kv_heads) * c.head_width, c.width),
            out=normal(c.width, c.heads * c.head_width),
            ff_norm=ones,
            gate_up=normal(2 * c.ff_width, c.width),
            down=normal(c.width, c.ff_width),
        )
        for _ in range(c.layers)
    )
    embed = normal(c.vocab_size, c.width)
    head = None if c.tied_head else normal(c.vocab_size, c.width)
    return TargetParams(embed=embed, layers=layers, final_norm=ones, head=head)


def linear(x: Array, weight: Array) -> Array:
    """`x [..., in]` times `weight [out, in]`, accumulated and returned in float32 `[..., out]`."""
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    count = rows.shape[0]
    if count < MIN_ROWS and weight.dtype == jnp.bfloat16:
        rows = jnp.pad(rows, ((0, MIN_ROWS - count), (0, 0)))
    y = lax.dot_general(
        rows,
        weight,
        (((1,), (1,)), ((), ())),
        # Without HIGHEST a float32 product runs in bfloat16 or TF32 passes on TPU and GPU.
        precision=lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return y[:count].reshape(*x.shape[:-1], weight.shape[0])


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, in float32 (Zhang and Sennrich, 2019)."""
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * lax.rsqrt(variance + jnp.float32(eps)) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def forward(
    params: TargetParams,
    config: TargetConfig,
    cache: KVCache,
    tokens: Array,
    positions: Array,
    columns: attention.Columns,
    *,
    taps: tuple[int, ...] = (),
) -> tuple[Array, Array, Array, KVCache]:
    """Runs `N` rows in each of `R` slots: writes their keys and values, then attends.

    Args:
      cache: holds at least the slots `columns.slot .. columns.slot + R - 1`.
      tokens: `[R, N]` int32 ids.
      positions: `[R, N]` int32 absolute positions, for the rotary embedding.
      columns: where the rows are written and which columns each may read.
      taps: 0-based blocks whose output residual is returned, ascending.

    Returns:
      `hidden [R, N, D]` float32 after the final norm; `features [R, N, T * D]` float32, taps in
      the order given; `finite [R, N]` bool, False where a key or value of the row was not a number
      (it was written as 0); the cache, whose `length` is unchanged.
    """
    c = config
    cos, sin = rope.angles(c.rope, c.head_width, positions)
    x = params.embed[tokens].astype(jnp.float32)
    finite = jnp.ones(tokens.shape, bool)
    tapped = []
    keys, values = list(cache.keys), list(cache.values)
    for i, layer in enumerate(params.layers):
        h = rms_norm(x, layer.attn_norm, c.norm_eps)
        qkv = linear(h, layer.qkv)
        q, k, v = split_heads(qkv, c)
        q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        # A row that is not a number must not poison its neighbours, nor the slot's next user. Judged
        # as the cache will hold it: a finite float32 may still round to an infinity.
        good = jnp.isfinite(k.astype(params.dtype)) & jnp.isfinite(v.astype(params.dtype))
        finite &= jnp.all(good, axis=(-1, -2))
        k, v = jnp.where(good, k, 0.0), jnp.where(good, v, 0.0)
        keys[i] = attention.write(keys[i], k, columns)
        values[i] = attention.write(values[i], v, columns)
        attended = attention.read(q, keys[i], values[i], columns)
        x = x + linear(attended, layer.out)
        h = rms_norm(x, layer.ff_norm, c.norm_eps)
        gate, up = jnp.split(linear(h, layer.gate_up), 2, axis=-1)
        x = x + linear(jax.nn.silu(gate) * up, layer.down)
        if i in taps:
            tapped.append(x)
    features = jnp.concatenate(tapped, axis=-1) if tapped else jnp.zeros((*tokens.shape, 0), jnp.float32)
    hidden = rms_norm(x, params.final_norm, c.norm_eps)
    return hidden, features, finite, cache.replace(keys=tuple(keys), values=tuple(values))


def logits(params: TargetParams, hidden: Array) -> Array:
    """`hidden [..., D]` to logits `[..., V]`, float32 straight from the accumulator (known-failures DT-7)."""
    return linear(hidden, params.embed if params.head is None else params.head)


def split_heads(qkv: Array, config: TargetConfig) -> tuple[Array, Array, Array]:
    """`[R, N, (H + 2G) hd]` to queries `[R, N, H, hd]`, keys and values `[R, N, G, hd]`."""
    c = config
    heads = qkv.reshape(*qkv.shape[:2], c.heads + 2 * c.kv_heads, c.head_width)
    q, k, v = jnp.split(heads, [c.heads, c.heads + c.kv_heads], axis=2)
    return q, k, v
