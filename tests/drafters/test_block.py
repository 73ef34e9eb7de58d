"""Block drafters against NumPy, in the engine: batch, context that grows, all accepted lengths, slots used again.

Tests 2, 3, 13 of drafters.md 13. Known failures covered: DR-3, DR-4, DR-5, DR-10, DR-11.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.base import Rows
from jspec.drafters.block import body
from jspec.engine import static
from tests import reference, tiny
from tests.drafters import block_reference as plain
from tests.drafters import blocks
from tests.drafters.rounds import features_of, forced, prefill, prefilled, texts


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_logits_of_every_round_against_numpy(kind):
    chosen, weights = blocks.drafter(kind), blocks.lent(kind)
    config, c = blocks.engine(3), chosen.config
    requests, whole = texts()
    state = prefilled(config, chosen, weights, requests[:3])
    whole = list(whole)

    @jax.jit
    def look(state):
        at = state.length - 1
        hidden = chosen.hidden(weights, state.drafter, state.anchor, at)
        found = chosen.propose(weights, state.drafter, state.anchor, at, state.sampling)
        return hidden, body.logits(c, hidden, weights.head), found

    def compare(state):
        hidden, scores, found = look(state)
        for slot in range(3):
            if int(state.finish[slot]):
                continue
            at = int(state.length[slot]) - 1
            text = whole[slot][: at + 1]
            assert int(state.anchor[slot]) == text[-1]
            rows = plain.hidden(weights.params, c, weights.embed, features_of(text)[:-1], text[-1])
            rows = rows[c.first : c.first + chosen.proposals]
            np.testing.assert_allclose(hidden[slot], rows, atol=1e-4)
            np.testing.assert_allclose(scores[slot], plain.logits(c, rows, weights.head), atol=1e-4)
            # The chain of drafts: each sees the one before it, as a target id (DR-5).
            drafts = np.asarray(found.tokens[slot])
            z, sure = plain.corrected(weights.params, c, weights, rows, [text[-1], *drafts[:-1]])
            best = np.argmax(z, axis=1)
            np.testing.assert_array_equal(drafts, best if weights.ids is None else np.asarray(weights.ids)[best])
            if weights.params.confidence is None:
                wanted = np.max(reference.softmax(z), axis=1)
            else:
                wanted = plain.sigmoid(sure / np.asarray(weights.params.confidence.temperature))
            np.testing.assert_allclose(found.confidence[slot], wanted, atol=1e-5)

    accepted = set()
    for turn, right in enumerate([(0, 7, 3), (7, 0, 1), (2, 5, 0), (1, 1, 7)]):
        compare(state)
        block = forced(state, whole[:3], right)
        logits, features, finite, cache = static.verify(config, tiny.params(), state.cache, block)
        state, info = static.commit(
            chosen, weights, state.replace(cache=cache), block, jnp.full((3,), 7, jnp.int32), logits, features, finite
        )
        accepted |= set(np.asarray(info.accepted).tolist())
        if turn == 2:  # the slot's next user must not see what the last one left
            state = prefill(config, chosen, weights, state, 1, requests[3])
            whole[1] = whole[3]
    compare(state)
    assert {0, 7} <= accepted


@pytest.mark.parametrize("kind", ["dflash", "dspark gated pruned"])
@pytest.mark.parametrize("short", [1, 3])
def test_fewer_proposals_read_the_same_block(kind, short):
    # DR-4: K = 1, the shortest there is; the block is computed whole, so the first tokens stay what they are.
    weights, config = blocks.lent(kind), blocks.engine(3)
    requests, _ = texts()
    long = blocks.drafter(kind)
    state = prefilled(config, long, weights, requests[:3])
    drafted = [
        np.asarray(static.draft(config, d, weights, state)[0].tokens)[:, 1 : 1 + short]
        for d in (long, blocks.drafter(kind, short))
    ]
    np.testing.assert_array_equal(*drafted)


def test_a_shorter_block_is_a_block_of_that_many_rows():
    weights, config = blocks.lent("dflash"), blocks.engine(3)
    requests, whole = texts()
    chosen = blocks.drafter("dflash", 3, fed=4)
    state = prefilled(config, chosen, weights, requests[:3])
    hidden = jax.jit(chosen.hidden)(weights, state.drafter, state.anchor, state.length - 1)
    text = whole[1][:13]
    rows = plain.hidden(weights.params, chosen.config, weights.embed, features_of(text)[:-1], text[-1], rows=4)
    np.testing.assert_allclose(hidden[1], rows[1:4], atol=1e-4)


def test_dflare_with_one_tap_and_tied_keys_is_dflash_with_an_identity():
    # drafters.md 13.13: the fusion of DFlash that passes one tap on.
    config, plain_kind = blocks.engine(2), blocks.lent("dflash")
    c = dataclasses.replace(blocks.KINDS["dflare"], logit_cap=None, logit_scale=1.0)
    params = plain_kind.params
    eye = jnp.concatenate([jnp.zeros((32, 32)), jnp.eye(32)], axis=1)
    flash = plain_kind.replace(params=params.replace(fuse=eye))
    layers = tuple(layer.replace(kv_context=layer.kv) for layer in params.layers)
    mix = jnp.tile(jnp.array([[-200.0, 200.0]], jnp.float32), (2, 1))
    flare = plain_kind.replace(params=params.replace(fuse=None, mix=mix, layers=layers))
    requests, _ = texts()
    found = []
    for chosen, weights in (
        (blocks.drafter("dflash"), flash),
        (dataclasses.replace(blocks.drafter("dflare"), config=c), flare),
    ):
        state = prefilled(config, chosen, weights, requests[1:3])
        found.append(np.asarray(jax.jit(chosen.hidden)(weights, state.drafter, state.anchor, state.length - 1)))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_rows_that_are_not_numbers_leave_no_trace():
    # DR-3, DR-11: garbage beyond the count is masked, then written again; a masked NaN would not stay masked.
    chosen, weights = blocks.drafter("dflash"), blocks.lent("dflash")
    config = blocks.engine(2)
    requests, _ = texts()
    clean = prefilled(config, chosen, weights, requests[1:3])
    at = clean.length - 1
    rows = Rows(
        slot=jnp.int32(0),
        tokens=jnp.zeros((2, 8), jnp.int32),
        features=blocks.features(np.full((2, 8, 96), np.nan, np.float32)),
        start=at,
        count=jnp.zeros((2,), jnp.int32),
    )
    look = jax.jit(lambda held: chosen.hidden(weights, held, clean.anchor, at))
    before = np.asarray(look(clean.drafter))
    after = np.asarray(look(static.observe(chosen, weights, clean.drafter, rows)))
    np.testing.assert_array_equal(before, after)
