"""EAGLE-3 against NumPy: batch, context that grows, all accepted lengths, slots used again, planted faults.

Tests 2, 3 and 15 of drafters.md 13. Known failures covered: LD-3, LD-4, DR-4, DR-5, DR-7, DR-10.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.base import Rows
from jspec.drafters.eagle3 import body, weights
from jspec.drafters.eagle3.drafter import EagleDrafter
from jspec.engine import static
from jspec.errors import JspecError
from jspec.target.features import Features
from tests import reference, tiny
from tests.drafters import blocks, eagles
from tests.drafters import eagle_reference as plain
from tests.drafters.rounds import features_of, forced, prefill, prefilled, texts

FORCED = (9, 62)  # in both vocabularies
OFFSETS = blocks.PRUNED - np.arange(40)  # what published files hold as `d2t`


def logits(chosen, lent, held, anchor, position, drafts=FORCED):
    """`[B, K, Vd]` of chains whose drafts are given."""
    found = []

    def choose(k, z):
        found.append(z)
        return jnp.full(anchor.shape, (*drafts, 0)[k], jnp.int32)

    chosen.chain(lent, held, anchor, position, choose)
    return jnp.stack(found, axis=1)


@pytest.mark.parametrize("kind", ["plain", "norm of each tap"])
def test_logits_of_every_round_against_numpy(kind):
    chosen, lent = eagles.drafter(kind), eagles.lent(kind)
    config, c = blocks.engine(3), chosen.config
    requests, whole = texts()
    state = prefilled(config, chosen, lent, requests[:3])
    whole = list(whole)

    @jax.jit
    def look(state):
        at = state.length - 1
        found = chosen.propose(lent, state.drafter, state.anchor, at, state.sampling)
        return logits(chosen, lent, state.drafter, state.anchor, at), found

    def compare(state):
        scores, found = look(state)
        for slot in range(3):
            at = int(state.length[slot]) - 1
            text = whole[slot][: at + 1]
            assert int(state.anchor[slot]) == text[-1]
            assert int(found.count[slot]) == (3 if at else 0)
            if at == 0:  # no state of the target stands before the first token
                continue
            seen = features_of(text)[:-1]
            wanted = plain.chain(lent.params, c, lent, seen, text, FORCED)
            np.testing.assert_allclose(scores[slot], wanted, atol=1e-4)
            # What it drafts by itself: each step reads the draft before, as a target id (DR-5).
            drafts = np.asarray(found.tokens[slot])
            z = plain.chain(lent.params, c, lent, seen, text, drafts[:-1])
            best = np.argmax(z, axis=1)
            np.testing.assert_array_equal(drafts, best if lent.ids is None else np.asarray(lent.ids)[best])
            np.testing.assert_allclose(found.confidence[slot], np.max(reference.softmax(z), axis=1), atol=1e-5)

    accepted = set()
    for turn, right in enumerate([(0, 7, 3), (7, 0, 1), (2, 5, 0), (1, 1, 7)]):
        compare(state)
        block = forced(state, whole[:3], right)
        said, features, finite, cache = static.verify(config, tiny.params(), state.cache, block)
        state, info = static.commit(
            chosen, lent, state.replace(cache=cache), block, jnp.full((3,), 7, jnp.int32), said, features, finite
        )
        accepted |= set(np.asarray(info.accepted).tolist())
        if turn == 2:  # the slot's next user must not see what the last one left
            state = prefill(config, chosen, lent, state, 1, requests[3])
            whole[1] = whole[3]
    compare(state)
    assert {0, 7} <= accepted


def rows(text, start, count, size=16, slot=0, rubbish=0.0):
    """Rows `start .. start + count - 1` of a text, padded with `rubbish`."""
    shown = np.full((1, size, 96), rubbish, np.float32)
    shown[0, :count] = features_of(text, (-1, 0, 1))[start : start + count]
    tokens = np.zeros((1, size), np.int32)
    tokens[0, :count] = text[start : start + count]
    return Rows(
        slot=jnp.int32(slot),
        tokens=jnp.asarray(tokens),
        features=blocks.features(shown),
        start=jnp.asarray([start], jnp.int32),
        count=jnp.asarray([count], jnp.int32),
    )


def fed(chosen, lent, text, sizes, slots=1, slot=0, rubbish=0.0):
    """The state behind the tokens before the anchor, which arrive in pieces of these sizes."""
    held, start = static.init(blocks.engine(slots), chosen, tiny.params(), lent).drafter, 0
    for count in sizes:
        held = static.observe(chosen, lent, held, rows(text, start, count, slot=slot, rubbish=rubbish))
        start += count
    assert start == len(text) - 1
    return held


def text_of(seed=3, length=14):
    return (5, *np.random.default_rng(seed).integers(3, 62, length - 1).tolist())


def error(kind, config=None, lent=None):
    """Largest difference from NumPy of a chain behind a text, compiled afresh: a fault must not find old programs."""
    chosen, honest, text = eagles.drafter(kind), eagles.lent(kind), text_of()
    if config is not None:
        chosen = dataclasses.replace(chosen, config=config)
    given = rows(text, 0, 13)

    @jax.jit
    def run(lent):
        held = chosen.observe(lent, chosen.init(lent, 1, 32), given)
        return logits(chosen, lent, held, jnp.asarray(text[-1:], jnp.int32), jnp.asarray([13], jnp.int32))

    found = run(honest if lent is None else lent)
    wanted = plain.chain(honest.params, eagles.KINDS[kind], honest, features_of(text)[:-1], text, FORCED)
    return np.abs(np.asarray(found[0]) - wanted).max()


def next_taps(monkeypatch):
    known = Features.of
    monkeypatch.setattr(Features, "of", lambda self, taps: known(self, tuple(t + 1 for t in taps)))


def own_state_with_the_token(monkeypatch):
    """Token t beside the state of t, which does not exist yet when t is the anchor."""
    known = body.pair

    def pair(params, config, embedded, state):
        return known(params, config, embedded, jnp.roll(state, -1, axis=1) if state.shape[1] > 1 else state)

    monkeypatch.setattr(body, "pair", pair)


def context_one_position_behind(monkeypatch):
    """Two numberings, each right by itself, in one cache (drafters.md 6.2)."""
    known = EagleDrafter._turn
    monkeypatch.setattr(EagleDrafter, "_turn", lambda self, at: known(self, at - 1 if at.shape[1] == 16 else at))


def one_position_for_all_steps(monkeypatch):
    known = EagleDrafter._turn
    stays = lambda self, at: known(self, at if at.shape[1] == 16 else jnp.broadcast_to(at[:, :1], at.shape))  # noqa: E731
    monkeypatch.setattr(EagleDrafter, "_turn", stays)


def state_of_the_step_before(monkeypatch):
    known, before = body.finish, []

    def finish(params, config, y):
        hidden, state = known(params, config, y)
        before.append(state)
        return hidden, before[max(len(before) - 2, 0)]

    monkeypatch.setattr(body, "finish", finish)


def state_behind_the_norm(monkeypatch):
    known = body.finish
    monkeypatch.setattr(body, "finish", lambda *given: (known(*given)[0],) * 2)


def position_zero_seen(monkeypatch):
    known = EagleDrafter._columns

    def columns(self, slot, start, width, cache):
        made = known(self, slot, start, width, cache)
        return made.replace(visible=made.visible.at[:, :, 0].set(True))

    monkeypatch.setattr(EagleDrafter, "_columns", columns)


FAULTS = [
    next_taps,
    own_state_with_the_token,
    context_one_position_behind,
    one_position_for_all_steps,
    state_of_the_step_before,
    state_behind_the_norm,
    position_zero_seen,
]


@pytest.mark.parametrize("kind", eagles.KINDS)
def test_the_comparison_holds_without_a_fault(kind):
    assert error(kind) < 1e-4


@pytest.mark.parametrize("plant", FAULTS)
def test_planted_faults_are_caught(plant, monkeypatch):
    plant(monkeypatch)
    assert error("plain") > 1e-2


SWITCHES = {
    "whole norm": {"fuse_norm": None},
    "norm of each tap": {"fuse_norm": "whole"},
    "llama": {"norm_residual": False},
    "plain": {"norm_output": True},
}


@pytest.mark.parametrize("kind", SWITCHES)
def test_a_norm_switch_that_is_misread_is_caught(kind):
    # DR-7: the reference follows the switch of the file, the drafter the wrong one.
    lent, wrong = eagles.lent(kind), SWITCHES[kind]
    if "fuse_norm" in wrong and wrong["fuse_norm"] is None:
        lent = lent.replace(params=lent.params.replace(fuse_norm=None))
    assert error(kind, dataclasses.replace(eagles.KINDS[kind], **wrong), lent) > 1e-2


@pytest.mark.parametrize(("kind", "moves"), [("whole norm", False), ("norm of each tap", False), ("plain", True)])
def test_a_norm_of_the_taps_takes_their_scale_away(kind, moves):
    # DR-7: taps times 100.
    text, lent, c = text_of(), eagles.lent(kind), eagles.KINDS[kind]
    shown = jnp.asarray(features_of(text), jnp.float32)
    once, more = (body.fuse(lent.params, c, shown * by) for by in (1.0, 100.0))
    assert (float(jnp.abs(once - more).max()) > 1e-2) == moves


def test_the_context_is_made_of_the_targets_states_alone():
    # DR-10: after three accepted drafts the cache is the one that those tokens' own states make, to the last bit.
    chosen, lent = eagles.drafter("plain"), eagles.lent("plain")
    config = blocks.engine(3)
    requests, whole = texts()
    state = prefilled(config, chosen, lent, requests[:3])
    block = forced(state, whole[:3], (3, 3, 3))
    said, features, finite, cache = static.verify(config, tiny.params(), state.cache, block)
    before = np.asarray(state.drafter.cache.keys[0])
    state, info = static.commit(
        chosen, lent, state.replace(cache=cache), block, jnp.full((3,), 7, jnp.int32), said, features, finite
    )
    assert np.asarray(info.accepted).tolist() == [3, 3, 3]
    for slot in range(3):
        end = int(state.length[slot]) - 1
        text = whole[slot][: end + 1]
        sizes = [16] * (end // 16) + [end % 16] * (end % 16 > 0)
        at_once = fed(chosen, lent, text, sizes)
        kept = np.asarray(state.drafter.cache.keys[0])[slot, :, 1:end]
        np.testing.assert_allclose(kept, at_once.cache.keys[0][0, :, 1:end], atol=1e-5)
        np.testing.assert_allclose(state.drafter.last[slot], at_once.last[0], atol=1e-4)
        assert (before[slot, :, end - 3 : end] != kept[:, -3:]).any()  # the rows of the round are there


def test_how_the_context_arrived_changes_nothing():
    chosen, lent, text = eagles.drafter("pruned"), eagles.lent("pruned"), text_of()
    anchor, at = jnp.asarray([text[-1]], jnp.int32), jnp.asarray([13], jnp.int32)
    look = jax.jit(lambda held: logits(chosen, lent, held, anchor, at))
    wanted = look(fed(chosen, lent, text, (7, 6)))
    for sizes in ((13,), (1,) * 13, (6, 1, 6), (4, 9)):
        np.testing.assert_array_equal(look(fed(chosen, lent, text, sizes)), wanted)


def test_padding_and_batch_mates_change_nothing():
    chosen, lent, text, other = eagles.drafter("plain"), eagles.lent("plain"), text_of(), text_of(4, 9)
    look, found = jax.jit(lambda held, anchor, at: logits(chosen, lent, held, anchor, at)), []
    for mate, rubbish in ((None, 0.0), (other, np.nan)):
        held = fed(chosen, lent, text, (6, 7), slots=3, slot=1, rubbish=rubbish)
        anchor, at = [0, text[-1], 0], [0, 13, 0]
        if mate is not None:
            held = static.observe(chosen, lent, held, rows(mate, 0, 8, slot=2, rubbish=rubbish))
            anchor[2], at[2] = mate[-1], 8
            # Rows of which none counts leave no trace.
            held = static.observe(chosen, lent, held, rows(text, 13, 0, slot=1, rubbish=rubbish))
        at, anchor = jnp.asarray(at, jnp.int32), jnp.asarray(anchor, jnp.int32)
        found.append(np.asarray(look(held, anchor, at)))
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert np.isfinite(found[1]).all() and (found[0][2] != found[1][2]).any()


def test_a_slot_is_emptied():
    chosen, lent = eagles.drafter("plain"), eagles.lent("plain")
    held = fed(chosen, lent, text_of(), (13,), rubbish=np.nan)
    held = jax.jit(chosen.reset)(held, jnp.int32(0))
    assert int(held.cache.length[0]) == 0 and not np.any(held.last)


@pytest.mark.parametrize("short", [1, 3])
def test_fewer_proposals_begin_the_same(short):
    # DR-4: K = 1, the shortest there is.
    lent, config = eagles.lent("pruned"), blocks.engine(3)
    requests, _ = texts()
    long = eagles.drafter("pruned")
    state = prefilled(config, long, lent, requests[:3])
    drafted = [
        np.asarray(static.draft(config, d, lent, state)[0].tokens)[1:, 1 : 1 + short]
        for d in (long, eagles.drafter("pruned", short))
    ]
    np.testing.assert_array_equal(*drafted)


def lend(ids):
    c, given = eagles.KINDS["pruned"], eagles.lent("pruned")
    return weights.lend(c, given.params, ids, tiny.params(), tiny.T)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (OFFSETS, "names a token twice"),  # offsets taken for ids
        (blocks.PRUNED + np.arange(40), "names `"),  # ids taken for offsets
        (None, "no map says which"),  # LD-3
        (blocks.PRUNED[:-1], r"has shape `\(39,\)`"),
        (np.where(blocks.PRUNED == 62, 64, blocks.PRUNED), "names `64`"),  # LD-4
    ],
)
def test_maps_that_cannot_be_are_refused(ids, told):
    with pytest.raises(JspecError, match=told):
        lend(ids)


def test_a_map_read_the_other_way_drafts_other_tokens():
    # Nothing refuses it here: what shows it is what is drafted, and so the first step that reads a draft.
    chosen, lent, text = eagles.drafter("pruned"), eagles.lent("pruned"), text_of()
    wrong = lent.replace(ids=jnp.asarray(OFFSETS, jnp.int32))
    held = fed(chosen, lent, text, (13,))
    sampling = static.init(blocks.engine(1), chosen, tiny.params(), lent).sampling
    anchor, at = jnp.asarray([text[-1]], jnp.int32), jnp.asarray([13], jnp.int32)
    drafts = [
        np.asarray(jax.jit(chosen.propose)(w, held, anchor, at, sampling).tokens[0]).tolist() for w in (lent, wrong)
    ]
    z = plain.chain(lent.params, chosen.config, lent, features_of(text)[:-1], text, drafts[0][:-1])
    assert drafts[0] == blocks.PRUNED[np.argmax(z, axis=1)].tolist()
    z = plain.chain(lent.params, chosen.config, lent, features_of(text)[:-1], text, drafts[1][:-1])
    assert drafts[1] != blocks.PRUNED[np.argmax(z, axis=1)].tolist()
