"""EAGLE-3 changes no token, drafts only what both vocabularies hold, and tells the law it draws from.

Known failures covered: DR-1, DR-2, DR-4, DR-5, LD-2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import law
from jspec.decoding import sampling as samplings
from jspec.decoding.generate import generate
from jspec.drafters.eagle3.drafter import EagleDrafter
from jspec.engine import static
from jspec.errors import JspecError
from tests import tiny
from tests.drafters import blocks, eagles

LENGTHS = [3, 17, 1, 30, 9]


def requests():
    greedy = tiny.requests(LENGTHS, max_tokens=14, temperature=0.0)
    drawn = tiny.requests(LENGTHS, seed=1, max_tokens=14, temperature=0.8, top_p=0.95)
    return [*greedy[:3], *drawn, *greedy[3:]]


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("plain", jnp.float32, {}),
        ("norm of each tap", jnp.bfloat16, {"heat": 0.5}),
        ("pruned rows of the target's head", jnp.float32, {"proposals": 7, "mode": "greedy"}),
        ("pruned", jnp.float32, {"proposals": 1, "mode": "sampled"}),
    ],
)
def test_no_token_and_no_committed_bit_differs(kind, dtype, options):
    order = [3, 1, 4, 0, 9, 2, 6, 5, 8, 7]
    wanted = tiny.decode(blocks.engine(3), tiny.params(dtype), requests())
    found = tiny.decode(
        blocks.engine(3),
        tiny.params(dtype),
        requests(),
        drafter=eagles.drafter(kind, **options),
        lent=eagles.lent(kind, dtype),
        order=order,
    )
    assert tiny.differing(found, wanted) == (0, 0)
    assert sum(t.result.proposed for t in found) > 100


def drafts(kind, mode, temperature):
    """A draft behind two texts of rows that the test made up, with what made it."""
    chosen, lent, config = eagles.drafter(kind, mode=mode), eagles.lent(kind), blocks.engine(2)
    state = static.init(config, chosen, tiny.params(), lent)
    held = state.drafter.replace(last=jax.random.normal(jax.random.key(1), state.drafter.last.shape))
    sampling = state.sampling.replace(temperature=jnp.full((2,), temperature, jnp.float32))
    anchor, at = jnp.array([5, 60], jnp.int32), jnp.array([1, 1], jnp.int32)
    return chosen, lent, held, anchor, at, sampling, jax.jit(chosen.propose)(lent, held, anchor, at, sampling)


def scores_of(chosen, lent, held, anchor, at, drafted):
    """Logits `[2, K, Vd]` of the chain that these drafts made."""

    @jax.jit
    def run(held):
        found = []

        def choose(k, z):
            found.append(z)
            return drafted[:, k]

        chosen.chain(lent, held, anchor, at, choose)
        return jnp.stack(found, axis=1)

    return run(held)


@pytest.mark.parametrize("mode", ["greedy", "coupled", "sampled"])
def test_a_pruned_vocabulary_drafts_its_own_tokens_only(mode):
    chosen, lent, held, anchor, at, sampling, found = drafts("pruned", mode, 0.7)
    assert np.isin(np.asarray(found.tokens), blocks.PRUNED).all()
    assert np.asarray(found.count).tolist() == [3, 3]
    assert chosen.draws == (mode == "sampled") == (found.log_q is not None) == (found.confidence is None)
    if mode != "sampled":
        return
    q = np.exp(np.asarray(found.log_q))
    assert q.shape == (2, 3, 64)
    assert (q[:, :, np.setdiff1d(np.arange(64), blocks.PRUNED)] == 0).all()
    np.testing.assert_allclose(q.sum(axis=-1), 1, atol=1e-5)
    # DR-1, DR-2: the law of each step is that of the chain's own logits, its drafts read as target ids.
    wanted = jax.jit(law.log_law)(scores_of(chosen, lent, held, anchor, at, found.tokens), sampling)
    np.testing.assert_allclose(q[:, :, blocks.PRUNED], np.exp(wanted), atol=1e-5)


def test_coupled_drafts_of_the_target_itself_would_all_be_right():
    # The target's noise, by target id: logits of the drafter and the same logits from the target choose alike.
    chosen, lent, held, anchor, at, sampling, found = drafts("plain", "coupled", 0.9)
    scores = scores_of(chosen, lent, held, anchor, at, found.tokens)
    position = at[:, None] + 1 + jnp.arange(3, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(jax.jit(samplings.choose)(scores, position, sampling), found.tokens)


def test_the_classical_rule_takes_drawn_tokens_and_certain_ones():
    for mode in ("sampled", "coupled"):
        results = generate(
            blocks.engine(3),
            tiny.params(),
            requests(),
            drafter=eagles.drafter("pruned", mode=mode),
            weights=eagles.lent("pruned"),
            accept="rejection",
        )
        assert all(r.finish == "length" for r in results)  # not "error": every law could have drawn its token


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"proposals": 0}, "asked for `0` proposals"),
        ({"proposals": True}, "asked for `True` proposals"),
        ({"proposals": 3, "mode": "beam"}, "`mode` of the drafter is `'beam'`"),
        ({"proposals": 3, "heat": 0.0}, "`heat` of `eagle3` is `0.0`"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, told):
    with pytest.raises(JspecError, match=told):
        EagleDrafter(config=eagles.BASE, **options)
