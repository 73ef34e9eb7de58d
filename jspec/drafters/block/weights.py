"""Weights of a block drafter: what is trained, and what the target lends."""

from __future__ import annotations

import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.drafters import vocabulary
from jspec.drafters.block.config import BlockConfig
from jspec.target.config import TargetConfig
from jspec.target.model import TargetParams


class BlockLayer(flax.struct.PyTreeNode):
    """One layer, each linear weight `[out, in]`. Vectors are float32."""

    attn_norm: Array  # [D]
    q: Array  # [H * hd, D]
    kv: Array  # [2 G * hd, D], rows: keys, values
    kv_context: Array | None  # the same for context rows; None: they share `kv`
    q_norm: Array  # [hd], before rope
    k_norm: Array  # [hd]
    out: Array  # [D, H * hd]
    ff_norm: Array  # [D]
    gate_up: Array  # [2 F, D], rows: gate, up
    down: Array  # [D, F]


class Markov(flax.struct.PyTreeNode):
    """The head that adds to a row's logits what its predecessor says (drafters.md 4.2)."""

    previous: Array  # W1 [V, r], or [Vd + 1, r] with a shared row
    following: Array  # W2 [Vd, r]
    mix: Array | None  # gated: [r, D + r]; rnn: [3 r, 2 r + D]
    mix_bias: Array | None  # [r] or [3 r] float32


class Confidence(flax.struct.PyTreeNode):
    """The head that estimates whether a draft will be accepted (drafters.md 4.3), and its calibration (4.5)."""

    weight: Array  # [D] or [D + r] float32
    bias: Array  # [] float32
    temperature: Array  # [K] float32, by which the logit of each position is divided


class BlockParams(flax.struct.PyTreeNode):
    """What is trained. Linear weights share one dtype, vectors are float32."""

    fuse: Array | None  # [D, T * D]; None with `mix`
    mix: Array | None  # [layers, T] float32, logits of each layer's mix of taps
    context_norm: Array  # [D]
    layers: tuple[BlockLayer, ...]
    final_norm: Array  # [D]
    markov: Markov | None
    confidence: Confidence | None


class BlockWeights(flax.struct.PyTreeNode):
    """All arrays that drafting reads."""

    params: BlockParams
    embed: Array  # [V, D], the target's
    head: Array  # [Vd, D], the target's rows of the draft vocabulary
    ids: Array | None  # [Vd] int32, the token of each column; None: the column's number
    columns: Array | None  # [V] int32, the column of each token, Vd where there is none; None: the token's number


def init(key: Array, config: BlockConfig, dtype: jnp.dtype = jnp.float32) -> BlockParams:
    """Fresh weights: normal with deviation 0.02, norms 1, and a mix that prefers one tap a layer.

    The mix is 2 at tap `min(T - 1, floor(d T / layers))` of layer d and 0 elsewhere (AngelSlim's rule).
    """
    c = config
    keys = iter(jax.random.split(key, 6 * c.layers + 8))
    taps = len(c.taps)

    def normal(*shape: int) -> Array:
        return (jax.random.normal(next(keys), shape, jnp.float32) * 0.02).astype(dtype)

    def ones(count: int) -> Array:
        return jnp.ones((count,), jnp.float32)

    def layer() -> BlockLayer:
        kv = 2 * c.kv_heads * c.head_width
        return BlockLayer(
            attn_norm=ones(c.width),
            q=normal(c.heads * c.head_width, c.width),
            kv=normal(kv, c.width),
            kv_context=normal(kv, c.width) if c.layerwise else None,
            q_norm=ones(c.head_width),
            k_norm=ones(c.head_width),
            out=normal(c.width, c.heads * c.head_width),
            ff_norm=ones(c.width),
            gate_up=normal(2 * c.ff_width, c.width),
            down=normal(c.width, c.ff_width),
        )

    mix = np.zeros((c.layers, taps), np.float32)
    for d in range(c.layers):
        mix[d, min(taps - 1, d * taps // c.layers)] = 2.0
    markov = None
    if c.markov is not None:
        r = c.rank
        shape = {"vanilla": None, "gated": (r, c.width + r), "rnn": (3 * r, 2 * r + c.width)}[c.markov]
        markov = Markov(
            previous=normal(c.markov_rows, r),
            following=normal(c.head_size, r),
            mix=None if shape is None else normal(*shape),
            mix_bias=None if shape is None else jnp.zeros((shape[0],), jnp.float32),
        )
    confidence = None
    if c.confidence is not None:
        size = c.width + (c.rank if c.confidence == "markov" else 0)
        confidence = Confidence(
            weight=normal(size).astype(jnp.float32),
            bias=jnp.zeros((), jnp.float32),
            temperature=jnp.ones((c.longest,), jnp.float32),
        )
    return BlockParams(
        fuse=None if c.layerwise else normal(c.width, taps * c.width),
        mix=jnp.asarray(mix) if c.layerwise else None,
        context_norm=ones(c.width),
        layers=tuple(layer() for _ in range(c.layers)),
        final_norm=ones(c.width),
        markov=markov,
        confidence=confidence,
    )


def count(params: BlockParams) -> int:
    """Numbers in the trained weights."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def lend(
    config: BlockConfig, params: BlockParams, ids: np.ndarray | None, target: TargetParams, shape: TargetConfig
) -> BlockWeights:
    """Joins a drafter's weights with what the target lends.

    Args:
      ids: `[Vd]`, the token of each column of the draft vocabulary; None if that is the whole vocabulary.
      target, shape: the target's weights and configuration.

    Raises:
      JspecError: a target of another shape, or a vocabulary map that is missing or wrong.
    """
    config.check_target(shape)
    vocabulary.check(ids, config.draft_vocab, config.vocab_size)
    head = target.embed if target.head is None else target.head
    if ids is None:
        return BlockWeights(params=params, embed=target.embed, head=head, ids=None, columns=None)
    return BlockWeights(
        params=params,
        embed=target.embed,
        head=jnp.take(head, jnp.asarray(ids, jnp.int32), axis=0),
        ids=jnp.asarray(ids, jnp.int32),
        columns=jnp.asarray(vocabulary.columns(ids, config.vocab_size)),
    )
