"""Training sees of every block what inference will see: 4, 5 and 7 of drafters.md 13. Known failures: TN-2, TN-3, DR-3.

Texts are packed: a row of 40 tokens holds two of them and three columns of nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import tree
from jspec.drafters.base import Rows
from jspec.target import model
from jspec.target.attention import columns
from jspec.target.cache import empty
from jspec.training import forward, losses, objective, products
from jspec.training.forward import Batch
from jspec.training.objective import Objective
from tests import tiny
from tests.drafters import block_reference as plain
from tests.drafters import blocks

F32 = products.contraction(jnp.float32)
LENGTHS = (22, 15)
S = 40
ANCHORS = (3, 9, 10, 21, 25, 33, -1)


@functools.cache
def texts():
    """Two texts: tokens, taps -1 and 0, hidden states and the sum behind the target's law."""
    rng = np.random.default_rng(5)
    out = []
    for length in LENGTHS:
        tokens = jnp.asarray(rng.integers(3, 62, length), jnp.int32)[None]
        cache = empty(2, 1, 2, 48, 8, jnp.float32)
        bits = jnp.asarray(np.broadcast_to(tree.chain_bits(length), (1, *tree.chain_bits(length).shape)))
        at = columns(jnp.int32(0), jnp.zeros((1,), jnp.int32), bits, 48, 16)
        hidden, taps, _, _ = model.forward(
            tiny.params(), tiny.T, cache, tokens, jnp.arange(length, dtype=jnp.int32)[None], at, taps=(-1, 0)
        )
        lse = jax.nn.logsumexp(model.logits(tiny.params(), hidden), axis=-1)
        out.append([np.asarray(x[0]) for x in (tokens, taps, hidden, lse)])
    return out


def batch(anchors=ANCHORS):
    """One packed row; the first four tokens of each text are the user's."""

    def row(part, fill=0):
        whole = np.concatenate([text[part] for text in texts()])
        return jnp.asarray(np.pad(whole, [(0, S - len(whole))] + [(0, 0)] * (whole.ndim - 1), constant_values=fill))

    position = np.concatenate([*(np.arange(n) for n in LENGTHS), np.zeros(S - sum(LENGTHS), int)])
    document = np.repeat([0, 1, -1], [*LENGTHS, S - sum(LENGTHS)])
    return Batch(
        tokens=row(0)[None],
        document=jnp.asarray(document, jnp.int32)[None],
        position=jnp.asarray(position, jnp.int32)[None],
        learned=jnp.asarray((position >= 4) & (document >= 0))[None],
        anchors=jnp.asarray(anchors, jnp.int32)[None],
        features=row(1)[None],
        hidden=row(2)[None],
        lse=row(3)[None],
    )


@functools.cache
def look(kind):
    """Hidden states and drafts of a kind of drafter, compiled once."""
    config = blocks.KINDS[kind]
    return (
        jax.jit(lambda weights, b: forward.blocks(config, weights, b, F32)),
        jax.jit(lambda weights, b: forward.drafts(config, weights, b, F32)),
    )


