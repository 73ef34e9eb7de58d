"""Attention on the absolute grid: right against a dense reference, and bit for bit blind to what must not matter.

What must not matter is how many key blocks are walked, what lies behind the block, and where in its
block a token sits. The last is the law that makes speculation exact; it has its negative control, an
attention that sums cached and in-flight keys apart. (Rules 2.1.3 and 2.1.6 of the architecture.)
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.decoding import tree
from jspec.target import attention
from jspec.target.cache import pack, storage_dtype, unpack
from tests import reference

S, KB, HD = 64, 16, 8
# R slots, N rows, H query heads, G key/value heads: no group, groups of 2 and 3, one head for all.
SHAPES = [(1, 8, 4, 2), (3, 8, 4, 4), (2, 5, 6, 2), (3, 1, 3, 1)]
DTYPES = [jnp.float32, jnp.bfloat16]


@partial(jax.jit, static_argnames="key_block")
def attend(q, k, v, keys, values, start, bits, used=None, key_block=KB):
    """What a layer does: write the block at `start`, then read. `used` overrides where reading ends."""
    columns = attention.columns(jnp.int32(0), start, bits, keys.shape[2], key_block)
    if used is not None:
        columns = columns.replace(used=used)
    keys, values = attention.write(keys, k, columns), attention.write(values, v, columns)
    return attention.read(q, keys, values, columns), keys, values


def inputs(seed, shape, dtype=jnp.float32):
    slots, rows, heads, groups = shape
    rng = np.random.default_rng(seed)
    draw = lambda *size: rng.standard_normal(size, np.float32)  # noqa: E731
    cache = lambda: pack(jnp.asarray(draw(slots, groups, S, HD)), storage_dtype(dtype))  # noqa: E731
    q, k, v = draw(slots, rows, heads, HD), draw(slots, rows, groups, HD), draw(slots, rows, groups, HD)
    return q, k, v, cache(), cache()


def chain_bits(slots, rows):
    return np.broadcast_to(tree.chain_bits(rows), (slots, rows, tree.words(rows)))


def bits_of(x):
    return np.asarray(x).view(np.uint32 if x.dtype.itemsize == 4 else np.uint16)


def dense(q, keys, values, start, parents):
    """The reference on the cache as it stands after the write."""
    out = []
    for slot, begin in enumerate(start):
        rows = q.shape[1]
        visible = np.zeros((rows, S), bool)
        visible[:, :begin] = True
        visible[:, begin : begin + rows] = reference.ancestors(parents[slot])
        k, v = (np.asarray(unpack(x[slot]), np.float64).swapaxes(0, 1) for x in (keys, values))
        out.append(reference.attention(q[slot], k, v, visible).reshape(rows, -1))
    return np.stack(out)


@st.composite
def trees(draw, slots, rows):
    """Parents of `rows` rows for each slot, any shape, parents before children."""
    return np.array([[0] + [draw(st.integers(0, j - 1)) for j in range(1, rows)] for _ in range(slots)], np.int32)


@given(st.data())
@settings(max_examples=40)
def test_equals_dense_attention_for_any_tree_and_length(data):
    shape = data.draw(st.sampled_from(SHAPES))
    slots, rows = shape[:2]
    edges = st.sampled_from([0, 1, KB - 1, KB, KB + 1, S - rows]) | st.integers(0, S - rows)
    start = np.array([data.draw(edges) for _ in range(slots)], np.int32)
    parents = data.draw(trees(slots, rows))
    bits = np.stack([reference.packed(reference.ancestors(p)) for p in parents])
    q, k, v, keys, values = inputs(data.draw(st.integers(0, 99)), shape)
    out, keys, values = attend(q, k, v, keys, values, start, bits)
    expected = dense(q, keys, values, start, parents)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    # The check would notice a row that misses one of its ancestors.
    if rows > 1:
        wrong = parents.copy()
        wrong[:, -1] = 0
        if (wrong != parents).any():
            assert np.abs(out - dense(q, keys, values, start, wrong)).max() > 1e-4


def test_bfloat16_operands_lose_no_more_than_their_rounding():
    q, k, v, keys, values = inputs(0, SHAPES[0], jnp.bfloat16)
    start, parents = np.array([30], np.int32), np.maximum(np.arange(8) - 1, 0)[None]
    out, keys, values = attend(q, k, v, keys, values, start, chain_bits(1, 8))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, dense(q, keys, values, start, parents), atol=0.02)


@pytest.mark.parametrize("rows", [1, 8, 33, 128])
def test_visible_is_the_past_and_the_ancestors(rows):
    rng = np.random.default_rng(rows)
    parents = np.array([[0] + [rng.integers(0, j) for j in range(1, rows)] for _ in range(3)])
    seen = np.stack([reference.ancestors(p) for p in parents])
    bits = np.stack([reference.packed(s) for s in seen])
    capacity, start = 192, np.array([0, 7, 192 - rows], np.int32)
    made = jax.jit(attention.columns, static_argnums=(3, 4))(jnp.int32(0), start, bits, capacity, 64)
    expected = np.zeros((3, rows, capacity), bool)
    for slot, begin in enumerate(start):
        expected[slot, :, :begin] = True
        expected[slot, :, begin : begin + rows] = seen[slot]
    np.testing.assert_array_equal(made.visible, expected)
    assert made.used == 192


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 1, KB - 8, KB - 1, KB, 30])
def test_masked_key_blocks_change_no_bit(dtype, start):
    args = inputs(1, SHAPES[0], dtype)
    begin, bits = np.array([start], np.int32), chain_bits(1, 8)
    exact, *_ = attend(*args, begin, bits, np.int32(start + 8))
    for used in (start + 8 + KB, S):
        longer, *_ = attend(*args, begin, bits, np.int32(used))
        np.testing.assert_array_equal(bits_of(longer), bits_of(exact))
    # Walking too few blocks is noticed.
    shorter, *_ = attend(*args, begin, bits, np.int32(start))
    assert (bits_of(shorter) != bits_of(exact)).any() or -(-start // KB) == -(-(start + 8) // KB)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("huge", [1e30, -3e38])
def test_columns_behind_the_block_never_matter(dtype, huge):
    q, k, v, keys, values = inputs(2, SHAPES[1], dtype)
    start, bits = np.array([0, 13, 40], np.int32), chain_bits(3, 8)
    clean, *_ = attend(q, k, v, keys, values, start, bits)
    behind = (np.arange(S) >= start[:, None])[:, None, :, None]  # the block's own columns are overwritten
    poison = pack(jnp.full(unpack(keys).shape, huge, jnp.float32), keys.dtype)
    keys, values = (jnp.where(behind, poison, x) for x in (keys, values))
    poisoned, *_ = attend(q, k, v, keys, values, start, bits)
    np.testing.assert_array_equal(bits_of(poisoned), bits_of(clean))
    # One visible column of it is noticed.
    leaked, *_ = attend(q, k, v, keys, values, start + 1, bits)
    assert not np.allclose(leaked, clean, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_change_no_bit(dtype):
    shape = SHAPES[1]
    mine, others = inputs(3, shape, dtype), inputs(4, shape, dtype)
    start = np.array([21, 3, 50], np.int32)
    alone, *_ = attend(*mine, start, chain_bits(3, 8))
    mixed = [jnp.concatenate([a[:1], b[1:]]) for a, b in zip(mine, others, strict=True)]
    beside, *_ = attend(*mixed, np.array([21, 56, 0], np.int32), chain_bits(3, 8))
    np.testing.assert_array_equal(bits_of(beside[0]), bits_of(alone[0]))
    assert (bits_of(beside[1]) != bits_of(alone[1])).any()


# --- The law of the absolute grid ---


def split(q, keys, values, columns, **_):
    """The fault: cached keys and in-flight keys as two sums that are joined at the end."""
    cached = jnp.arange(keys.shape[2], dtype=jnp.int32)[None, None] < columns.start[:, None, None]
    share = q.shape[2] // keys.shape[1]
    k, v = (jnp.repeat(unpack(x)[: q.shape[0]].astype(jnp.float32), share, axis=1) for x in (keys, values))
    scores = jnp.einsum("rnhd,rhsd->rhns", q, k) * jnp.float32(q.shape[3] ** -0.5)
    parts = []
    for part in (columns.visible & cached, columns.visible & ~cached):
        s = jnp.where(part[:, None], scores, jnp.float32(-1e30))
        top = jnp.max(s, axis=-1, keepdims=True)
        w = jnp.where(part[:, None], jnp.exp(s - top), 0.0)
        parts.append((top, jnp.sum(w, axis=-1, keepdims=True), jnp.einsum("rhns,rhsd->rhnd", w, v)))
    (top_a, sum_a, out_a), (top_b, sum_b, out_b) = parts
    top = jnp.maximum(top_a, top_b)
    a, b = jnp.exp(top_a - top), jnp.exp(top_b - top)
    out = (out_a * a + out_b * b) / (sum_a * a + sum_b * b)
    return out.transpose(0, 2, 1, 3).reshape(*q.shape[:2], -1)


def one_position_in_every_row(dtype, position):
    """The same text read in blocks that begin 0 .. N-1 columns before `position`: its output in each."""
    rows = 8
    rng = np.random.default_rng(5)
    text_q, text_k, text_v = (rng.standard_normal((S, heads, HD), np.float32) for heads in (4, 2, 2))
    whole = [pack(jnp.asarray(x.swapaxes(0, 1)[None]), storage_dtype(dtype)) for x in (text_k, text_v)]
    outs = []
    for back in range(rows):
        begin = position - back
        block = [x[None, begin : begin + rows] for x in (text_q, text_k, text_v)]
        out, *_ = attend(*block, *whole, np.array([begin], np.int32), chain_bits(1, rows))
        outs.append(bits_of(out[0, back]))
    return np.stack(outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [8, KB - 1, KB, KB + 3, 40])
def test_the_place_in_the_block_changes_no_bit(dtype, position):
    outs = one_position_in_every_row(dtype, position)
    np.testing.assert_array_equal(outs, np.broadcast_to(outs[0], outs.shape))


def test_two_sums_would_be_noticed(monkeypatch):
    monkeypatch.setattr(attention, "read", split)
    attend.clear_cache()
    try:
        q, k, v, keys, values = inputs(0, SHAPES[0])
        start, parents = np.array([30], np.int32), np.maximum(np.arange(8) - 1, 0)[None]
        out, keys, values = attend(q, k, v, keys, values, start, chain_bits(1, 8))
        np.testing.assert_allclose(out, dense(q, keys, values, start, parents), atol=2e-6)  # right, yet
        outs = one_position_in_every_row(jnp.float32, 40)
        assert (outs != outs[0]).any()
    finally:
        attend.clear_cache()


# --- Writing ---


@jax.jit
def write(cache, rows, first, start):
    nothing = jnp.zeros((*rows.shape[:2], S), bool)
    columns = attention.Columns(slot=first, start=start, visible=nothing, used=jnp.int32(S), key_block=KB)
    return attention.write(cache, rows, columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [1, 3])
def test_write_writes_its_columns_and_nothing_else(dtype, slots):
    rng = np.random.default_rng(6)
    storage = storage_dtype(dtype)
    cache = pack(jnp.asarray(rng.standard_normal((4, 2, S, HD), np.float32)), storage)
    rows = rng.standard_normal((slots, 8, 2, HD), np.float32)
    for first in range(4 - slots + 1):
        for begin in (0, 1, KB - 1, S - 8):
            start = np.minimum(begin + 3 * np.arange(slots), S - 8).astype(np.int32)
            expected = np.array(cache)
            for r in range(slots):
                expected[first + r, :, start[r] : start[r] + 8] = pack(jnp.asarray(rows[r].swapaxes(0, 1)), storage)
            np.testing.assert_array_equal(write(cache, rows, np.int32(first), start), expected)
    # Why capacity matters: a block that does not fit is shifted in silence.
    after = write(cache, rows, np.int32(0), np.full((slots,), S - 7, np.int32))
    assert (after[0, :, S - 8] != cache[0, :, S - 8]).any()
