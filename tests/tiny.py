"""The tiny random target T of the known failures, and the engines that the tests share.

Programs are compiled once for each engine and drafter of a process. Tests that use the engines named
here cost no compilation of their own; a test that patches something must use an engine of its own.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decoding.generate import generate
from jspec.decoding.request import Request, Result
from jspec.drafters.base import Plain
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
    tied_head=False,  # random embeddings as a head would only say the last token again
)
DTYPES = [jnp.float32, jnp.bfloat16]
NOBODY = Plain()


@functools.cache
def params(dtype=jnp.float32, seed: int = 0) -> model.TargetParams:
    """Weights of T, the same in every test."""
    return jax.jit(lambda: model.init(jax.random.key(seed), T, dtype))()


def engine(slots: int = 3, **changes) -> EngineConfig:
    """Blocks of 8 rows, 64 tokens of text; prefill chunks and key blocks of 16 columns are crossed often."""
    shape = {"rows": 8, "max_length": 64, "chunk": 16, "key_block": 16, "taps": (1,)}
    return EngineConfig(target=T, slots=slots, **shape | changes)


def prompts(lengths, seed: int = 0, vocab: int = T.vocab_size) -> list[tuple[int, ...]]:
    """Random prompts; the first token of prompt r is r, by which `Scripted` knows them."""
    rng = np.random.default_rng(seed)
    return [(r, *(int(t) for t in rng.integers(0, vocab, n - 1))) for r, n in enumerate(lengths)]


def requests(lengths, seed: int = 0, **settings) -> list[Request]:
    """One request for each prompt length, each with its own seed."""
    return [Request(prompt=p, **{"seed": 100 + r} | settings) for r, p in enumerate(prompts(lengths, seed))]


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one request left behind."""

    result: Result
    columns: tuple[np.ndarray, ...]  # keys, then values, of each layer: raw bits of the committed columns

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.result.tokens


def decode(config, weights, requests, *, drafter=None, lent=None, order=None, branching=None) -> list[Trace]:
    """Decodes `requests` in the order `order` and returns their traces in their own order.

    lent: the drafter's weights; what `drafter.weights` returns when left out.
    """
    order = list(range(len(requests))) if order is None else list(order)
    if lent is None and drafter is not None:
        lent = drafter.weights(weights, config.target)
    columns = {}

    def on_finish(state, slot, index):
        held = int(state.length[slot]) - 1
        assert int(state.cache.length[slot]) == held
        columns[index] = tuple(bits(x)[slot, :, :held].copy() for x in (*state.cache.keys, *state.cache.values))

    results = generate(
        config,
        weights,
        [requests[i] for i in order],
        drafter=drafter,
        weights=lent,
        on_finish=on_finish,
        branching=branching,
    )
    traces = {i: Trace(r, columns.get(n, ())) for n, (i, r) in enumerate(zip(order, results, strict=True))}
    return [traces[i] for i in range(len(requests))]


def bits(x) -> np.ndarray:
    """Raw bits of an array, on the host."""
    host = np.asarray(x)
    return host.view({2: np.uint16, 4: np.uint32}[host.dtype.itemsize])


def differing(a: list[Trace], b: list[Trace]) -> tuple[int, int]:
    """Sequences that differ, and numbers of the committed columns that differ in a bit."""
    sequences = sum(x.tokens != y.tokens or x.result.finish != y.result.finish for x, y in zip(a, b, strict=True))
    numbers = 0
    for x, y in zip(a, b, strict=True):
        for m, n in zip(x.columns, y.columns, strict=True):
            shared = min(m.shape[1], n.shape[1])
            numbers += int((m[:, :shared] != n[:, :shared]).sum()) + abs(m.size - n.size)
    return sequences, numbers