def of_anchor(anchor):
    """The text and place of an anchor's column."""
    return (0, anchor) if anchor < LENGTHS[0] else (1, anchor - LENGTHS[0])


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_blocks_are_those_of_inference(kind):
    drafter, weights = blocks.drafter(kind), blocks.lent(kind)
    made = np.asarray(look(kind)[0](weights, batch()))[0]
    observe, hidden = jax.jit(drafter.observe), jax.jit(drafter.hidden)
    for block, anchor in enumerate(ANCHORS[:-1]):
        text, at = of_anchor(anchor)
        tokens, taps, _, _ = texts()[text]
        state = drafter.init(weights, 1, 64)
        seen = np.zeros((1, 24, taps.shape[1]), np.float32)
        seen[0, :at] = taps[:at]
        rows = Rows(
            slot=jnp.int32(0),
            tokens=jnp.zeros((1, 24), jnp.int32),
            features=blocks.features(np.concatenate([seen, np.zeros((1, 24, 32), np.float32)], axis=-1)),
            start=jnp.zeros((1,), jnp.int32),
            count=jnp.asarray([at], jnp.int32),
        )
        state = observe(weights, state, rows)
        wanted = hidden(weights, state, jnp.asarray(tokens[at : at + 1]), jnp.asarray([at], jnp.int32))[0]
        np.testing.assert_allclose(made[block], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_logits_with_the_texts_own_tokens_before_them(kind):
    # 7: what training computes side by side is what drafting computes one after the other; NumPy does the latter.
    config, weights = blocks.KINDS[kind], blocks.lent(kind)
    said = look(kind)[1](weights, batch())
    for block, anchor in enumerate(ANCHORS[:-1]):
        text, at = of_anchor(anchor)
        tokens, taps, _, _ = texts()[text]
        rows = plain.hidden(weights.params, config, weights.embed, taps[:at], tokens[at])
        rows = rows[config.first : config.first + config.longest]
        there = min(config.longest, len(tokens) - at)  # behind the text's end there are no tokens to follow
        z, sure = plain.corrected(weights.params, config, weights, rows[:there], tokens[at : at + there])
        np.testing.assert_allclose(said.logits[0, block, :there], z, atol=1e-4)
        if said.sure is not None:
            np.testing.assert_allclose(said.sure[0, block, :there], sure, atol=1e-4)


def changed(found, wanted):
    return [i for i in range(len(ANCHORS) - 1) if not np.array_equal(np.asarray(found)[0, i], np.asarray(wanted)[0, i])]


@pytest.mark.parametrize("kind", ["dflash", "dflare", "dspark gated pruned"])
def test_nothing_from_the_anchor_on_reaches_its_block(kind):
    weights, b = blocks.lent(kind), batch()
    see = look(kind)[0]
    before = see(weights, b)
    # Everything from column 10 on but the anchors' own tokens: blocks at 3, 9 and 10 must not move.
    kept = np.isin(np.arange(S), ANCHORS)
    tokens = np.where((np.arange(S) < 10) | kept, b.tokens[0], 7)
    features = np.where((np.arange(S) < 10)[:, None], b.features[0], 3.0).astype(np.float32)
    moved = b.replace(tokens=jnp.asarray(tokens, jnp.int32)[None], features=jnp.asarray(features)[None])
    # 25 and 33 stand in the second text, all of which has changed; 21 in the first, whose end has.
    assert changed(see(weights, moved), before) == [3, 4, 5]


def test_another_texts_tokens_reach_no_block():
    weights, b = blocks.lent("dflash"), batch()
    see = look("dflash")[0]
    features = b.features.at[0, : LENGTHS[0]].add(1.0)
    assert changed(see(weights, b.replace(features=features)), see(weights, b)) == [0, 1, 2, 3]


def test_blocks_do_not_see_each_other():
    weights, b = blocks.lent("dflash"), batch()
    see = look("dflash")[0]
    moved = b.replace(anchors=b.anchors.at[0, 1].set(12))
    assert changed(see(weights, moved), see(weights, b)) == [1]


def test_the_order_of_anchors_and_places_without_one_change_nothing():
    weights = blocks.lent("dspark gated pruned")
    config = blocks.KINDS["dspark gated pruned"]

    @jax.jit
    def run(params, b):
        mine = weights.replace(params=params)
        sums = objective.evaluate(config, mine, b, Objective(variation=1.0, confidence=1.0), jnp.float32(4), F32)
        return sums.loss / sums.weight

    loss, slope = jax.value_and_grad(run)(weights.params, batch())
    for anchors in ((-1, 33, 25, 21, 10, 9, 3), (3, 9, 10, 21, 25, 33)):
        other, its = jax.value_and_grad(run)(weights.params, batch(anchors))
        np.testing.assert_allclose(other, loss, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), its, slope)
    nothing = jax.grad(run)(weights.params, batch((-1,) * 7))
    assert all(not np.any(x) for x in jax.tree.leaves(nothing))


def test_labels_by_hand():
    # TN-2: six ids, 3 to 5 written by the target. An anchor at 2, the last prompt token, is the first that can learn.
    config = dataclasses.replace(blocks.KINDS["dflash"], block=4)
    weights = blocks.lent("dflash")
    b = Batch(
        tokens=jnp.asarray([[11, 12, 13, 14, 15, 16]], jnp.int32),
        document=jnp.zeros((1, 6), jnp.int32),
        position=jnp.arange(6, dtype=jnp.int32)[None],
        learned=jnp.asarray([[0, 0, 0, 1, 1, 1]], bool),
        anchors=jnp.asarray([[2, 1, 3, 5]], jnp.int32),
        features=jnp.zeros((1, 6, 64), jnp.float32),
        hidden=jnp.broadcast_to(jnp.arange(6, dtype=jnp.float32)[None, :, None], (1, 6, 32)),
        lse=jnp.zeros((1, 6), jnp.float32),
    )
    made = forward.labels(config, weights, b, F32)
    np.testing.assert_array_equal(made.columns[0], [[14, 15, 16], [0, 0, 0], [15, 16, 0], [0, 0, 0]])
    np.testing.assert_array_equal(made.counted[0], [[1, 1, 1], [0, 0, 0], [1, 1, 0], [0, 0, 0]])
    # A mask that is read where the row stands, not where its label does, would say this instead.
    late = forward.labels(config, weights, b.replace(learned=jnp.roll(b.learned, 1, axis=1)), F32)
    np.testing.assert_array_equal(late.counted[0], [[0, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]])
    # The state behind the token before the label: 2, 3, 4 for the anchor at 2.
    alone = np.asarray(weights.head).sum(axis=1)
    np.testing.assert_allclose(made.log_p[0, 0], np.outer([2, 3, 4], alone), rtol=1e-5, atol=1e-5)


