"""Which nodes a draft tree gets: the best ones under the drafter's own model, at a fixed shape.

The score of a node is the sum of the drafter's log-probabilities on the path to it. If the drafter
were right about the target, a node would be accepted with probability exp(score), and a tree would
yield 1 + the sum of those tokens a round. So the best M nodes are those of highest score; a parent
scores at least as much as its child, so they form a tree by themselves (OPT-Tree, Wang et al., 2024;
EAGLE-2, Li et al., 2024).

    depth 1    a -0.2          b -1.9
    depth 2    aa -0.5  ab -2.1        (ba -2.2 is left out: M = 4)

Nothing here is exact or not: a tree decides which proposals are verified, never what is accepted.
"""

from __future__ import annotations

import functools

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
    score: Array  # [B, M] float32, -inf for a node that was not to be had


def best(tokens: Array, log_q: Array, nodes: int) -> Growth:
    """The best `nodes` nodes of a drafter whose positions are independent of each other.

    Level by level: of depth d at most `nodes` - d + 1 nodes can be among the best, since each needs the
    d - 1 above it. They are found among pairs (parent i, token j), both counted by falling score
    from 0; a pair has (i + 1)(j + 1) - 1 pairs ahead of it, so only those with (i + 1)(j + 1) <= `nodes`
    - d + 1 are looked at. Equal scores: the shallower, then the earlier.

    Args:
      tokens: `[B, K, R]` int32, the likeliest tokens of each of K positions, falling. They differ within a
        position.
      log_q: `[B, K, R]` float32, their log-probabilities, at most 0.
      nodes: M, at most what K and R allow.

    Returns:
      a tree that holds each ancestor of each of its nodes.
    """
    slots, depth, _ = tokens.shape
    scores = jnp.zeros((slots, 1), jnp.float32)
    levels: list[tuple[Array, Array, Array, Array]] = []
    first = 0  # number of the level's first node, counted over all levels
    for d in range(depth):
        parent, rank = pairs(scores.shape[1], tokens.shape[2], nodes - d)
        if len(parent) == 0:
            break
        candidates = scores[:, parent] + log_q[:, d, rank]
        kept, index = lax.top_k(candidates, min(nodes - d, len(parent)))
        above = jnp.asarray(parent)[index] + (first - scores.shape[1])
        on_chain = (index == 0) if d == 0 else (index == 0) & levels[-1][3][:, :1]
        levels.append((above if d else jnp.full_like(above, -1), jnp.asarray(rank)[index], kept, on_chain))
        first += kept.shape[1]
        scores = kept
    parents, ranks, score, on_chain = (jnp.concatenate(x, axis=1) for x in zip(*levels, strict=True))
    level = jnp.asarray(np.repeat(np.arange(len(levels), dtype=np.int32), [x[2].shape[1] for x in levels]))
    level = jnp.broadcast_to(level, score.shape)

    # `top_k` takes the first of equals, and parents come first: no node without those above it.
    chosen = jnp.sort(lax.top_k(score, min(nodes, score.shape[1]))[1], axis=1)
    # The likeliest chain goes to the front, the rest keeps its order: level by level, falling scores.
    behind = ~jnp.take_along_axis(on_chain, chosen, axis=1)
    chosen = jnp.take_along_axis(chosen, jnp.argsort(behind, axis=1, stable=True), axis=1)

    def take(x: Array) -> Array:
        return jnp.take_along_axis(x, chosen, axis=1)

    places = jnp.broadcast_to(jnp.arange(chosen.shape[1], dtype=jnp.int32), chosen.shape)
    place = jnp.zeros(score.shape, jnp.int32)
    place = jax.vmap(lambda row, at, value: row.at[at].set(value))(place, chosen, places)
    above = take(parents)
    deep = take(level)
    by_depth = jnp.take_along_axis(tokens, deep[..., None], axis=1)  # [B, M, R]
    return Growth(
        tokens=jnp.take_along_axis(by_depth, take(ranks)[..., None], axis=2)[..., 0],
        parents=jnp.where(above < 0, -1, jnp.take_along_axis(place, jnp.maximum(above, 0), axis=1)),
        depth=deep + 1,
        score=take(score),
    )


@functools.cache
def pairs(parents: int, ranks: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (i, j), i < `parents` and j < `ranks`, with (i + 1)(j + 1) <= `most`, in order of i, then j."""
    found = [(i, j) for i in range(parents) for j in range(ranks) if (i + 1) * (j + 1) <= most]
    made = np.array(found, np.int32).reshape(-1, 2)
    return made[:, 0], made[:, 1]


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
