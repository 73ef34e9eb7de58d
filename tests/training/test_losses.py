"""Losses against values worked out by hand, and their limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.training import losses

Q = jnp.log(jnp.asarray([[0.5, 0.25, 0.25]], jnp.float32))
P = jnp.log(jnp.asarray([[0.2, 0.2, 0.5]], jnp.float32))  # 0.1 of the target lies outside the drafter's ids


def test_terms_by_hand() -> None:
    np.testing.assert_allclose(losses.overlap(Q, P), [0.2 + 0.2 + 0.25], rtol=1e-6)
    l1 = abs(0.5 - 0.2) + abs(0.25 - 0.2) + abs(0.25 - 0.5) + 0.1
    np.testing.assert_allclose(losses.total_variation(Q, P), [l1 / 2], rtol=1e-6)
    scaled = np.asarray([2, 2, 5]) / 9
    by_hand = np.sum(scaled * np.log(scaled / np.asarray([0.5, 0.25, 0.25])))
    np.testing.assert_allclose(losses.divergence(Q, P), [by_hand], rtol=1e-5)


def test_equal_and_disjoint_distributions_are_the_extremes() -> None:
    np.testing.assert_allclose(losses.overlap(Q, Q), [1.0], rtol=1e-6)
    np.testing.assert_allclose(losses.divergence(Q, Q), [0.0], atol=1e-6)
    apart = jnp.asarray([[0.0, -1e9, -1e9]], jnp.float32), jnp.asarray([[-jnp.inf, 0.0, -jnp.inf]], jnp.float32)
    np.testing.assert_array_equal(losses.overlap(*apart), [0.0])
    assert np.isfinite(losses.divergence(Q, apart[1])).all(), "an id the target never takes"


@pytest.mark.parametrize("shift", [0.0, 3.0, -50.0])
def test_a_constant_added_to_logits_changes_nothing(shift: float) -> None:
    moved = Q + jnp.float32(shift)
    np.testing.assert_allclose(losses.overlap(moved, P), losses.overlap(Q, P), rtol=1e-5)
    np.testing.assert_allclose(losses.divergence(moved, P), losses.divergence(Q, P), rtol=1e-4)


def test_confidence_is_best_at_its_label_and_sends_it_no_gradient() -> None:
    kept = jnp.asarray([0.3, 0.9], jnp.float32)
    at_label = jnp.log(kept / (1 - kept))

    def total(logit: jax.Array, kept: jax.Array) -> jax.Array:
        return jnp.sum(losses.confidence_error(logit, kept))

    to_logit, to_label = jax.grad(total, argnums=(0, 1))(at_label, kept)
    np.testing.assert_allclose(to_logit, [0, 0], atol=1e-6)
    np.testing.assert_array_equal(to_label, [0, 0])
    by_hand = -(0.3 * np.log(0.5) + 0.7 * np.log(0.5))
    np.testing.assert_allclose(losses.confidence_error(jnp.zeros((1,), jnp.float32), kept[:1]), [by_hand], rtol=1e-6)
    # The label is the overlap of a drafter in training: its gradient must not move the drafter either.
    through = jax.grad(lambda q: jnp.sum(losses.confidence_error(jnp.ones((1,), jnp.float32), losses.overlap(q, P))))(Q)
    np.testing.assert_array_equal(through, jnp.zeros_like(Q))
    assert np.any(np.asarray(jax.grad(lambda q: jnp.sum(losses.overlap(q, P)))(Q)) != 0), "the overlap has a gradient"


def test_weights_by_hand() -> None:
    np.testing.assert_allclose(losses.decay(3, 2.0), np.exp([0, -0.5, -1.0]), rtol=1e-6)
    assert [losses.growing_gamma(e) for e in (0, 1, 2)] == [4.5, 5.5, 6.5]
    entropy = jnp.asarray([np.log(2), 5.0, np.log(4)], jnp.float32)
    # s = 0.75, 1 (not counted), 0.625; P = 0.75, -, 0.46875
    got = losses.path_weights(entropy, jnp.asarray([True, False, True]))
    np.testing.assert_allclose(got, [0.75 + 0.46875, 0.0, 0.46875], rtol=1e-5)
    grad = jax.grad(lambda e: jnp.sum(losses.path_weights(e, jnp.ones((3,), jnp.bool_))))(entropy)
    np.testing.assert_array_equal(grad, [0, 0, 0])
    np.testing.assert_array_equal(losses.contiguous(jnp.asarray([True, True, False, True])), [1, 1, 0, 0])


def test_a_term_without_weight_is_not_seen_nor_its_gradient() -> None:
    weights = jnp.asarray([1.0, 0.0], jnp.float32)
    terms = jnp.asarray([2.0, jnp.nan], jnp.float32)
    value, grad = jax.value_and_grad(losses.weighted_mean)(terms, weights)
    assert value == 2.0
    np.testing.assert_array_equal(grad, [1.0, 0.0])
    assert losses.weighted_mean(terms, jnp.zeros((2,), jnp.float32)) == 0.0


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=7))
def test_expected_length_is_the_mean_of_the_process(kept: list[float]) -> None:
    length, reached = 1.0, 1.0
    for c in kept:
        reached *= c
        length += reached
    np.testing.assert_allclose(losses.expected_length(jnp.asarray(kept, jnp.float32)), length, rtol=1e-5)
