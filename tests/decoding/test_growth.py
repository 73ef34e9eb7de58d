"""Trees: the best nodes, as a heap finds them and as brute force does; rows that are a tree; chains first."""

import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import accept, growth, tree
from tests import reference

grow = jax.jit(growth.best, static_argnums=2)
block = jax.jit(growth.block, static_argnums=3)


def drafts(seed, slots, depth, ranks):
    """Random laws, each position's likeliest tokens first."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(slots, depth, 40)) * rng.uniform(0.3, 4, (slots, depth, 1))
    log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens = np.argsort(-log_q, axis=-1)[..., :ranks]
    return tokens.astype(np.int32), np.take_along_axis(log_q, tokens, -1).astype(np.float32)


def paths(made, slot):
    """The tree as a mapping from the tokens on each path to its score."""
    out = {}
    for node in range(made.tokens.shape[1]):
        if not np.isfinite(made.score[slot, node]):
            continue
        path, at = [], node
        while at >= 0:
            path.append(int(made.tokens[slot, at]))
            at = int(made.parents[slot, at])
        assert len(path) == made.depth[slot, node]
        out[tuple(reversed(path))] = float(made.score[slot, node])
    return out


def heap(tokens, log_q, nodes):
    """The best nodes one after the other: a node's children enter when it leaves."""
    depth, ranks = tokens.shape
    start = [(-float(log_q[0, j]), 1, (j,)) for j in range(ranks)]
    heapq.heapify(start)
    out = {}
    while start and len(out) < nodes:
        cost, d, path = heapq.heappop(start)
        out[tuple(int(tokens[i, j]) for i, j in enumerate(path))] = -cost
        if d < depth:
            for j in range(ranks):
                heapq.heappush(start, (cost - float(log_q[d, j]), d + 1, (*path, j)))
    return out


@pytest.mark.parametrize(("depth", "ranks", "nodes"), [(7, 8, 8), (7, 16, 16), (3, 32, 32), (15, 10, 21), (1, 9, 9)])
def test_the_best_nodes_are_those_of_a_heap(depth, ranks, nodes):
    slots = 80  # five shapes: 400 random drafts
    tokens, log_q = drafts(depth, slots, depth, ranks)
    made = jax.tree.map(np.asarray, grow(tokens, log_q, nodes))
    for slot in range(slots):
        wanted, found = heap(tokens[slot], log_q[slot], nodes), paths(made, slot)
        assert found.keys() == wanted.keys()
        assert all(abs(found[path] - wanted[path]) < 1e-5 for path in found)


def test_no_other_tree_expects_more():
    tokens, log_q = drafts(3, 6, 3, 3)
    made = grow(tokens, log_q, 5)
    for slot in range(6):
        every = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
        weight = {p: np.exp(sum(float(log_q[slot, i, j]) for i, j in enumerate(p))) for p in every}
        trees = (
            chosen for chosen in itertools.combinations(every, 5) if all(p[:-1] in chosen for p in chosen if len(p) > 1)
        )
        assert growth.expected(made)[slot] == pytest.approx(1 + max(sum(map(weight.get, t)) for t in trees), abs=1e-5)


def test_how_many_pairs_are_looked_at():
    assert [len(growth.pairs(n, n, n)[0]) for n in (8, 16, 32, 64)] == [20, 50, 119, 280]


def test_certain_drafts_take_their_ancestors_along():
    # Probability 1: parent and child tie, and the parent must win.
    log_q = np.full((1, 4, 4), -50, np.float32)
    log_q[:, :, 0] = 0
    tokens = np.tile(np.arange(4, dtype=np.int32), (1, 4, 1))
    made = grow(tokens, log_q, 3)
    np.testing.assert_array_equal(made.parents, [[-1, 0, 1]])
    np.testing.assert_array_equal(made.depth, [[1, 2, 3]])


