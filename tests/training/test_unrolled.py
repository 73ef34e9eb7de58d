"""Training unrolls EAGLE-3 as drafting runs it: 15 and 4 of drafters.md 13. Known failures: TN-2, TN-3."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.base import Rows
from jspec.drafters.eagle3 import body
from jspec.training import forward, losses, objective, products, students, unrolled
from jspec.training.forward import Batch
from jspec.training.objective import Objective
from tests import reference, tiny
from tests.drafters import blocks, eagles
from tests.drafters import eagle_reference as plain
from tests.drafters.rounds import features_of

F32 = products.contraction(jnp.float32)
STEPS = 3
LENGTHS = (22, 15)
S = 40
ANCHORS = (3, 9, 10, 21, 25, 33, -1)
KINDS = {kind: dataclasses.replace(config, steps=STEPS) for kind, config in eagles.KINDS.items()}
OURS = Objective(entropy=0.0, divergence=1.0, gamma=4.48, per_text=True)


@functools.cache
def texts():
    """Two texts: tokens, taps -1 and 0, hidden states and the sum behind the target's law."""
    rng, out = np.random.default_rng(5), []
    for length in LENGTHS:
        tokens = rng.integers(3, 62, length).astype(np.int32)
        made = reference.forward(tiny.params(), tiny.T, tokens)
        norm = np.asarray(tiny.params().final_norm, np.float64)
        hidden = reference.rms_norm(made["residuals"][-1], norm, tiny.T.norm_eps)
        lse = np.log(np.exp(made["logits"]).sum(axis=-1))
        out.append([tokens, *(x.astype(np.float32) for x in (features_of(tokens), hidden, lse))])
    return out


def batch(anchors=ANCHORS):
    """One packed row of 40 tokens, three of them nothing; the first four of each text are the user's."""

    def row(part):
        whole = np.concatenate([text[part] for text in texts()])
        return jnp.asarray(np.pad(whole, [(0, S - len(whole))] + [(0, 0)] * (whole.ndim - 1)))[None]

    position = np.concatenate([*(np.arange(n) for n in LENGTHS), np.zeros(S - sum(LENGTHS), int)])
    document = np.repeat([0, 1, -1], [*LENGTHS, S - sum(LENGTHS)])
    return Batch(
        tokens=row(0),
        document=jnp.asarray(document, jnp.int32)[None],
        position=jnp.asarray(position, jnp.int32)[None],
        learned=jnp.asarray((position >= 4) & (document >= 0))[None],
        anchors=jnp.asarray(anchors, jnp.int32)[None],
        features=row(1),
        hidden=row(2),
        lse=row(3),
    )


def of_anchor(anchor):
    """The text and place of an anchor's column."""
    return (0, anchor) if anchor < LENGTHS[0] else (1, anchor - LENGTHS[0])


def changed(found, wanted):
    return np.flatnonzero(np.any(np.asarray(found != wanted)[0, : len(ANCHORS) - 1], axis=(1, 2))).tolist()


@functools.cache
def look(kind):
    """What a kind of drafter says, compiled once."""
    return jax.jit(lambda weights, b: students.drafts(KINDS[kind], weights, b, F32).logits)


def read(text, anchor):
    """The tokens that steps 1, 2, ... of a chain read; 0 behind the text's end, where nothing counts."""
    return [*text[anchor + 1 : anchor + STEPS], 0, 0][: STEPS - 1]


@pytest.mark.parametrize("kind", ["plain", "norm of each tap"])
def test_steps_against_numpy(kind):
    weights = eagles.lent(kind)
    said = np.asarray(look(kind)(weights, batch()))[0]
    for chain, anchor in enumerate(ANCHORS[:-1]):
        text, at = of_anchor(anchor)
        tokens, taps, _, _ = texts()[text]
        wanted = plain.chain(weights.params, KINDS[kind], weights, taps[:at], tokens[: at + 1], read(tokens, at))
        there = min(STEPS, len(tokens) - at)
        np.testing.assert_allclose(said[chain, :there], wanted[:there], atol=1e-4)


def test_steps_are_those_of_drafting():
    # TN-3: step s of training and step s of the drafter, fed the same tokens.
    drafter, weights = eagles.drafter("plain", STEPS), eagles.lent("plain")
    said = np.asarray(look("plain")(weights, batch()))[0]

    @jax.jit
    def drafted(rows, anchor, position, following):
        state = drafter.observe(weights, drafter.init(weights, 1, 48), rows)
        found = []

        def choose(k, z):
            found.append(z)
            return following[k : k + 1]

        drafter.chain(weights, state, anchor, position, choose)
        return jnp.concatenate(found)

    for chain, anchor in enumerate(ANCHORS[:-1]):
        text, at = of_anchor(anchor)
        tokens, taps, _, _ = texts()[text]
        shown, ahead = np.zeros((1, 24, 96), np.float32), np.zeros((1, 24), np.int32)
        shown[0, :at, :64], ahead[0, :at] = taps[:at], tokens[:at]
        rows = Rows(
            slot=jnp.int32(0),
            tokens=jnp.asarray(ahead),
            features=blocks.features(shown),
            start=jnp.zeros((1,), jnp.int32),
            count=jnp.asarray([at], jnp.int32),
        )
        following = jnp.asarray([*read(tokens, at), 0], jnp.int32)
        wanted = drafted(rows, jnp.asarray(tokens[at : at + 1]), jnp.asarray([at], jnp.int32), following)
        there = min(STEPS, len(tokens) - at)
        np.testing.assert_allclose(said[chain, :there], wanted[:there], atol=1e-5)


