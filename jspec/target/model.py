"""The target: plain functions over a parameter tree, one pass over the rows of a block.

What is unusual compared with a textbook transformer:

- Weights are stored `[out, in]` and contracted on their last axis; q, k and v are one matrix, and so
  are gate and up. Fewer, larger products: with few rows a product costs its weights' bytes.
- Layers are a tuple, unrolled. A scan over stacked weights copies each layer's slice.
- The residual stream is float32 in every engine; only the operands of products take the weights'
  dtype, and every product accumulates and returns float32.
- Keys and values are written first and then read from the cache alone (`attention.py`).
- Taps: the residual after chosen blocks, for drafters.

What the families add to the Llama block (biases, more norms, scales and caps, windows, experts) is an
optional weight or a setting that is off, and then no part of the compiled program.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec.target import attention, moe, products, rope
from jspec.target.cache import KVCache
from jspec.target.config import MoeConfig, TargetConfig
from jspec.target.primitives import add_bias, capped, gated, rounded
from jspec.target.primitives import linear as linear
from jspec.target.primitives import rms_norm as rms_norm


class Layer(flax.struct.PyTreeNode):
    """Weights of one block, each linear weight `[out, in]`. A weight that a family lacks is None."""

    attn_norm: Array  # [D] float32
    qkv: Array  # [(H + 2 G) * hd, D], rows: queries, keys, values
    out: Array  # [D, H * hd]
    ff_norm: Array  # [D] float32
    gate_up: Array | None  # [2 F, D], rows: gate, up; None where the block is a mixture
    down: Array | None  # [D, F]
    # Vectors are float32.
    qkv_bias: Array | None = None  # [(H + 2 G) * hd]
    out_bias: Array | None = None  # [D]
    gate_up_bias: Array | None = None  # [2 F]
    down_bias: Array | None = None  # [D]
    q_norm: Array | None = None  # [hd], before rope
    k_norm: Array | None = None  # [hd]
    attn_out_norm: Array | None = None  # [D], of what attention adds to the residual
    ff_out_norm: Array | None = None  # [D], of what the feed-forward adds
    experts: moe.Experts | None = None


class TargetParams(flax.struct.PyTreeNode):
    """All weights of a target. Vectors and routers are float32, the others share one dtype (`dtype`)."""

    embed: Array  # [V, D]
    layers: tuple[Layer, ...]
    final_norm: Array  # [D] float32
    head: Array | None  # [V, D], None when tied: the embedding is the head
    # `TargetConfig.logit_cap`, here as well so that whoever is lent the head takes the cap along.
    logit_cap: float | None = flax.struct.field(pytree_node=False, default=None)
    # How products are laid out; None is `products.default`.
    products: products.Products | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the linear weights, of the operands of products and of the cache."""
        return self.embed.dtype


