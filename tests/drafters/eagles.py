"""Tiny untrained EAGLE-3 drafters for the target T of `tests/tiny.py`, one of each kind."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.eagle3 import weights
from jspec.drafters.eagle3.config import EagleConfig
from jspec.drafters.eagle3.drafter import EagleDrafter
from jspec.target.config import RopeConfig
from tests import tiny
from tests.drafters.blocks import PRUNED

BASE = EagleConfig(
    taps=(-1, 0),
    steps=5,
    target_layers=2,
    vocab_size=64,
    width=32,
    heads=4,
    kv_heads=2,
    head_width=8,
    ff_width=48,
    rope=RopeConfig(theta=1e4),
)
KINDS = {
    "plain": BASE,
    "pruned": dataclasses.replace(BASE, draft_vocab=40),
    "target's head": dataclasses.replace(BASE, own_head=False, logit_cap=3.0, logit_scale=0.5),
    "pruned rows of the target's head": dataclasses.replace(BASE, own_head=False, draft_vocab=40, embed_scale=2.0),
    "llama": dataclasses.replace(BASE, qk_norm=False, norm_residual=True),
    "whole norm": dataclasses.replace(BASE, fuse_norm="whole"),
    "norm of each tap": dataclasses.replace(BASE, fuse_norm="each", norm_output=True, draft_vocab=40),
}


def pruned(config):
    return None if config.draft_vocab is None else PRUNED


@functools.cache
def lent(kind, dtype=jnp.float32, seed=0, teacher=False):
    """Weights of a scale at which every part matters, with what T lends."""
    config = KINDS[kind]
    made = jax.jit(lambda: weights.init(jax.random.key(seed), config))()
    rng = np.random.default_rng(seed)

    def spread(x):
        x = np.asarray(x)
        noise = rng.normal(size=x.shape)
        return jnp.asarray(x + noise * (x.shape[-1] ** -0.5 if x.ndim == 2 else 0.2), jnp.float32)

    made = jax.tree.map(lambda x: spread(x).astype(dtype if x.ndim == 2 else jnp.float32), made)
    return weights.lend(config, made, pruned(config), tiny.params(dtype), tiny.T, teacher=teacher)


def drafter(kind, proposals=3, **options):
    return EagleDrafter(config=KINDS[kind], proposals=proposals, key_block=16, **options)