def test_a_label_outside_the_draft_vocabulary_ends_the_block():
    config, weights = blocks.KINDS["dflash pruned"], blocks.lent("dflash pruned")
    b = batch()
    b = b.replace(tokens=b.tokens.at[0, 7].set(60).at[0, jnp.asarray([4, 5, 6, 8, 9])].set(20))  # 60 is not in it
    made = forward.labels(config, weights, b, F32)
    np.testing.assert_array_equal(made.counted[0, 0], [1, 1, 1, 0, 0, 0, 0])
    assert int(weights.ids[made.columns[0, 0, 0]]) == 20


def test_the_targets_law_is_whole():
    weights = blocks.lent("dflash")
    made = forward.labels(blocks.KINDS["dflash"], weights, batch(), F32)
    total = np.exp(np.asarray(made.log_p)).sum(axis=-1)
    np.testing.assert_allclose(total[np.asarray(made.counted)], 1.0, rtol=1e-5)


@pytest.mark.parametrize("fault", ["anchor seen", "another text"])
def test_planted_faults_are_caught(fault, monkeypatch):
    weights, config, b = blocks.lent("dflash"), blocks.KINDS["dflash"], batch()
    honest = look("dflash")[0](weights, b)
    known = forward._visible

    def seen(config, batch, anchors, positions, near):
        if fault == "anchor seen":
            return known(config, batch, anchors + 1, positions, near)
        return known(config, batch.replace(document=jnp.zeros_like(batch.document)), anchors, positions, near)

    monkeypatch.setattr(forward, "_visible", seen)
    assert changed(forward.blocks(config, weights, b, F32), honest)


KINDS_OF_LOSS = {
    "entropy": Objective(),
    "variation": Objective(entropy=0.0, variation=1.0),
    "divergence": Objective(entropy=0.0, divergence=1.0),
    "confidence": Objective(entropy=1e-6, confidence=1.0),
    "path": Objective(weighting="path"),
}


@pytest.mark.parametrize("name", KINDS_OF_LOSS)
def test_gradients_against_finite_differences(name):
    """Along random directions of all parameters at once. What no gradient may pass through is held still."""
    kind = "dspark gated pruned"
    config, weights, b = blocks.KINDS[kind], blocks.lent(kind), batch()

    @jax.jit
    def loss(params, held):
        stop = jax.lax.stop_gradient
        with pytest.MonkeyPatch.context() as patch:
            # Held at `held`, as the gradient sees it: labels of the confidence head, weights along the path.
            said = forward.drafts(config, weights.replace(params=held), b, F32)
            wanted = forward.labels(config, weights, b, F32)
            kept = losses.overlap(said.logits, wanted.log_p)
            known, paths = losses.confidence_error, losses.path_weights
            entropy = objective.optax.losses.softmax_cross_entropy_with_integer_labels(said.logits, wanted.columns)
            patch.setattr(losses, "confidence_error", lambda logit, _: known(logit, stop(kept)))
            patch.setattr(losses, "path_weights", lambda _, counted: paths(entropy, counted))
            sums = objective.evaluate(
                config, weights.replace(params=params), b, KINDS_OF_LOSS[name], jnp.float32(4), F32
            )
        return sums.loss / sums.weight

    slope = jax.jit(jax.grad(loss))(weights.params, weights.params)
    rng = np.random.default_rng(0)
    step = 3e-3

    def size(tree):
        return np.sqrt(sum(float(jnp.sum(x * x)) for x in jax.tree.leaves(tree)))

    def moved(way, by):
        return jax.tree.map(lambda x, w: x + by / size(way) * w, weights.params, way)

    for _ in range(3):
        way = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), weights.params)
        wanted = sum(float(jnp.sum(a * b)) for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(way), strict=True))
        ends = [float(loss(moved(way, by), weights.params)) for by in (step, -step)]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(wanted / size(way), rel=2e-2, abs=2e-4)


def test_products_in_bfloat16_have_float32_gradients():
    a = jax.random.normal(jax.random.key(0), (3, 5, 8))
    b = jax.random.normal(jax.random.key(1), (3, 6, 8))
    contract = products.contraction(jnp.bfloat16)
    out, back = jax.vjp(contract, a, b)
    da, db = back(jnp.ones_like(out))
    assert out.dtype == da.dtype == db.dtype == jnp.float32
    exact = jnp.einsum("xmk,xnk->xmn", a, b)
    np.testing.assert_allclose(out, exact, atol=0.1)
    np.testing.assert_allclose(da, jnp.broadcast_to(b.sum(1, keepdims=True), a.shape), atol=0.1)
    # Not rounded to bfloat16 itself, which small updates would not survive.
    assert np.any(np.asarray(db) != np.asarray(db.astype(jnp.bfloat16).astype(jnp.float32)))
