"""The target's forward pass against a whole-text NumPy one, and its rules about dtypes and odd numbers.

Known failures covered: LD-8 (tied head), DT-7 (float32 from the accumulator), LD-5 (long positions), and
rule 2.1.7: what is not a number is written as 0 and told.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec.decoding import tree
from jspec.target import attention, model, rope
from jspec.target import cache as kv
from jspec.target.cache import unpack
from jspec.target.config import RopeConfig
from tests import reference
from tests.tiny import T, params

S, KB = 64, 16


@jax.jit
def forward(weights, cache, tokens, start, bits, depth):
    columns = attention.columns(jnp.int32(0), start, bits, cache.capacity, KB)
    hidden, features, finite, cache = model.forward(
        weights, T, cache, tokens, start[:, None] + depth, columns, taps=(0, 1)
    )
    return model.logits(weights, hidden), features, finite, cache


def read(weights, cache, tokens, start, parents=None):
    """One block of a chain (or of the tree `parents`) in each slot."""
    slots, rows = tokens.shape
    if parents is None:
        parents = np.maximum(np.arange(rows) - 1, 0)
    bits = np.broadcast_to(reference.packed(reference.ancestors(parents)), (slots, rows, tree.words(rows)))
    depth = np.broadcast_to(reference.depths(parents), (slots, rows))
    return forward(weights, cache, tokens.astype(np.int32), start, bits, depth)


def empty(slots, dtype=jnp.float32):
    return kv.init(T, slots, S, dtype)


def check(part, whole, begin, end):
    """Logits, features and cached columns `begin .. end` of slot 0 against the reference."""
    logits, features, _, cache = part
    np.testing.assert_allclose(logits[0], whole["logits"][begin:end], atol=1e-5)
    residuals = np.concatenate(whole["residuals"], axis=-1)
    np.testing.assert_allclose(features[0], residuals[begin:end], atol=1e-5)
    for layer in range(T.layers):
        for held, wanted in ((cache.keys, "keys"), (cache.values, "values")):
            columns = np.asarray(held[layer])[0, :, :end].swapaxes(0, 1)
            np.testing.assert_allclose(columns, whole[wanted][layer, :end], atol=1e-5)


def test_chunks_and_blocks_equal_one_pass_over_the_whole_text():
    text = np.random.default_rng(0).integers(0, 64, 61)
    whole = reference.forward(params(), T, text)
    cache, start = empty(1), 0
    for rows in (16, 16, 5, 8, 8, 8):
        out = read(params(), cache, text[None, start : start + rows], np.array([start], np.int32))
        check(out, whole, start, start + rows)
        cache, start = out[3], start + rows
    # The check would notice one other token far back.
    text[3] ^= 1
    with pytest.raises(AssertionError):
        check(out, reference.forward(params(), T, text), 53, 61)


def test_rejected_rows_leave_no_trace():
    rng = np.random.default_rng(1)
    text = rng.integers(0, 64, 32)
    whole = reference.forward(params(), T, text)
    cache, start = empty(1), 0
    while start < 24:
        good = int(rng.integers(1, 9))  # rows that are right; the others are to be overwritten
        block = np.where(np.arange(8) < good, text[start : start + 8], rng.integers(0, 64, 8))
        logits, _, _, cache = read(params(), cache, block[None], np.array([start], np.int32))
        np.testing.assert_allclose(logits[0, :good], whole["logits"][start : start + good], atol=1e-5)
        start += good


def test_rows_of_a_tree_equal_the_text_of_their_path():
    rng = np.random.default_rng(2)
    past, block = rng.integers(0, 64, 20), rng.integers(0, 64, 8)
    parents = np.array([0, 0, 1, 1, 0, 4, 5, 2])
    _, _, _, cache = read(params(), empty(1), past[None], np.array([0], np.int32))
    logits, features, _, _ = read(params(), cache, block[None], np.array([20], np.int32), parents=parents)
    for row, above in enumerate(reference.ancestors(parents)):
        path = reference.forward(params(), T, np.concatenate([past, block[above]]))
        np.testing.assert_allclose(logits[0, row], path["logits"][-1], atol=1e-5)
        np.testing.assert_allclose(features[0, row], np.concatenate(path["residuals"], axis=-1)[-1], atol=1e-5)


def test_bfloat16_stays_near_the_reference():
    weights, text = params(jnp.bfloat16), np.arange(16) * 3
    logits, _, _, cache = read(weights, empty(1, jnp.bfloat16), text[None], np.array([0], np.int32))
    whole = reference.forward(weights, T, text)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[0], whole["logits"], atol=0.1)
    keys = np.asarray(unpack(cache.keys[1]), np.float32)[0, :, :16].swapaxes(0, 1)
    np.testing.assert_allclose(keys, whole["keys"][1], atol=0.1)


# --- Rotary embedding ---


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_rotation_is_complex_multiplication_also_far_out(theta):
    positions = np.array([0, 1, 5, 500, 2000], np.int32)
    x = np.random.default_rng(3).standard_normal((5, 2, 8), np.float32)
    turned = rope.rotate(x, *rope.angles(RopeConfig(theta=theta), 8, positions))
    np.testing.assert_allclose(turned, reference.rotate(x, positions, theta), atol=5e-4)
    assert not np.allclose(turned, reference.rotate(x, positions, theta * 2), atol=5e-2)


def test_frequencies_by_hand():
    np.testing.assert_allclose(rope.frequencies(RopeConfig(theta=1e4), 8), [1, 0.1, 0.01, 0.001], rtol=1e-7)


# --- Head ---


def test_a_tied_head_is_the_embedding():
    config = dataclasses.replace(T, tied_head=True)
    weights = jax.jit(lambda: model.init(jax.random.key(0), config))()
    # Head and embedding are one array: the untied target has one more.
    assert weights.head is None
    assert len(jax.tree.leaves(weights)) == len(jax.tree.leaves(params())) - 1
    logits = jax.jit(model.logits)
    hidden = jnp.ones((1, 1, T.width), jnp.float32)
    expected = np.array(logits(weights, hidden))
    expected[..., 3] *= 10
    louder = weights.replace(embed=weights.embed.at[3].multiply(10))
    np.testing.assert_allclose(logits(louder, hidden), expected, rtol=1e-6)


def test_a_tied_text_equals_the_reference():
    tied = params().replace(head=None)
    text = np.arange(8)
    logits, *_ = read(tied, empty(1), text[None], np.array([0], np.int32))
    np.testing.assert_allclose(logits[0], reference.forward(tied, T, text)["logits"], atol=1e-5)
    assert not np.allclose(logits[0], reference.forward(params(), T, text)["logits"], atol=0.1)


def test_head_product_is_float32_from_the_accumulator():
    # DT-7: rounding the product to bfloat16 moves the argmax of a few rows in a hundred.
    rng = np.random.default_rng(4)
    hidden = rng.standard_normal((2000, 512), np.float32).astype(ml_dtypes.bfloat16)
    head = rng.standard_normal((4096, 512), np.float32).astype(ml_dtypes.bfloat16)
    made = jax.jit(model.linear)(hidden.astype(np.float32), head)
    assert made.dtype == jnp.float32
    wanted = np.argmax(hidden.astype(np.float32) @ head.astype(np.float32).T, axis=-1)
    np.testing.assert_array_equal(np.argmax(made, axis=-1), wanted)
    rounded = np.asarray(made).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (np.argmax(rounded, axis=-1) != wanted).sum() > 10


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_product_of_few_rows_is_a_product(count):
    rng = np.random.default_rng(5)
    x, weight = rng.standard_normal((1, count, 32), np.float32), rng.standard_normal((6, 32), np.float32)
    for dtype, tolerance in ((np.float32, 1e-5), (ml_dtypes.bfloat16, 0.1)):
        y = jax.jit(model.linear)(x, weight.astype(dtype))
        assert (y.shape, y.dtype) == ((1, count, 6), jnp.float32)
        np.testing.assert_allclose(y, x @ weight.T, atol=tolerance)


# --- Not a number ---


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_is_written_as_zero_and_told(dtype, odd):
    clean = params(dtype)
    broken = clean.replace(embed=clean.embed.at[63, 0].set(odd))
    tokens = np.random.default_rng(6).integers(0, 63, (2, 8))
    start = np.array([0, 5], np.int32)
    logits, _, finite, cache = read(clean, empty(2, dtype), tokens, start)
    assert np.asarray(finite).all()
    tokens[1, 4] = 63
    bad_logits, _, bad_finite, bad_cache = read(broken, empty(2, dtype), tokens, start)
    # Rows that read the odd one are told only by its mark: it reads as 0.
    assert np.argwhere(~np.asarray(bad_finite)).tolist() == [[1, 4]]
    assert not np.isfinite(bad_logits[1, 4]).any()
    assert np.isfinite(np.delete(np.asarray(bad_logits).reshape(16, -1), 12, axis=0)).all()
    np.testing.assert_array_equal(bad_logits[0], logits[0])
    np.testing.assert_array_equal(bad_logits[1, :4], logits[1, :4])
    for before, after in zip((*cache.keys, *cache.values), (*bad_cache.keys, *bad_cache.values), strict=True):
        assert not np.asarray(after[1, :, 5 + 4]).any()
        np.testing.assert_array_equal(after[0], before[0])
        np.testing.assert_array_equal(after[1, :, :9], before[1, :, :9])


@pytest.mark.parametrize(("dtype", "scale"), [(jnp.bfloat16, 2.0**127), (jnp.float16, 40_000)])
def test_a_number_that_overflows_the_cache_is_not_a_number_either(dtype, scale):
    # Finite in float32, infinite once rounded to the cache's dtype: it would poison as an infinity does.
    clean = params(dtype)
    entry = np.float32(1.4140625)  # 181 / 128: exact in both, and its square is just below 2
    layer = clean.layers[0]
    value_rows = slice((T.heads + T.kv_heads) * T.head_width, None)
    qkv = layer.qkv.at[value_rows].set(0).at[value_rows, 0].set(jnp.asarray(entry * np.float32(scale), dtype))
    layer = layer.replace(qkv=qkv, attn_norm=jnp.full((T.width,), entry))
    embed = clean.embed.at[:].set(jnp.asarray(1.0, dtype))  # after the norm every entry is `entry`
    broken = clean.replace(layers=(layer, clean.layers[1]), embed=embed)
    _, _, finite, cache = read(broken, empty(1, dtype), np.zeros((1, 8)), np.array([0], np.int32))
    assert np.isfinite(np.asarray(unpack(cache.values[0]), np.float32)).all()
    assert not np.asarray(finite).any()
