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
    expected = np.asarray(growth.expected(made))
    for slot in range(6):
        every = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
        weight = {p: np.exp(sum(float(log_q[slot, i, j]) for i, j in enumerate(p))) for p in every}
        trees = (
            chosen for chosen in itertools.combinations(every, 5) if all(p[:-1] in chosen for p in chosen if len(p) > 1)
        )
        assert expected[slot] == pytest.approx(1 + max(sum(map(weight.get, t)) for t in trees), abs=1e-5)


# --- Laws that depend on the path ---


@functools.cache
def markov(seed, slots, depth, vocab=9):
    """Laws by depth, by a sum over the path and by the token before, likeliest first: two arrays `[B, K, 3, V, V]`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(slots, depth, 3, vocab, vocab)) * rng.uniform(0.3, 4, (slots, depth, 1, 1, 1))
    log_q = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    tokens = np.argsort(-log_q, axis=-1).astype(np.int32)
    return tokens, np.take_along_axis(log_q, tokens, -1)


@functools.partial(jax.jit, static_argnames=("depth", "nodes", "width"))
def grow_markov(tokens, log_q, depth, nodes, width=None):
    slot = jnp.arange(tokens.shape[0])[:, None]

    def expand(d, parents, total):
        total = (total + parents) % 3
        return tokens[slot, d, total, parents], log_q[slot, d, total, parents], total

    root = jnp.zeros((tokens.shape[0],), jnp.int32)
    return growth.beam(expand, root, root[:, None], depth=depth, nodes=nodes, width=width)


def followers(tokens, log_q, path):
    """Tokens behind a path and what each adds, likeliest first."""
    d, total, last = len(path), sum(path) % 3, path[-1] if path else 0
    return list(zip(tokens[d, total, last].tolist(), log_q[d, total, last].tolist(), strict=True))


def heap_markov(tokens, log_q, nodes):
    start = [(-score, (t,)) for t, score in followers(tokens, log_q, ())]
    heapq.heapify(start)
    out = {}
    while start and len(out) < nodes:
        cost, path = heapq.heappop(start)
        out[path] = -cost
        if len(path) < len(tokens):
            for t, score in followers(tokens, log_q, path):
                heapq.heappush(start, (cost - score, (*path, t)))
    return out


@pytest.mark.parametrize(("depth", "nodes"), [(7, 8), (4, 15), (3, 31)])
def test_the_best_nodes_of_a_markov_drafter_are_those_of_a_heap(depth, nodes):
    tokens, log_q = markov(depth, 100, depth)  # three shapes: 300 random drafts
    made = jax.tree.map(np.asarray, grow_markov(tokens, log_q, depth, nodes))
    for slot in range(100):
        wanted, found = heap_markov(tokens[slot], log_q[slot], nodes), paths(made, slot)
        assert found.keys() == wanted.keys()
        assert all(abs(found[path] - wanted[path]) < 1e-5 for path in found)
    check_order(made)


def check_order(made):
    """Rows that are a tree: the chain that expects most in front, then level by level with falling scores."""
    for slot in range(made.tokens.shape[0]):
        held = np.isfinite(made.score[slot])
        assert (np.diff(held.astype(int)) <= 0).all()
        scores = paths(made, slot)
        assert all(made.parents[slot, j] < j for j in range(held.sum()))
        line = 0
        while line < held.sum() and made.parents[slot, line] == line - 1:
            line += 1
        sums = {p: sum(np.exp(scores[p[: d + 1]]) for d in range(len(p))) for p in scores}
        front = tuple(made.tokens[slot, :line].tolist())
        assert sums[front] > max(sums.values()) - 1e-5 if sums else line == 0
        behind = [(made.depth[slot, j], -made.score[slot, j]) for j in range(line, held.sum())]
        assert behind == sorted(behind)


def test_no_other_markov_tree_expects_more():
    tokens, log_q = markov(11, 6, 3, 3)
    expected = np.asarray(growth.expected(grow_markov(tokens, log_q, 3, 5)))
    every = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
    trees = [c for c in itertools.combinations(every, 5) if all(p[:-1] in c for p in c if len(p) > 1)]
    for slot in range(6):
        weight = {}
        for path in every:
            adds = [dict(followers(tokens[slot], log_q[slot], path[:d]))[path[d]] for d in range(len(path))]
            weight[path] = np.exp(sum(adds))
        assert expected[slot] == pytest.approx(1 + max(sum(map(weight.get, t)) for t in trees), abs=1e-5)


def test_a_narrow_beam_finds_a_tree_that_is_no_better():
    tokens, log_q = markov(4, 100, 4)
    best, narrow = (jax.tree.map(np.asarray, grow_markov(tokens, log_q, 4, 15, width)) for width in (None, 2))
    check_order(narrow)
    assert np.isfinite(narrow.score).all()
    expected = [np.asarray(growth.expected(made)) for made in (best, narrow)]
    assert (expected[1] <= expected[0] + 1e-5).all() and (expected[1] < expected[0] - 1e-3).any()


# --- Less of a tree, and two trees in one ---


def test_the_best_of_the_best_are_the_best():
    tokens, log_q = drafts(12, 30, 5, 12)
    large = grow(tokens, log_q, 12)
    for count in (0, 1, 5, 12):
        deepest = np.arange(30, dtype=np.int32) % 7
        cut = jax.tree.map(np.asarray, jax.jit(growth.first)(large, np.full(30, count, np.int32), deepest))
        check_order(cut)
        for slot in range(30):
            wanted = heap(tokens[slot, : deepest[slot]], log_q[slot], count) if deepest[slot] else {}
            # A tree of 12 nodes may hold fewer than `count` so near the root.
            assert paths(cut, slot).keys() == {p for p in wanted if p in paths(jax.tree.map(np.asarray, large), slot)}


def test_two_trees_in_one_hold_shared_paths_once():
    # Half of the slots draft the same tokens with other probabilities, so paths are shared there.
    tokens, log_q = drafts(2, 60, 4, 10)
    tokens[::2] = drafts(1, 60, 4, 10)[0][::2]
    one, two = (jax.tree.map(np.asarray, grow(*draft, 10)) for draft in (drafts(1, 60, 4, 10), (tokens, log_q)))
    twice = 0
    for nodes in (7, 20):
        made = jax.tree.map(np.asarray, jax.jit(growth.merged, static_argnums=2)(one, two, nodes))
        check_order(made)
        for slot in range(60):
            a, b = paths(one, slot), paths(two, slot)
            union = {p: max(a.get(p, -np.inf), b.get(p, -np.inf)) for p in a.keys() | b.keys()}
            twice += len(a) + len(b) - len(union)
            wanted = sorted(union.values(), reverse=True)[:nodes]
            found = paths(made, slot)
            assert found.keys() <= union.keys() and len(found) == len(wanted)
            assert all(abs(found[p] - union[p]) < 1e-6 for p in found)
            np.testing.assert_allclose(sorted(found.values(), reverse=True), wanted, atol=1e-6)
    assert twice > 60


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
    rows_of = jax.tree.map(np.asarray, block(np.full(9, 3, np.int32), made, count, rows))
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
    rows = block(np.zeros(500, np.int32), grow(tokens, log_q, 12), np.full(500, 12, np.int32), 13)
    return tokens, jax.tree.map(np.asarray, rows)


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