def test_width_one_is_the_chain():
    tokens, log_q = drafts(4, 3, 5, 1)
    anchor, count = np.array([7, 8, 9], np.int32), np.array([5, 2, 0], np.int32)
    made = block(anchor, grow(tokens, log_q, 5), count, 8)
    wanted = tree.chain(anchor, jnp.asarray(tokens[..., 0]), count, 8)
    for name in ("tokens", "valid"):
        np.testing.assert_array_equal(getattr(made, name), getattr(wanted, name))
    held = np.asarray(wanted.valid)
    for name in ("parents", "depth", "ancestors"):
        np.testing.assert_array_equal(np.asarray(getattr(made, name))[held], np.asarray(getattr(wanted, name))[held])


@pytest.mark.parametrize("rows", [9, 16, 33, 40])
def test_rows_are_a_tree_with_the_likeliest_chain_in_front(rows):
    tokens, log_q = drafts(6, 9, 6, 8)
    made, count = grow(tokens, log_q, 8), np.array([0, 1, 2, 3, 4, 5, 6, 7, 8], np.int32)
    rows_of = block(np.full(9, 3, np.int32), made, count, rows)
    for slot in range(9):
        parents, held = np.asarray(rows_of.parents[slot]), int(count[slot]) + 1
        assert np.asarray(rows_of.valid[slot]).sum() == held
        assert all(parents[j] < j for j in range(1, held)) and not parents[held:].any()
        np.testing.assert_array_equal(rows_of.depth[slot, :held], reference.depths(parents[:held]))
        above = np.eye(rows, dtype=bool)
        above[:held, :held] = reference.ancestors(parents[:held])
        np.testing.assert_array_equal(rows_of.ancestors[slot], reference.packed(above))
        # The chain of first ranks, as far as the tree goes along it, is rows 1, 2, ...
        line = 0
        while (
            line + 1 < held
            and line < 6
            and rows_of.tokens[slot, line + 1] == tokens[slot, line, 0]
            and (parents[line + 1] == line)
        ):
            line += 1
        on_chain = {tuple(tokens[slot, :d, 0]) for d in range(1, 7)} & set(paths(jax.tree.map(np.asarray, made), slot))
        assert line == min(len(on_chain), int(count[slot]))


def test_slots_and_spare_rows_change_nothing():
    tokens, log_q = drafts(8, 4, 5, 8)
    together = grow(tokens, log_q, 8)
    backward = grow(tokens[::-1], log_q[::-1], 8)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[::-1]), together, backward)
    anchor, count = np.zeros(4, np.int32), np.full(4, 8, np.int32)
    small, large = block(anchor, together, count, 9), block(anchor, together, count, 30)
    np.testing.assert_array_equal(small.tokens, large.tokens[:, :9])
    np.testing.assert_array_equal(small.ancestors, large.ancestors[:, :9])


@functools.cache
def walks():
    tokens, log_q = drafts(9, 500, 4, 6)
    return tokens, block(np.zeros(500, np.int32), grow(tokens, log_q, 12), np.full(500, 12, np.int32), 13)


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_is_a_walk_down_the_tree(seed):
    """2,000 trees: the accepted rows are those that a walk from the root reaches by the target's choices."""
    tokens, rows = walks()
    rng = np.random.default_rng(seed)
    choice = rng.integers(0, 40, rows.tokens.shape).astype(np.int32)
    # The target agrees with the draft more often than not, or no walk would get far.
    likely = np.take_along_axis(tokens[:, :, 0], np.minimum(np.asarray(rows.depth), 3), axis=1)
    choice = np.where(rng.random(choice.shape) < 0.6, likely, choice)
    marked = np.asarray(jax.jit(accept.accept)(rows, choice))
    for slot in range(500):
        at, reached = 0, {0}
        while True:
            children = [
                j
                for j in range(1, 13)
                if rows.valid[slot, j] and rows.parents[slot, j] == at and rows.tokens[slot, j] == choice[slot, at]
            ]
            if not children:
                break
            (at,) = children
            reached.add(at)
        assert set(np.flatnonzero(marked[slot])) == reached
