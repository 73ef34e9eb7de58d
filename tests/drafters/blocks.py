"""Tiny untrained block drafters for the target T of `tests/tiny.py`, one of each kind."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.block import weights
from jspec.drafters.block.config import BlockConfig
from jspec.drafters.block.drafter import BlockDrafter
from jspec.target.config import RopeConfig
from jspec.target.features import Features
from tests import tiny

BASE = BlockConfig(
    family="dflash",
    block=8,
    from_anchor=False,
    mask_id=63,
    taps=(-1, 0),
    target_layers=2,
    vocab_size=64,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=8,
    ff_width=48,
    rope=RopeConfig(theta=1e4),
)
PRUNED = np.array([*range(3, 40), 50, 51, 62], np.int32)

KINDS = {
    "dflash": BASE,
    "dflash from anchor": dataclasses.replace(BASE, block=7, from_anchor=True),
    "dflash pruned": dataclasses.replace(BASE, draft_vocab=40),
    "dflash causal window": dataclasses.replace(BASE, window=9, windowed=(1,), causal=(1,)),
    "dflare": dataclasses.replace(BASE, family="dflare", layerwise=True, logit_cap=3.0, logit_scale=0.5),
    "dspark": dataclasses.replace(
        BASE, family="dspark", block=7, from_anchor=True, markov="vanilla", rank=5, confidence="markov"
    ),
    "dspark gated pruned": dataclasses.replace(
        BASE,
        family="dspark",
        block=7,
        from_anchor=True,
        markov="gated",
        rank=5,
        confidence="hidden",
        draft_vocab=40,
        shared_row=True,
        embed_scale=2.0,
    ),
    "dspark rnn infill": dataclasses.replace(BASE, family="dspark", markov="rnn", rank=5, confidence="markov"),
}


def pruned(config):
    return None if config.draft_vocab is None else PRUNED


@functools.cache
def lent(kind, dtype=jnp.float32, seed=0):
    """Weights of a scale at which every part matters, with what T lends."""
    config = KINDS[kind]
    made = jax.jit(lambda: weights.init(jax.random.key(seed), config))()
    rng = np.random.default_rng(seed)

    def spread(x):
        x = np.asarray(x)
        noise = rng.normal(size=x.shape)
        return jnp.asarray(x + noise * (x.shape[-1] ** -0.5 if x.ndim == 2 else 0.2), jnp.float32)

    made = jax.tree.map(spread, made)
    if made.confidence is not None:
        made = made.replace(confidence=made.confidence.replace(temperature=jnp.linspace(0.5, 2.0, config.longest)))
    made = cast(made, dtype)
    return weights.lend(config, made, pruned(config), tiny.params(dtype), tiny.T)


def cast(params, dtype):
    """Linear weights in `dtype`, vectors and the mix of taps in float32."""
    kept = params.mix
    params = jax.tree.map(lambda x: x.astype(dtype) if x.ndim == 2 else x, params)
    return params.replace(mix=kept)


def drafter(kind, proposals=None, **options):
    config = KINDS[kind]
    return BlockDrafter(config=config, proposals=proposals or config.longest, key_block=16, **options)


def engine(slots=3, **changes):
    return tiny.engine(slots, taps=(-1, 0, 1), **changes)


def features(values):
    """What an engine of `engine` shows of some rows."""
    return Features(values=jnp.asarray(values), taps=(-1, 0, 1))
