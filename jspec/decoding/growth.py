"""Which nodes a draft tree gets: the best ones under the drafter's own model, at a fixed shape.

The score of a node is the sum of the drafter's log-probabilities on the path to it. If the drafter
were right about the target, a node would be accepted with probability exp(score), and a tree would
yield 1 + the sum of those tokens a round. So the best M nodes are those of highest score; a parent
scores at least as much as its child, so they form a tree by themselves (OPT-Tree, Wang et al., 2024;
EAGLE-2, Li et al., 2024).

    depth 1    a -0.2          b -1.9
    depth 2    aa -0.5  ab -2.1        (ba -2.2 is left out: M = 4)

Candidates come level by level, of each level no more than can be among the best:

    best   positions that are independent of each other: a level is ranked by pairs (parent, token)
    beam   each token's law depends on the one before it: a level is ranked by pairs (parent, its child)

Nothing here is exact or not: a tree decides which proposals are verified, never what is accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.decoding import tree
from jspec.decoding.tree import Block


class Growth(flax.struct.PyTreeNode):
    """`M` nodes for each of `B` slots: first the likeliest chain, then by depth, then by falling score."""

    tokens: Array  # [B, M] int32
    parents: Array  # [B, M] int32, node above, -1 for the root
    depth: Array  # [B, M] int32, from 1
    score: Array  # [B, M] float32, -inf for a node that was not to be had; those come last

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]


# Expand(level from 0, parents' tokens [B, W], memory [B, W, ...]) -> the likeliest tokens behind each, falling:
# tokens [B, W, R], log-probabilities [B, W, R], and what their own children need to know of them.
Expand = Callable[[int, Array, Any], tuple[Array, Array, Any]]


def best(tokens: Array, log_q: Array, nodes: int) -> Growth:
    """The best `nodes` nodes of a drafter whose positions are independent of each other.

    Of depth d at most `nodes` - d + 1 nodes can be among the best, since each needs the d - 1 above
    it. They are found among pairs (parent i, token j), both counted by falling score from 0; a pair
    has (i + 1)(j + 1) - 1 pairs ahead of it, so only those with (i + 1)(j + 1) <= `nodes` - d + 1 are
    looked at. Equal scores: the shallower, then the earlier.

    Args:
      tokens: `[B, K, R]` int32, the likeliest tokens of each of K positions, falling. They differ within a
        position.
      log_q: `[B, K, R]` float32, their log-probabilities, at most 0.
      nodes: M, at most what K and R allow.

    Returns:
      a tree that holds each ancestor of each of its nodes.
    """
    levels = _Levels(tokens.shape[0])
    for d in range(tokens.shape[1]):
        parent, rank = pairs(levels.last.shape[1], tokens.shape[2], nodes - d)
        if len(parent) == 0:
            break
        levels.add(parent, levels.last[:, parent] + log_q[:, d, rank], tokens[:, d, rank], nodes - d)
    return levels.selected(nodes)


def beam(expand: Expand, root: Array, memory: Any, *, depth: int, nodes: int, width: int | None = None) -> Growth:
    """The best `nodes` nodes of a drafter in which each token's law depends on its path.

    Child j of the parent of rank i at depth d, both counted from 0, has i better parents, j better
    siblings and d - 1 ancestors ahead of it, so only those with i + j + d <= `nodes` are looked at.

    Args:
      expand: see `Expand`; called once a level, for the root first.
      root: `[B]` int32, the token that the tree hangs under.
      memory: what `expand` needs to know of the root, `[B, 1, ...]` each.
      depth: K, levels.
      nodes: M.
      width: parents of a level that are expanded, the best ones; None: all that could matter, which finds
        the best tree there is. Fewer cost less.
    """
    levels = _Levels(root.shape[0])
    parents = root[:, None]
    for d in range(min(depth, nodes)):
        count = parents.shape[1]
        tokens, log_q, memory = expand(d, parents, memory)
        parent, rank = children(count, tokens.shape[2], nodes - d)
        scores = levels.last[:, parent] + log_q[:, parent, rank]
        kept = levels.add(parent, scores, tokens[:, parent, rank], nodes - d)
        wide = kept.shape[1] if width is None else min(width, kept.shape[1])
        parents = levels.tokens[-1][:, :wide]
        above = jnp.asarray(parent)[kept[:, :wide]]
        memory = _of(memory, above)
    return levels.selected(nodes)


def _of(memory: Any, above: Array) -> Any:
    """For each child its parent's memory: the rows `above [B, W]` of `[B, P, ...]` arrays."""

    def take(x: Array) -> Array:
        return jnp.take_along_axis(x, above.reshape(*above.shape, *[1] * (x.ndim - 2)), axis=1)

    return jax.tree.map(take, memory)


