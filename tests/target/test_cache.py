"""The cache: its shapes, and that what it holds is the number rounded once, whatever the storage."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.target import cache as kv
from tests.tiny import T


@given(st.lists(st.floats(width=32), min_size=4, max_size=4))
def test_bfloat16_is_kept_as_its_own_bits(numbers):
    x = np.array(numbers, np.float32)
    held = kv.pack(jnp.asarray(x), jnp.dtype(jnp.uint32))
    assert held.dtype == jnp.uint32
    back = np.asarray(kv.unpack(held))
    assert back.dtype == jnp.bfloat16
    np.testing.assert_array_equal(back.astype(np.float32), x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_rounding_is_to_nearest_even():
    # bfloat16 has 8 bits: between 1 and 2 its steps are 1/128.
    x = jnp.array([1 + 1 / 256, 1 + 3 / 256, 1 + 1 / 256 + 2**-20, -0.0], jnp.float32)
    back = kv.unpack(kv.pack(x, jnp.dtype(jnp.uint32))).astype(jnp.float32)
    np.testing.assert_array_equal(back, np.array([1, 1 + 1 / 64, 1 + 1 / 128, 0], np.float32))
    assert np.signbit(back[3])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_empty_cache(dtype):
    cache = jax.jit(lambda: kv.init(T, 3, 48, dtype))()
    assert (cache.slots, cache.capacity, len(cache.keys), len(cache.values)) == (3, 48, T.layers, T.layers)
    for x in (*cache.keys, *cache.values):
        assert kv.unpack(x).shape == (3, T.kv_heads, 48, T.head_width)
        assert x.nbytes == kv.unpack(x).size * jnp.dtype(dtype).itemsize
        assert not np.asarray(x).any()
    np.testing.assert_array_equal(cache.length, np.zeros(3, np.int32))
    used = sum(x.nbytes for x in (*cache.keys, *cache.values))
    assert used == 3 * 48 * kv.bytes_per_token(T, dtype)


def test_bytes_of_a_token_of_a_known_model():
    # SmolLM2-135M in bfloat16: keys and values, 30 layers, 3 heads of 64, 2 bytes.
    smol = dataclasses.replace(T, layers=30, heads=9, kv_heads=3, head_width=64)
    assert kv.bytes_per_token(smol, jnp.bfloat16) == 23_040
