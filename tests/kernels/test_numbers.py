"""Every implementation against the reference, and bit for bit blind to where in its block a token sits.

Rule 2.1.3 of the architecture: keys are read from the cache only, on an absolute grid. Its negative
control is an attention that sums the cached and the in-flight keys apart.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import tree
from pallas_kernels.tree_attention import api, shapes
from tests.kernels.cases import case

TOLERANCE = {"float32": 3e-6, "bfloat16": 4e-3}  # of outputs of about 1; measured: 1.1e-6 and 1.4e-3
RUNS = {"xla": {}, "tpu": {"interpret": True}}


@functools.cache
def program(name, key_block, cap, **options):
    """One jitted program, shared by all cases of a shape."""
    return jax.jit(functools.partial(api.attend, name, key_block=key_block, cap=cap, **options))


def starts(shape):
    """Lengths 0, 1, key block - 1, key block, S - N; different ones side by side where there are slots (KV-1)."""
    edges = [0, 1, shape.key_block - 1, shape.key_block, shape.capacity - shape.rows]
    return [[edges[(i + r) % len(edges)] for r in range(shape.slots)] for i in range(len(edges))]


@pytest.mark.parametrize("name", list(RUNS))
@pytest.mark.parametrize("shape", shapes.SMALL, ids=shapes.Shape.name)
def test_numbers_are_the_reference_s(name, shape):
    poison = 1e30 if name == "xla" else np.nan  # a cache holds numbers; the kernels do not even need that
    run = program(name, shape.key_block, shape.cap, **RUNS[name])
    wanted = program("reference", shape.key_block, shape.cap)
    for seed, start in enumerate(starts(shape)):
        call = case(shape, seed, start, poison)
        error = np.abs(np.asarray(run(*call)) - np.asarray(wanted(*call)))
        assert error.max() <= TOLERANCE[shape.dtype]  # NaN is not


@pytest.mark.parametrize("name", ["reference", *RUNS])
def test_a_token_s_bits_do_not_depend_on_its_row(name):
    run = program(name, SHIFTED.key_block, None, **RUNS.get(name, {}))
    assert shifted_differ(run) == 0


@pytest.mark.parametrize("name", ["reference", *RUNS])
def test_neighbours_change_no_bit(name):
    """VS-15, VS-17: other slots of any length, rows behind that nobody proposed, a row that is not a number."""
    s = SHIFTED
    run = program(name, s.key_block, None, **RUNS.get(name, {}))
    q, keys, values, rows = case(s, 0, [70, 9], poison=0.0)
    first = np.asarray(run(q, keys, values, rows)).view(np.uint32)
    other = q.at[1].set(3.0).at[1, 2].set(jnp.nan).at[0, 5:].set(-2.0)
    moved = rows.replace(start=rows.start.at[1].set(200))
    keys, values = keys.at[2].set(1.5), values.at[2].set(-0.5)
    again = np.asarray(run(other, keys, values, moved)).view(np.uint32)
    assert (again[0, :5] == first[0, :5]).all()
    assert (again[0, 5:] != first[0, 5:]).any(axis=-1).all()  # and what a row does read, it notices
    numbers = np.asarray(run(other, keys, values, moved))[1]
    assert np.isnan(numbers[2]).all() and np.isfinite(np.delete(numbers, 2, axis=0)).all()


def test_cached_and_in_flight_keys_apart_are_caught():
    assert shifted_differ(jax.jit(split)) > 0


SHIFTED = shapes.SMALL[0]


def split(q, keys, values, rows):
    """The fault: two softmaxes, before the block and in it, merged as flash attention merges."""
    s = SHIFTED
    q = q.reshape(s.slots, s.rows, s.groups, s.heads // s.groups, s.width) * s.width**-0.5
    scores = jnp.einsum("rngfd,rgsd->rngfs", q, keys[1:])
    seen = jax.vmap(
        lambda at: jnp.arange(s.capacity, dtype=jnp.int32)[None] <= at + jnp.arange(s.rows, dtype=jnp.int32)[:, None]
    )(rows.start)
    cached = jnp.arange(s.capacity, dtype=jnp.int32)[None, None] < rows.start[:, None, None]
    parts = []
    for part in (seen & cached, seen & ~cached):
        part = part[:, :, None, None]
        weight = jnp.where(part, jnp.exp(scores), 0)
        clean = jnp.where(jnp.any(part, axis=1)[:, 0, :, :, None].reshape(s.slots, 1, s.capacity, 1), values[1:], 0)
        parts.append((jnp.einsum("rngfs,rgsd->rngfd", weight, clean), weight.sum(-1, keepdims=True)))
    return ((parts[0][0] + parts[1][0]) / (parts[0][1] + parts[1][1])).reshape(s.slots, s.rows, -1)


def shifted_differ(run) -> int:
    """Numbers that differ when the same chain is read by blocks that start 1 .. N-1 earlier."""
    s, at = SHIFTED, SHIFTED.key_block + 3
    _, keys, values, rows = case(s, 0, [at] * s.slots, poison=0.0)
    every = np.random.default_rng(1).normal(size=(s.slots, 2 * s.rows, s.heads, s.width)).astype(np.float32)
    chain = jnp.broadcast_to(jnp.asarray(tree.chain_bits(s.rows)), (s.slots, s.rows, s.words))

    def read(shift):
        moved = api.Rows(slot=rows.slot, start=jnp.full((s.slots,), at - shift, jnp.int32), ancestors=chain)
        return np.asarray(run(jnp.asarray(every[:, s.rows - shift :][:, : s.rows]), keys, values, moved)).view(
            np.uint32
        )

    first = read(0)
    return sum(int((first[:, : s.rows - shift] != read(shift)[:, shift:]).sum()) for shift in range(1, s.rows))