def init(key: Array, config: TargetConfig, dtype: jnp.dtype = jnp.float32) -> TargetParams:
    """Random weights of a plausible scale, for tests and for timings at real shapes."""
    c = config
    keys = iter(jax.random.split(key, 4 * c.layers + 2))

    def normal(out: int, width: int, key: Array | None = None) -> Array:
        scale = jnp.float32(width**-0.5)
        key = next(keys) if key is None else key
        return (jax.random.normal(key, (out, width), jnp.float32) * scale).astype(dtype)

    def ones(count: int) -> Array:
        return jnp.ones((count,), jnp.float32)

    extra = iter(jax.random.split(jax.random.fold_in(key, 1), 7 * c.layers))

    def small(*shape: int, wanted: bool = True) -> Array | None:
        return jax.random.normal(next(extra), shape, jnp.float32) * 0.1 if wanted else None

    def experts(config: MoeConfig, key: Array) -> moe.Experts:
        e, f = config.experts, config.width
        first, second, third = jax.random.split(key, 3)
        return moe.Experts(
            router=normal(e, c.width, first).astype(jnp.float32),
            gate_up=normal(e * 2 * f, c.width, second).reshape(e, 2 * f, c.width),
            down=normal(e * c.width, f, third).reshape(e, c.width, f),
        )

    def block(i: int) -> Layer:
        sparse = c.moe if c.is_sparse(i) else None
        return Layer(
            attn_norm=ones(c.width),
            qkv=normal((c.heads + 2 * c.kv_heads) * c.head_width, c.width),
            out=normal(c.width, c.heads * c.head_width),
            ff_norm=ones(c.width),
            gate_up=None if sparse else normal(2 * c.ff_width, c.width),
            down=None if sparse else normal(c.width, c.ff_width),
            qkv_bias=small((c.heads + 2 * c.kv_heads) * c.head_width, wanted=c.qkv_bias),
            out_bias=small(c.width, wanted=c.out_bias),
            gate_up_bias=small(2 * c.ff_width, wanted=c.ff_bias and not sparse),
            down_bias=small(c.width, wanted=c.ff_bias and not sparse),
            q_norm=ones(c.head_width) if c.qk_norm else None,
            k_norm=ones(c.head_width) if c.qk_norm else None,
            attn_out_norm=ones(c.width) if c.post_norms else None,
            ff_out_norm=ones(c.width) if c.post_norms else None,
            experts=experts(sparse, jax.random.fold_in(key, 2 + i)) if sparse else None,
        )

    layers = tuple(block(i) for i in range(c.layers))
    embed = normal(c.vocab_size, c.width)
    head = None if c.tied_head else normal(c.vocab_size, c.width)
    return TargetParams(embed=embed, layers=layers, final_norm=ones(c.width), head=head, logit_cap=c.logit_cap)


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
      taps: 0-based blocks whose output residual is returned, ascending; -1 is the embedding.

    Returns:
      `hidden [R, N, D]` float32 after the final norm; `features [R, N, T * D]` float32, taps in
      the order given; `finite [R, N]` bool, False where a key or value of the row was not a number
      (it was written as 0); the cache, whose `length` is unchanged.
    """
    c, form = config, params.products
    kinds = list({c.rope_of(i): None for i in range(c.layers)})
    turns = dict(
        zip(kinds, rope.once(lambda: [rope.angles(r, c.head_width, positions) for r in kinds], positions), strict=True)
    )
    near = attention.windowed(columns, positions, c.window) if c.windowed else columns
    x = embed(params, c, tokens)
    finite = jnp.ones(tokens.shape, bool)
    tapped = [x] if -1 in taps else []
    keys, values = list(cache.keys), list(cache.values)
    for i, layer in enumerate(params.layers):
        h = rms_norm(x, layer.attn_norm, c.norm_eps)
        q, k, v = split_heads(add_bias(linear(h, layer.qkv, form), layer.qkv_bias), c)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, c.norm_eps), rms_norm(k, layer.k_norm, c.norm_eps)
        q, k = (rope.rotate(y, *turns[c.rope_of(i)]) for y in (q, k))
        # A row that is not a number must not poison its neighbours, nor the slot's next user. Judged
        # as the cache will hold it: a finite float32 may still round to an infinity.
        good = jnp.isfinite(rounded(k, params.dtype)) & jnp.isfinite(rounded(v, params.dtype))
        finite &= jnp.all(good, axis=(-1, -2))
        k, v = jnp.where(good, k, 0.0), jnp.where(good, v, 0.0)
        keys[i] = attention.write(keys[i], k, columns)
        values[i] = attention.write(values[i], v, columns)
        seen = near if i in c.windowed else columns
        attended = attention.read(q, keys[i], values[i], seen, scale=c.query_scale, cap=c.score_cap)
        x = x + _normed(add_bias(linear(attended, layer.out, form), layer.out_bias), layer.attn_out_norm, c)
        h = rms_norm(x, layer.ff_norm, c.norm_eps)
        x = x + _normed(_feed_forward(h, layer, c, form), layer.ff_out_norm, c)
        if i in taps:
            tapped.append(x)
    features = jnp.concatenate(tapped, axis=-1) if tapped else jnp.zeros((*tokens.shape, 0), jnp.float32)
    hidden = rms_norm(x, params.final_norm, c.norm_eps)
    return hidden, features, finite, cache.replace(keys=tuple(keys), values=tuple(values))


def logits(params: TargetParams, hidden: Array) -> Array:
    """`hidden [..., D]` to logits `[..., V]`, float32 straight from the accumulator (known-failures DT-7)."""
    head = params.embed if params.head is None else params.head
    return capped(linear(hidden, head, params.products), params.logit_cap)


def embed(params: TargetParams, config: TargetConfig, tokens: Array) -> Array:
    """`tokens [...]` int32 to the residual stream's start, `[..., D]` float32."""
    x = params.embed[tokens].astype(jnp.float32)
    if config.embed_scale == 1.0:
        return x
    # Rounded as the models were trained with it: sqrt(640) is 25.25 in bfloat16.
    return x * jnp.asarray(config.embed_scale, params.dtype).astype(jnp.float32)


def split_heads(qkv: Array, config: TargetConfig) -> tuple[Array, Array, Array]:
    """`[R, N, (H + 2G) hd]` to queries `[R, N, H, hd]`, keys and values `[R, N, G, hd]`."""
    c = config
    heads = qkv.reshape(*qkv.shape[:2], c.heads + 2 * c.kv_heads, c.head_width)
    q, k, v = jnp.split(heads, [c.heads, c.heads + c.kv_heads], axis=2)
    return q, k, v


def _feed_forward(h: Array, layer: Layer, c: TargetConfig, form: products.Products | None) -> Array:
    if layer.experts is not None:
        assert c.moe is not None
        return moe.mix(h, layer.experts, c.moe, c.activation, form)
    assert layer.gate_up is not None and layer.down is not None
    inner = gated(add_bias(linear(h, layer.gate_up, form), layer.gate_up_bias), c.activation)
    return add_bias(linear(inner, layer.down, form), layer.down_bias)


def _normed(x: Array, weight: Array | None, c: TargetConfig) -> Array:
    return x if weight is None else rms_norm(x, weight, c.norm_eps)
