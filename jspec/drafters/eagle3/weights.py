"""Weights of an EAGLE-3 drafter: what is trained, and what the target lends."""

from __future__ import annotations

import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.drafters import vocabulary
from jspec.drafters.eagle3.config import EagleConfig
from jspec.target.config import TargetConfig
from jspec.target.model import TargetParams


class EagleParams(flax.struct.PyTreeNode):
    """What is trained. Linear weights `[out, in]` share one dtype, vectors are float32."""

    fuse_norm: Array | None  # [T * D], of the whole row or of each tap
    fuse: Array  # [D, T * D]
    embed_norm: Array  # [D]
    state_norm: Array  # [D]
    q: Array  # [H * hd, 2 D], columns: token, state
    kv: Array  # [2 G * hd, 2 D], rows: keys, values
    q_norm: Array | None  # [hd], before rope
    k_norm: Array | None  # [hd]
    out: Array  # [D, H * hd]
    ff_norm: Array  # [D]
    gate_up: Array  # [2 F, D], rows: gate, up
    down: Array  # [D, F]
    final_norm: Array  # [D]
    head: Array | None  # [Vd, D]; None: the target's


class EagleWeights(flax.struct.PyTreeNode):
    """All arrays that drafting reads."""

    params: EagleParams
    embed: Array  # [V, D], the target's
    head: Array | None  # [Vd, D], the target's rows of the draft vocabulary; None where nobody asked for them
    ids: Array | None  # [Vd] int32, the token of each column; None: the column's number
    columns: Array | None  # [V] int32, the column of each token, Vd where there is none; None: the token's number


def init(key: Array, config: EagleConfig, dtype: jnp.dtype = jnp.float32) -> EagleParams:
    """Fresh weights: normal with deviation 0.02, norms 1."""
    c = config
    keys = iter(jax.random.split(key, 7))
    taps = len(c.taps) * c.width

    def normal(*shape: int) -> Array:
        return (jax.random.normal(next(keys), shape, jnp.float32) * 0.02).astype(dtype)

    def ones(count: int) -> Array:
        return jnp.ones((count,), jnp.float32)

    return EagleParams(
        fuse_norm=None if c.fuse_norm is None else ones(taps),
        fuse=normal(c.width, taps),
        embed_norm=ones(c.width),
        state_norm=ones(c.width),
        q=normal(c.heads * c.head_width, 2 * c.width),
        kv=normal(2 * c.kv_heads * c.head_width, 2 * c.width),
        q_norm=ones(c.head_width) if c.qk_norm else None,
        k_norm=ones(c.head_width) if c.qk_norm else None,
        out=normal(c.width, c.heads * c.head_width),
        ff_norm=ones(c.width),
        gate_up=normal(2 * c.ff_width, c.width),
        down=normal(c.width, c.ff_width),
        final_norm=ones(c.width),
        head=normal(c.head_size, c.width) if c.own_head else None,
    )


def count(params: EagleParams) -> int:
    """Numbers in the trained weights."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def lend(
    config: EagleConfig,
    params: EagleParams,
    ids: np.ndarray | None,
    target: TargetParams,
    shape: TargetConfig,
    *,
    teacher: bool = False,
) -> EagleWeights:
    """Joins a drafter's weights with what the target lends.

    Args:
      ids: `[Vd]`, the token of each column of the draft vocabulary; None if that is the whole vocabulary.
      target, shape: the target's weights and configuration.
      teacher: whether the target's head is wanted beside the drafter's own, for what the target would say.

    Raises:
      JspecError: a target of another shape, or a vocabulary map that is missing or wrong.
    """
    config.check_target(shape)
    vocabulary.check(ids, config.draft_vocab, config.vocab_size)
    head = None
    if teacher or not config.own_head:
        head = target.embed if target.head is None else target.head
        head = head if ids is None else jnp.take(head, jnp.asarray(ids, jnp.int32), axis=0)
    return EagleWeights(
        params=params,
        embed=target.embed,
        head=head,
        ids=None if ids is None else jnp.asarray(ids, jnp.int32),
        columns=None if ids is None else jnp.asarray(vocabulary.columns(ids, config.vocab_size)),
    )
