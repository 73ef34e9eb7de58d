"""A drafter that has learned a task drafts it, under its own convention of slots and under no other.

The target walks along a cycle of all its tokens, so every right draft follows from the anchor alone. Known failures:
DR-1 (slots shifted by one).
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspec.decoding.generate import generate
from jspec.decoding.request import Request
from jspec.drafters.block import weights
from jspec.drafters.block.config import BlockConfig
from jspec.drafters.block.drafter import BlockDrafter
from jspec.engine.config import EngineConfig
from jspec.training import objective, packing, products
from jspec.training.features import Online
from jspec.training.objective import Objective
from jspec.training.packing import Shape
from jspec.training.texts import Text
from tests import tables

V, K = 16, 3
CYCLE = np.random.default_rng(4).permutation(V - 1)  # the last token is the mask
TABLE = tables.successors({int(a): int(b) for a, b in zip(CYCLE, np.roll(CYCLE, -1), strict=True)}, V)
TARGET, CONFIG = tables.params(TABLE), tables.config(V)
GOAL = Objective(entropy=1.0, gamma=100.0)


def kind(from_anchor):
    return BlockConfig(
        family="dflash",
        block=K if from_anchor else K + 1,
        from_anchor=from_anchor,
        mask_id=V - 1,
        taps=(-1,),
        target_layers=1,
        vocab_size=V,
        width=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_width=8,
        ff_width=32,
        rope=CONFIG.rope,
    )


def texts():
    out = []
    for start in range(V - 1):
        tokens = np.roll(CYCLE, -start)[np.arange(20) % (V - 1)].astype(np.int32)
        out.append(Text(id=str(start), kind="chat", tokens=tokens, answers=((2, 20),)))
    return out


def learned(config, steps=200):
    """Plain optax over one batch that holds every text."""
    lent = weights.lend(config, weights.init(jax.random.key(1), config), None, TARGET, CONFIG)
    mine, shape = texts(), Shape(rows=V - 1, length=20, anchors=16)
    target = types.SimpleNamespace(config=CONFIG, params=TARGET, fingerprint="cycle", name="cycle")
    look = Online(target, config.taps, mine, rows=V - 1, length=20)
    rows = [[pair] for pair in zip(mine, look(range(len(mine))), strict=True)]
    anchors = np.full((V - 1, 16), -1, np.int32)
    for row, text in zip(anchors, mine, strict=True):
        places = packing.candidates(text.loss_mask)[:16]
        row[: len(places)] = places
    batch = packing.assemble(rows, shape, None).replace(anchors=jnp.asarray(anchors))
    contract = products.contraction(jnp.dtype(jnp.float32))
    transform = optax.adam(2e-2)

    def loss(params):
        sums = objective.evaluate(config, lent.replace(params=params), batch, GOAL, jnp.float32(GOAL.gamma), contract)
        return sums.loss / sums.weight

    @jax.jit
    def step(params, moments):
        slope = jax.grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax counts its steps in int32
            change, moments = transform.update(slope, moments, params)
        return optax.apply_updates(params, change), moments

    params, moments = lent.params, transform.init(lent.params)
    for _ in range(steps):
        params, moments = step(params, moments)
    return lent.replace(params=params)


def accepted(config, lent):
    """Share of the drafts that are accepted."""
    engine = EngineConfig(target=CONFIG, slots=4, rows=K + 1, max_length=40, chunk=8, key_block=8, taps=config.taps)
    drafter = BlockDrafter(config=config, proposals=K, mode="greedy", key_block=8)
    asked = [Request(prompt=tuple(t.tokens[:3].tolist()), max_tokens=17, temperature=0.0) for t in texts()]
    results = generate(engine, TARGET, asked, drafter=drafter, weights=lent)
    for text, result in zip(texts(), results, strict=True):
        assert result.tokens == tuple(text.tokens[3:].tolist())
    return sum(r.accepted for r in results) / sum(r.proposed for r in results)


@pytest.mark.parametrize("from_anchor", [False, True], ids=["infill", "from anchor"])
def test_the_task_is_drafted_under_its_own_convention_alone(from_anchor):
    config = kind(from_anchor)
    lent = learned(config)
    assert accepted(config, lent) > 0.9
    # The same weights read as the other convention has it: every row is taken for its neighbour's.
    assert accepted(kind(not from_anchor), lent) < 0.1