class _Levels:
    """Candidates of the levels so far; of each level in order of falling score."""

    def __init__(self, slots: int) -> None:
        self.last = jnp.zeros((slots, 1), jnp.float32)  # scores of the last level, the root's at first
        self.tokens: list[Array] = []
        self._parents: list[Array] = []
        self._scores: list[Array] = []

    def add(self, parent: np.ndarray, scores: Array, tokens: Array, most: int) -> Array:
        """Keeps the best `most` of a level's candidates `[B, C]`; returns which, `[B, kept]`."""
        first = sum(s.shape[1] for s in self._scores[:-1])  # number of the last level's first node
        self.last, kept = lax.top_k(scores, min(most, len(parent)))
        above = jnp.asarray(parent)[kept]
        self._parents.append(above + first if self._scores else jnp.full_like(above, -1))
        self._scores.append(self.last)
        self.tokens.append(jnp.take_along_axis(tokens, kept, axis=1))
        return kept

    def selected(self, nodes: int) -> Growth:
        depth = np.repeat(np.arange(1, len(self._scores) + 1, dtype=np.int32), [s.shape[1] for s in self._scores])
        tokens, parents, score = (jnp.concatenate(x, axis=1) for x in (self.tokens, self._parents, self._scores))
        return select(tokens, parents, jnp.broadcast_to(jnp.asarray(depth), score.shape), score, nodes)


