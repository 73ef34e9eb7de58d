"""Block drafters change no token, draft only what both vocabularies hold, and tell the law they draw from.

Known failures covered: LD-2, DR-1, DR-2, DR-4, DR-5.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import law
from jspec.decoding.generate import generate
from jspec.drafters.block.drafter import BlockDrafter
from jspec.engine import static
from jspec.errors import JspecError
from tests import tiny
from tests.drafters import blocks

LENGTHS = [3, 17, 1, 30, 9]


def requests():
    greedy = tiny.requests(LENGTHS, max_tokens=14, temperature=0.0)
    drawn = tiny.requests(LENGTHS, seed=1, max_tokens=14, temperature=0.8, top_p=0.95)
    return [*greedy[:3], *drawn, *greedy[3:]]


@pytest.fixture(scope="module", params=tiny.DTYPES, ids=["f32", "bf16"])
def plain(request):
    weights = tiny.params(request.param)
    return request.param, tiny.decode(blocks.engine(3), weights, requests())


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_no_token_and_no_committed_bit_differs(plain, kind):
    dtype, wanted = plain
    order = [3, 1, 4, 0, 9, 2, 6, 5, 8, 7]
    found = tiny.decode(
        blocks.engine(3),
        tiny.params(dtype),
        requests(),
        drafter=blocks.drafter(kind),
        lent=blocks.lent(kind, dtype),
        order=order,
    )
    assert tiny.differing(found, wanted) == (0, 0)
    assert sum(t.result.proposed for t in found) > 100


@pytest.mark.parametrize("mode", ["greedy", "coupled", "sampled"])
@pytest.mark.parametrize("kind", ["dflash pruned", "dspark gated pruned"])
def test_a_pruned_vocabulary_drafts_its_own_tokens_only(kind, mode):
    chosen, weights, config = blocks.drafter(kind, mode=mode), blocks.lent(kind), blocks.engine(2)
    state = static.init(config, chosen, tiny.params(), weights)
    sampling = state.sampling.replace(temperature=jnp.full((2,), 0.9, jnp.float32))
    anchor, at = jnp.array([5, 60], jnp.int32), jnp.array([0, 0], jnp.int32)
    found = jax.jit(chosen.propose)(weights, state.drafter, anchor, at, sampling)
    assert np.isin(np.asarray(found.tokens), blocks.PRUNED).all()
    if mode == "sampled":
        q = np.exp(np.asarray(found.log_q))
        assert q.shape == (2, 7, 64)
        outside = np.setdiff1d(np.arange(64), blocks.PRUNED)
        assert (q[:, :, outside] == 0).all()
        np.testing.assert_allclose(q.sum(axis=-1), 1, atol=1e-5)
        assert (np.take_along_axis(q, np.asarray(found.tokens)[..., None], axis=-1) > 0).all()


def test_the_law_is_the_one_of_the_corrected_logits():
    # DR-1, DR-2: q of row k is drawn from, and told, with the Markov head's share in it.
    kind = "dspark"
    chosen, weights, config = blocks.drafter(kind, mode="sampled"), blocks.lent(kind), blocks.engine(1)
    state = static.init(config, chosen, tiny.params(), weights)
    sampling = state.sampling.replace(temperature=jnp.full((1,), 0.7, jnp.float32))
    anchor, at = jnp.array([5], jnp.int32), jnp.array([0], jnp.int32)
    found = jax.jit(chosen.propose)(weights, state.drafter, anchor, at, sampling)
    hidden = jax.jit(chosen.hidden)(weights, state.drafter, anchor, at)
    head = weights.params.markov
    before = np.asarray(head.previous)[[5, *np.asarray(found.tokens)[0, :-1]]]
    z = np.asarray(hidden)[0] @ np.asarray(weights.head).T + before @ np.asarray(head.following).T
    wanted = jax.jit(law.log_law)(jnp.asarray(z, jnp.float32)[None], sampling)
    np.testing.assert_allclose(np.exp(found.log_q), np.exp(wanted), atol=1e-5)
    assert chosen.draws and not blocks.drafter(kind).draws


@pytest.mark.parametrize("kind", ["dflash pruned", "dspark"])
def test_the_classical_rule_takes_drawn_tokens_and_certain_ones(kind):
    for mode in ("sampled", "coupled"):
        results = generate(
            blocks.engine(3),
            tiny.params(),
            requests(),
            drafter=blocks.drafter(kind, mode=mode),
            weights=blocks.lent(kind),
            accept="rejection",
        )
        assert all(r.finish == "length" for r in results)  # not "error": every law could have drawn its token


def test_zero_markov_is_dflash_from_anchor():
    # drafters.md 13.7: with W2 = 0 nothing is added.
    weights = blocks.lent("dspark")
    silent = weights.replace(
        params=weights.params.replace(
            markov=weights.params.markov.replace(following=jnp.zeros_like(weights.params.markov.following))
        )
    )
    bare = weights.replace(params=weights.params.replace(markov=None, confidence=None))
    config, drafts = blocks.engine(2), []
    for kind, lent in (("dspark", silent), ("dflash from anchor", bare)):
        chosen = blocks.drafter(kind)
        state = static.init(config, chosen, tiny.params(), lent)
        state = state.replace(anchor=jnp.array([7, 8], jnp.int32), finish=jnp.zeros((2,), jnp.int32))
        state = state.replace(limit=jnp.full((2,), 30, jnp.int32))
        drafts.append(np.asarray(static.draft(config, chosen, lent, state)[0].tokens))
    np.testing.assert_array_equal(*drafts)


def test_a_threshold_cuts_before_the_first_doubt():
    weights, config = blocks.lent("dspark"), blocks.engine(3)
    whole, cut = blocks.drafter("dspark"), blocks.drafter("dspark", threshold=0.5)
    state = static.init(config, whole, tiny.params(), weights)
    anchor, at = jnp.array([5, 6, 9], jnp.int32), jnp.zeros((3,), jnp.int32)
    a, b = (jax.jit(d.propose)(weights, state.drafter, anchor, at, state.sampling) for d in (whole, cut))
    np.testing.assert_array_equal(a.tokens, b.tokens)
    sure = np.asarray(a.confidence) >= 0.5
    wanted = [next((k for k in range(7) if not row[k]), 7) for row in sure]
    assert np.asarray(b.count).tolist() == wanted and 0 < sum(wanted) < 21
    found = tiny.decode(config, tiny.params(), requests(), drafter=cut, lent=weights)
    assert tiny.differing(found, tiny.decode(config, tiny.params(), requests())) == (0, 0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"proposals": 8}, "asked for `8` proposals"),
        ({"proposals": 0}, "asked for `0` proposals"),
        ({"proposals": True}, "asked for `True` proposals"),
        ({"proposals": 5, "fed": 5}, "`fed` of `dflash` is `5`"),
        ({"proposals": 5, "fed": 9}, "`fed` of `dflash` is `9`"),
        ({"proposals": 5, "mode": "beam"}, "`mode` of the drafter is `'beam'`"),
        ({"proposals": 5, "heat": 0.0}, "`heat` of `dflash` is `0.0`"),
        ({"proposals": 5, "threshold": 1.5}, "`threshold` of `dflash` is `1.5`"),
        ({"proposals": 5, "threshold": 0.5, "mode": "sampled"}, "has no confidence head"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, told):
    # Pitfall 35: wider than the trained block is refused.
    with pytest.raises(JspecError, match=told):
        BlockDrafter(config=blocks.BASE, **options)
