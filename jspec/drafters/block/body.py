"""The body that DFlash, DFlare and DSpark share, as pure functions.

Tapped residuals of the target become keys and values of every layer and nothing else: context rows
have no queries, no feed-forward and no residual stream (drafters.md 3.1). Block rows, the anchor and masks
behind it, run through the layers, see the whole context and each other.

The same functions serve inference and training; they differ in where keys come from (`attend`) and in
how products are computed (`linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.block.config import BlockConfig
from jspec.drafters.block.weights import BlockLayer, BlockParams
from jspec.target import primitives, rope
from jspec.target.primitives import gated, rms_norm

Linear = Callable[[Array, Array], Array]  # x [..., in] and weight [out, in] to [..., out], float32
Attend = Callable[[int, Array, Array, Array], Array]  # layer, q, k, v of the block to [..., H * hd]
Turn = tuple[Array, Array]  # cosine and sine


class Ends(Protocol):
    """What a target does at its two ends besides the product."""

    @property
    def embed_scale(self) -> float: ...
    @property
    def logit_scale(self) -> float: ...
    @property
    def logit_cap(self) -> float | None: ...


def context(
    params: BlockParams, config: BlockConfig, features: Array, turn: Turn, linear: Linear = primitives.linear
) -> list[tuple[Array, Array]]:
    """Keys and values of context rows for each layer.

    Args:
      features: `[..., T * D]` float32, the drafter's own taps.
      turn: of the rows' positions, from `rope.angles`.

    Returns:
      for each layer `k` and `v`, `[..., G, hd]` float32; keys normed and turned.
    """
    shared = None
    if params.fuse is not None:
        shared = rms_norm(linear(features, params.fuse), params.context_norm, config.norm_eps)
    out = []
    for number, layer in enumerate(params.layers):
        rows = _mixed(params, config, features, number) if shared is None else shared
        weight = layer.kv if layer.kv_context is None else layer.kv_context
        k, v = _keys_values(linear(rows, weight), layer, config)
        out.append((rope.rotate(k, *turn), v))
    return out


def _mixed(params: BlockParams, config: BlockConfig, features: Array, number: int) -> Array:
    """DFlare's fusion: each layer weighs the taps (drafters.md 5.1)."""
    assert params.mix is not None
    share = jax.nn.softmax(params.mix[number])
    taps = features.reshape(*features.shape[:-1], len(config.taps), config.width)
    mixed = jnp.sum(taps * share.reshape((1,) * (features.ndim - 1) + (-1, 1)), axis=-2)
    return rms_norm(mixed, params.context_norm, config.norm_eps)


def rows(
    params: BlockParams,
    config: BlockConfig,
    x: Array,
    turn: Turn,
    attend: Attend,
    linear: Linear = primitives.linear,
) -> Array:
    """Runs block rows through the layers.

    Args:
      x: `[..., D]` float32, embeddings of anchor and masks.
      turn: of the rows' positions.
      attend: attention of one layer, whose keys and values of the block it is given.

    Returns:
      `[..., D]` float32 after the final norm.
    """
    c = config
    for number, layer in enumerate(params.layers):
        h = rms_norm(x, layer.attn_norm, c.norm_eps)
        q = linear(h, layer.q).reshape(*h.shape[:-1], c.heads, c.head_width)
        q = rope.rotate(rms_norm(q, layer.q_norm, c.norm_eps), *turn)
        k, v = _keys_values(linear(h, layer.kv), layer, c)
        x = x + linear(attend(number, q, rope.rotate(k, *turn), v), layer.out)
        h = rms_norm(x, layer.ff_norm, c.norm_eps)
        x = x + linear(gated(linear(h, layer.gate_up), "silu"), layer.down)
    return rms_norm(x, params.final_norm, c.norm_eps)


def logits(config: Ends, hidden: Array, head: Array, linear: Linear = primitives.linear) -> Array:
    """`hidden [..., D]` to logits over the draft vocabulary, `[..., Vd]` float32."""
    z = linear(hidden, head)
    if config.logit_scale != 1.0:
        z = z * jnp.float32(config.logit_scale)
    return primitives.capped(z, config.logit_cap)


def embed(config: Ends, table: Array, tokens: Array) -> Array:
    """Rows of the target's embedding, `[..., D]` float32."""
    x = table[tokens].astype(jnp.float32)
    return x if config.embed_scale == 1.0 else x * jnp.float32(config.embed_scale)


def _keys_values(kv: Array, layer: BlockLayer, c: BlockConfig) -> tuple[Array, Array]:
    k, v = jnp.split(kv.reshape(*kv.shape[:-1], 2 * c.kv_heads, c.head_width), 2, axis=-2)
    return rms_norm(k, layer.k_norm, c.norm_eps), v
