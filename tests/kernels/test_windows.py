"""Windows in the kernels: a distance of positions in the text, along a row's own path (TR-1, KV-4, KV-5).

In the cache siblings stand in different columns at one position, so a window that counted columns would
cut a path short, and one that counted rows would cut it at another place in every round.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import tree
from pallas_kernels.tree_attention import api, shapes
from tests.kernels.cases import case
from tests.kernels.test_numbers import RUNS, TOLERANCE, program

WINDOW = 8
CONTEXTS = (6, 8, 20)  # below the window, at it, beyond it: three slots of one batch
PARENTS = np.array([0, 0, 0, 1, 2])  # two siblings at depth 1, and a child of each
PATHS = ([0, 1, 3], [0, 2, 4])
SHAPE = shapes.Shape(
    slots=3, rows=5, heads=4, groups=2, width=64, capacity=64, key_block=16, dtype="float32", window=WINDOW
)
NAMES = ["reference", *RUNS]


def ancestors(parents) -> np.ndarray:
    """`[N, 1]` packed bits."""
    bits = [0] * len(parents)
    for row, parent in enumerate(parents):
        bits[row] = (bits[parent] if row else 0) | 1 << row
    return np.array(bits, np.uint32)[:, None]


def call(nodes, parents, depth, held):
    """Arguments of a call whose block is `nodes`, in that order, behind each slot's context."""
    q, keys, values, block_keys, block_values = held
    for r, start in enumerate(CONTEXTS):
        for cache, rows in ((keys, block_keys), (values, block_values)):
            cache[r, :, start:] = np.nan
            cache[r, :, start : start + len(nodes)] = rows[r][:, nodes]
    starts = np.array(CONTEXTS, np.int32)
    rows = api.Rows(
        slot=jnp.int32(0),
        start=jnp.asarray(starts),
        ancestors=jnp.asarray(np.broadcast_to(ancestors(parents), (SHAPE.slots, len(nodes), 1))),
        positions=jnp.asarray(starts[:, None] + np.asarray(depth, np.int32)[None]),
        window=WINDOW,
    )
    return jnp.asarray(q[:, nodes]), jnp.asarray(keys), jnp.asarray(values), rows


def from_chains(run, depth) -> float:
    """The largest difference of a tree's rows from those of the same path alone, read as a chain."""
    rng, s = np.random.default_rng(0), SHAPE
    q = rng.normal(size=(s.slots, s.rows, s.heads, s.width)).astype(np.float32)
    cache = rng.normal(size=(2, s.slots, s.groups, s.capacity, s.width)).astype(np.float32)
    block = rng.normal(size=(2, s.slots, s.groups, s.rows, s.width)).astype(np.float32)

    def read(nodes, parents, depth):
        return np.asarray(run(*call(nodes, parents, depth, (q, *cache.copy(), *block))))

    every = read(list(range(s.rows)), PARENTS, depth)
    worst = 0.0
    for path in PATHS:
        alone = read(path, np.maximum(np.arange(3) - 1, 0), [0, 1, 2])
        worst = max(worst, float(np.abs(every[:, path] - alone).max()))
    return worst


def clean(run):
    """The same with columns that nobody reads as 0, for paths that need numbers there."""
    return lambda q, keys, values, rows: run(q, jnp.nan_to_num(keys), jnp.nan_to_num(values), rows)


def runs(name):
    run = program(name, SHAPE.key_block, None, **RUNS.get(name, {}))
    return clean(run) if name == "xla" else run


@pytest.mark.parametrize("name", NAMES)
def test_siblings_share_a_position(name):
    """TR-1."""
    assert from_chains(runs(name), [0, 1, 1, 2, 2]) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_window_that_counts_rows_is_caught(name):
    """TR-1, the fault planted: each row at a position of its own."""
    assert from_chains(runs(name), [0, 1, 2, 3, 4]) > 1e-2


@pytest.mark.parametrize("name", list(RUNS))
def test_keys_mask_and_window_agree_at_every_length(name):
    """KV-4, KV-5: a burst of one row more each time, and a block written again over the same columns.

    Every start from 0 on, so that block and window meet the borders of key blocks in every way; behind the
    block stands what an earlier, rejected one left.
    """
    shape = dataclasses.replace(SHAPE, slots=1, window=6)
    run, wanted = (program(n, shape.key_block, None, **RUNS.get(n, {})) for n in (name, "reference"))
    for start in range(shape.capacity - shape.rows + 1):
        made = case(shape, start, [start], poison=1e30)
        error = np.abs(np.asarray(run(*made)) - np.asarray(wanted(*made))).max()
        assert error <= TOLERANCE["float32"], start


@pytest.mark.parametrize("name", list(RUNS))
def test_a_window_off_by_one_is_caught(name):
    """KV-4, the fault planted."""
    shape = dataclasses.replace(SHAPE, slots=1, window=6)
    q, keys, values, rows = case(shape, 1, [20], poison=0.0)
    wrong = dataclasses.replace(rows, window=7)
    run = program(name, shape.key_block, None, **RUNS[name])
    assert np.abs(np.asarray(run(q, keys, values, rows)) - np.asarray(run(q, keys, values, wrong))).max() > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_lengths_slots_and_positions_are_arrays(name):
    """KV-7: one program for every length, slot and tree, which gives what it gives without `jit`."""
    shape = dataclasses.replace(SHAPE, slots=1)
    run = jax.jit(functools.partial(api.attend, name, key_block=shape.key_block, **RUNS.get(name, {})))
    chain = jnp.asarray(tree.chain_bits(shape.rows))[None]
    got = []
    for start, slot in ((3, 0), (40, 1), (0, 1)):
        q, keys, values, rows = case(shape, start, [start], poison=0.0)
        rows = rows.replace(slot=jnp.int32(slot), ancestors=chain if start else rows.ancestors)
        got.append((np.asarray(run(q, keys, values, rows)), (q, keys, values, rows)))
    assert run._cache_size() == 1
    with jax.disable_jit():
        out, made = got[1]
        plain = api.attend("reference", *made, key_block=shape.key_block)
    assert np.abs(out - np.asarray(plain)).max() <= TOLERANCE["float32"]
