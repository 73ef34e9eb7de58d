"""The tiny random target T of the known failures, and the engines that the tests share.

Programs are compiled once for each engine and drafter of a process. Tests that use the engines named
here cost no compilation of their own; a test that patches something must use an engine of its own.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decoding.request import Request
from jspec.engine.config import EngineConfig
from jspec.target import model
from jspec.target.config import TargetConfig

T = TargetConfig(
    family="llama",
    vocab_size=64,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=8,
    ff_width=64,
    max_positions=256,
)
DTYPES = [jnp.float32, jnp.bfloat16]


@functools.cache
def params(dtype=jnp.float32, seed: int = 0) -> model.TargetParams:
    """Weights of T, the same in every test."""
    return jax.jit(lambda: model.init(jax.random.key(seed), T, dtype))()


def engine(slots: int = 3, **changes) -> EngineConfig:
    """Blocks of 8 rows, 64 tokens of text; prefill chunks and key blocks of 16 columns are crossed often."""
    return EngineConfig(target=T, slots=slots, **{"rows": 8, "max_length": 64, "chunk": 16, "key_block": 16} | changes)


def prompts(lengths, seed: int = 0, vocab: int = T.vocab_size) -> list[tuple[int, ...]]:
    """Random prompts; the first token of prompt r is r, by which `Scripted` knows them."""
    rng = np.random.default_rng(seed)
    return [(r, *(int(t) for t in rng.integers(0, vocab, n - 1))) for r, n in enumerate(lengths)]


def requests(lengths, seed: int = 0, **settings) -> list[Request]:
    """One request for each prompt length, each with its own seed."""
    return [Request(prompt=p, **{"seed": 100 + r} | settings) for r, p in enumerate(prompts(lengths, seed))]