def test_no_state_from_the_anchor_on_reaches_its_chain():
    weights, b = eagles.lent("plain"), batch()
    see = look("plain")
    before = see(weights, b)
    far = np.arange(S) >= 10
    moved = b.replace(features=jnp.where(jnp.asarray(far)[None, :, None], 3.0, b.features))
    assert changed(see(weights, moved), before) == [3, 4, 5]  # not those at 3, 9 and 10
    moved = b.replace(tokens=jnp.where(jnp.asarray(np.arange(S) >= 10 + STEPS)[None], 7, b.tokens))
    assert changed(see(weights, moved), before) == [3, 4, 5]
    # Another text, and other chains.
    moved = b.replace(features=b.features.at[0, : LENGTHS[0]].add(1.0))
    assert changed(see(weights, moved), before) == [0, 1, 2, 3]
    assert changed(see(weights, b.replace(anchors=b.anchors.at[0, 1].set(12))), before) == [1]


def anchor_seen(monkeypatch):
    known = unrolled._visible
    monkeypatch.setattr(unrolled, "_visible", lambda b, anchors: known(b, anchors + 1))


def another_text_seen(monkeypatch):
    known = unrolled._visible
    monkeypatch.setattr(
        unrolled, "_visible", lambda b, anchors: known(b.replace(document=jnp.zeros_like(b.document)), anchors)
    )


def first_column_seen(monkeypatch):
    known = unrolled._visible
    monkeypatch.setattr(unrolled, "_visible", lambda b, anchors: known(b.replace(position=b.position + 1), anchors))


def state_never_moves(monkeypatch):
    """Each step reads the state that the first one read: what drafting never sees."""
    known, first = body.layer, []

    def layer(params, config, embedded, state, *rest):
        first.append(state)
        return known(params, config, embedded, first[0], *rest)

    monkeypatch.setattr(body, "layer", layer)


@pytest.mark.parametrize("plant", [anchor_seen, another_text_seen, first_column_seen, state_never_moves])
def test_planted_faults_are_caught(plant, monkeypatch):
    weights, b = eagles.lent("plain"), batch()
    honest = look("plain")(weights, b)
    plant(monkeypatch)
    found = jax.jit(lambda: unrolled.drafts(KINDS["plain"], weights, b, F32).logits)()
    assert np.abs(np.asarray(found - honest)[0, :-1]).max() > 1e-2


def taught():
    return eagles.lent("norm of each tap", teacher=True)


@functools.cache
def loss():
    """The objective of EAGLE-3 and its gradient, compiled once a shape."""

    def run(params, b):
        weights = taught().replace(params=params)
        sums = objective.evaluate(KINDS["norm of each tap"], weights, b, OURS, jnp.float32(OURS.gamma), F32)
        return sums.loss / sums.weight

    return jax.jit(jax.value_and_grad(run))


def test_an_anchor_without_a_token_before_it_teaches_nothing():
    config, weights = KINDS["norm of each tap"], taught()
    b = batch((0, 22, 4, 26, -1, -1, -1))
    b = b.replace(learned=jnp.ones_like(b.learned), tokens=jnp.full_like(b.tokens, 20))
    made = forward.labels(config, weights, b, F32)
    assert np.asarray(made.counted[0, :, 0]).tolist() == [False, False, True, True, False, False, False]


def test_gradients_against_finite_differences():
    params, b = taught().params, batch()
    _, slope = loss()(params, b)
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(slope))  # every weight learns
    rng = np.random.default_rng(0)
    for _ in range(2):
        way = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
        size = np.sqrt(sum(float(jnp.sum(x * x)) for x in jax.tree.leaves(way)))
        wanted = sum(float(jnp.sum(a * b)) for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(way), strict=True))
        ends = [loss()(jax.tree.map(lambda x, w: x + w * by, params, way), b)[0] for by in (3e-3 / size, -3e-3 / size)]  # noqa: B023
        assert float(ends[0] - ends[1]) / 6e-3 == pytest.approx(wanted / size, rel=2e-2, abs=2e-4)


def test_texts_count_alike_whatever_their_length():
    # Pitfall 44: a packed row's loss is the mean of its texts' own, each over its own length.
    share, count = losses.text_shares(jnp.asarray([[0, 0, 0, 1, -1], [0, 0, 0, 0, 0]]), jnp.asarray([[0, 3], [4, 1]]))
    np.testing.assert_allclose(share, [[1 / 3, 1], [1 / 5, 1 / 5]], rtol=1e-6)
    assert float(count) == 3
    params, b = taught().params, batch()
    both, _ = loss()(params, b)
    first = b.replace(document=jnp.where(b.document == 1, -1, b.document))
    second = b.replace(document=jnp.where(b.document == 1, 0, -1))
    alone = [
        loss()(params, one.replace(anchors=jnp.where((b.anchors < LENGTHS[0]) == here, b.anchors, -1)))[0]
        for one, here in ((first, True), (second, False))
    ]
    np.testing.assert_allclose(both, (alone[0] + alone[1]) / 2, rtol=1e-5)
