"""A mixture of experts: right against plain NumPy, and a row's bits are its own.

Known failure covered: DT-9, with the two faults that it rules out: products whose shape follows the
routing, and experts that are full.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.target import moe
from jspec.target.config import MoeConfig
from tests.tiny import bits

E, D, F, ROWS = 4, 32, 24, 32
MOE = MoeConfig(experts=E, per_token=2, width=F, normalize=True, layers=(0,))


def weights(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(0, shape[-1] ** -0.5, shape), dtype)  # noqa: E731
    return moe.Experts(router=draw(E, D).astype(jnp.float32), gate_up=draw(E, 2 * F, D), down=draw(E, D, F))


def rows(seed=1, count=ROWS):
    return np.random.default_rng(seed).normal(size=(count, D)).astype(np.float32)


def to_one_expert(w, expert):
    """Rows whose first choice is one expert, whatever their neighbours."""
    away = rows(2)
    return away + 20 * np.asarray(w.router)[expert] / np.linalg.norm(np.asarray(w.router)[expert])


mix = jax.jit(lambda x, w: moe.mix(x, w, MOE, "silu"))


@pytest.mark.parametrize("normalize", [True, False])
def test_equals_numpy(normalize):
    w, x = weights(), rows().astype(np.float64)
    config = dataclasses.replace(MOE, normalize=normalize)
    made = jax.jit(lambda x: moe.mix(x, w, config, "silu"))(rows())
    router, gate_up, down = (np.asarray(a, np.float64) for a in (w.router, w.gate_up, w.down))
    for row in range(ROWS):
        chance = np.exp(router @ x[row])
        chance /= chance.sum()
        best = np.argsort(-chance)[:2]
        share = chance[best] / (chance[best].sum() if normalize else 1.0)
        total = np.zeros(D)
        for s, e in zip(share, best, strict=True):
            gate, up = np.split(gate_up[e] @ x[row], 2)
            total += s * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
        np.testing.assert_allclose(made[row], total, atol=1e-5)


def test_of_equal_experts_the_first_are_chosen():
    share = np.asarray(moe.shares(jnp.ones((1, D)), jnp.zeros((E, D)), MOE))
    np.testing.assert_array_equal(share, [[0.5, 0.5, 0.0, 0.0]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_neighbours_change_no_bit(dtype):
    """known-failures DT-9: alone, in a crowd that wants one expert, and in one that is spread."""
    w, mine = weights(dtype), rows(3, 1)
    seen = []
    for crowd in (np.zeros((ROWS, D), np.float32), to_one_expert(w, 0), to_one_expert(w, 3), rows(4)):
        for place in (0, 17, ROWS - 1):
            x = crowd.copy()
            x[place] = mine
            seen.append(bits(mix(x, w))[place])
    for other in seen[1:]:
        np.testing.assert_array_equal(other, seen[0])


def by_group(x, w, capacity=None):
    """The fault: an expert's rows are gathered, so the product's shape, and what fits, follow the crowd."""
    share, gate_up, down = (np.asarray(a) for a in (moe.shares(jnp.asarray(x), w.router, MOE), w.gate_up, w.down))
    total = np.zeros_like(x)
    for e in range(E):
        sent = np.flatnonzero(share[:, e] > 0)[:capacity]
        gate, up = np.split(x[sent] @ gate_up[e].T, 2, axis=1)
        total[sent] += share[sent, e][:, None] * ((gate / (1 + np.exp(-gate)) * up) @ down[e].T)
    return total


@pytest.mark.parametrize("capacity", [None, 4])
def test_grouping_by_expert_is_noticed(capacity):
    w, mine = weights(), rows(3, 1)
    seen = []
    for crowd in (np.zeros((ROWS, D), np.float32), to_one_expert(w, 0), rows(4), rows(5), rows(6)):
        x = crowd.copy()
        x[ROWS - 1] = mine
        out = by_group(x, w, capacity)[ROWS - 1]
        seen.append(bits(out))
        if capacity is None:
            np.testing.assert_allclose(out, mix(x, w)[ROWS - 1], atol=1e-5)  # right, but not the same bits
    assert any((other != seen[0]).any() for other in seen[1:])


def test_experts_that_nobody_wants_are_not_read():
    w = weights()
    x = to_one_expert(w, 0)
    share = np.asarray(moe.shares(jnp.asarray(x), w.router, MOE))
    idle = int(np.flatnonzero(share.max(axis=0) == 0)[0]) if (share.max(axis=0) == 0).any() else None
    if idle is None:  # give every row the same two choices
        x = np.broadcast_to(x[:1], x.shape).copy()
        share = np.asarray(moe.shares(jnp.asarray(x), w.router, MOE))
        idle = int(np.flatnonzero(share.max(axis=0) == 0)[0])
    poisoned = w.replace(down=w.down.at[idle].set(jnp.nan))
    np.testing.assert_array_equal(bits(mix(x, poisoned)), bits(mix(x, w)))