@functools.cache
def pairs(parents: int, ranks: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (i, j), i < `parents` and j < `ranks`, with (i + 1)(j + 1) <= `most`, in order of i, then j."""
    return _made((i, j) for i in range(parents) for j in range(ranks) if (i + 1) * (j + 1) <= most)


@functools.cache
def children(parents: int, ranks: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (i, j), i < `parents` and j < `ranks`, with i + j + 1 <= `most`, in order of i, then j."""
    return _made((i, j) for i in range(parents) for j in range(ranks) if i + j + 1 <= most)


def _made(found: Any) -> tuple[np.ndarray, np.ndarray]:
    made = np.array(list(found), np.int32).reshape(-1, 2)
    return made[:, 0], made[:, 1]


def select(tokens: Array, parents: Array, depth: Array, score: Array, nodes: int) -> Growth:
    """The best `nodes` of any candidates `[B, C]`, as a `Growth`.

    Parents stand before their children and score at least as much; parents are numbers of candidates,
    -1 for the root. Of equal scores the earlier is taken.
    """
    # `top_k` takes the first of equals, and parents come first: no node without those above it.
    chosen = jnp.sort(lax.top_k(score, min(nodes, score.shape[1]))[1], axis=1)
    made = _reordered(Growth(tokens=tokens, parents=parents, depth=depth, score=score), chosen)
    # The likeliest chain goes to the front, the rest level by level with falling scores.
    order = jnp.broadcast_to(jnp.arange(made.nodes, dtype=jnp.int32), chosen.shape)
    held = jnp.isfinite(made.score)
    keys = (jnp.where(held, jnp.where(_likeliest(made), 0, made.depth), jnp.iinfo(jnp.int32).max), -made.score, order)
    # In the chain scores fall with depth, so score alone orders it, and of equals the parent stands first.
    return _reordered(made, lax.sort(keys, dimension=1, num_keys=3)[2])


def _likeliest(made: Growth) -> Array:
    """The chain from the root that expects most tokens, `[B, M]` bool."""
    order = jnp.arange(made.nodes, dtype=jnp.int32)
    below = made.parents[:, None] == order[None, :, None]  # [B, M, M]: the column's node hangs under the row's
    own = jnp.exp(made.score)

    def deepened(worth: Array) -> Array:
        """What a node and the best chain below it are worth, one level further."""
        return own + jnp.max(jnp.where(below, worth[:, None], 0.0), axis=2, initial=0.0)

    worth, _ = lax.while_loop(
        lambda carry: jnp.any(carry[0] != carry[1]), lambda carry: (deepened(carry[0]), carry[0]), (deepened(own), own)
    )

    def walk(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        chain, at, _ = carry
        value = jnp.where((made.parents == at[:, None]) & jnp.isfinite(made.score), worth, -1.0)
        there = jnp.max(value, axis=1) >= 0
        after = jnp.where(there, jnp.argmax(value, axis=1).astype(jnp.int32), -2)
        return chain | (order[None] == after[:, None]), after, there

    slots = made.tokens.shape[0]
    start = jnp.zeros(made.tokens.shape, bool), jnp.full((slots,), -1, jnp.int32), jnp.ones((slots,), bool)
    return lax.while_loop(lambda carry: jnp.any(carry[2]), walk, start)[0]


def _reordered(made: Growth, order: Array) -> Growth:
    """The nodes `order [B, M]` of a growth, in that order; parents not among them were of no node that is."""
    # place[b, c]: where candidate c went.
    at = order[:, None, :] == jnp.arange(made.nodes, dtype=jnp.int32)[None, :, None]  # [B, C, M]
    place = jnp.argmax(at, axis=2).astype(jnp.int32)
    above = jnp.take_along_axis(made.parents, order, axis=1)
    moved = jnp.take_along_axis(place, jnp.maximum(above, 0), axis=1)
    return Growth(
        tokens=jnp.take_along_axis(made.tokens, order, axis=1),
        parents=jnp.where(above < 0, -1, moved),
        depth=jnp.take_along_axis(made.depth, order, axis=1),
        score=jnp.take_along_axis(made.score, order, axis=1),
    )


def chain(tokens: Array, count: Array, nodes: int) -> Growth:
    """The tree of width one: the first `count [B]` of `tokens [B, K]`, as far as `nodes` go; all equally sure."""
    tokens = jnp.pad(tokens[:, :nodes], ((0, 0), (0, 0 if tokens.shape[1] else 1)))  # a growth is never empty
    order = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return Growth(
        tokens=tokens,
        parents=order - 1,
        depth=order + 1,
        score=jnp.where(order < count[:, None], jnp.float32(0), -jnp.inf),
    )


def merged(first: Growth, second: Growth, nodes: int) -> Growth:
    """The best `nodes` nodes of two trees over the same root; a path that both hold is one path.

    A node that both propose gets the better of its scores, so a child still scores at most as much as
    its parent.
    """
    twin = jnp.full(second.tokens.shape, -2, jnp.int32)  # of each second node: the first's node of the same path
    root = jnp.full((twin.shape[0], 1), -1, jnp.int32)

    def meet(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        twin, _ = carry
        above = jnp.take_along_axis(jnp.concatenate([twin, root], axis=1), second.parents % (second.nodes + 1), axis=1)
        same = (first.parents[:, None] == above[..., None]) & (first.tokens[:, None] == second.tokens[..., None])
        same &= jnp.isfinite(first.score)[:, None] & jnp.isfinite(second.score)[..., None]  # [B, M2, M1]
        return jnp.where(jnp.any(same, axis=2), jnp.argmax(same, axis=2).astype(jnp.int32), -2), twin

    twin, _ = lax.while_loop(lambda carry: jnp.any(carry[0] != carry[1]), meet, meet((twin, twin)))
    shared = twin >= 0
    hits = (twin[:, None] == jnp.arange(first.nodes, dtype=jnp.int32)[None, :, None]) & shared[:, None]  # [B, M1, M2]
    raised = jnp.max(jnp.where(hits, second.score[:, None], -jnp.inf), axis=2, initial=-jnp.inf)
    own = jnp.where(shared, twin, jnp.arange(second.nodes, dtype=jnp.int32)[None] + first.nodes)
    above = jnp.take_along_axis(jnp.concatenate([own, root], axis=1), second.parents % (second.nodes + 1), axis=1)
    return select(
        jnp.concatenate([first.tokens, second.tokens], axis=1),
        jnp.concatenate([first.parents, above], axis=1),
        jnp.concatenate([first.depth, second.depth], axis=1),
        jnp.concatenate([jnp.maximum(first.score, raised), jnp.where(shared, -jnp.inf, second.score)], axis=1),
        nodes,
    )


def first(growth: Growth, count: Array, deepest: Array) -> Growth:
    """The best `count [B]` nodes that lie at most `deepest [B]` below the root; the others become -inf, and last."""
    score = jnp.where(growth.depth <= deepest[:, None], growth.score, -jnp.inf)
    order = jnp.broadcast_to(jnp.arange(growth.nodes, dtype=jnp.int32), score.shape)
    # Parents stand first and score no less: of equals the earlier is kept.
    rank = jnp.argsort(jnp.argsort(-score, axis=1, stable=True), axis=1)
    score = jnp.where(rank < count[:, None], score, -jnp.inf)
    _, chosen = lax.sort(((~jnp.isfinite(score)).astype(jnp.int32), order), dimension=1, num_keys=2)
    return _reordered(growth.replace(score=score), chosen)


def expected(growth: Growth) -> Array:
    """Tokens a round that verifies the tree yields if the drafter's law is the target's, `[B]` float32."""
    return 1 + jnp.sum(jnp.exp(growth.score), axis=1)


def block(anchor: Array, growth: Growth, count: Array, rows: int) -> Block:
    """The rows that verify the first `count` nodes of each tree, under the last committed token.

    Args:
      anchor: `[B]` int32.
      count: `[B]` int32; a tree's first nodes are a tree, whatever their number.
      rows: N, at least M + 1.
    """
    slots, nodes = growth.tokens.shape
    spare = rows - 1 - nodes

    def padded(first: Array, rest: Array, fill: int = 0) -> Array:
        return jnp.concatenate([first, rest, jnp.full((slots, spare), fill, rest.dtype)], axis=1)

    zero = jnp.zeros((slots, 1), jnp.int32)
    order = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (slots, rows))
    held = padded(zero.astype(bool) | True, jnp.isfinite(growth.score)) & (order <= count[:, None])
    parents = jnp.where(held, padded(zero, growth.parents + 1), 0)
    # Rows above each row: a step up the parents, then two, four, ... until no path is longer.
    above = jnp.eye(rows, dtype=bool)[None] | (parents[..., None] == order[:, None, :])
    above = jnp.where(held[..., None], above, jnp.eye(rows, dtype=bool)[None])
    for _ in range((rows - 1).bit_length()):
        above = jnp.einsum("bij,bjk->bik", above.astype(jnp.float32), above.astype(jnp.float32)) > 0
    return Block(
        tokens=jnp.where(held, padded(anchor[:, None], growth.tokens), 0),
        parents=parents,
        depth=jnp.where(held, padded(zero, growth.depth), 0),
        valid=held,
        ancestors=packed(above),
    )


def packed(above: Array) -> Array:
    """`[B, N, N]` bool to the bits of `Block.ancestors`, `[B, N, W]` uint32."""
    rows = above.shape[-1]
    wide = jnp.pad(above, ((0, 0), (0, 0), (0, tree.words(rows) * 32 - rows)))
    bits = wide.reshape(*above.shape[:-1], tree.words(rows), 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32)[None, None, None], axis=-1, dtype=jnp.uint32)
