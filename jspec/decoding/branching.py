"""`Branching`: drafts as trees, and the trunk that keeps them exact.

In a tree an ancestor may stand in another column than in a chain, so keys, values and choices below it
differ in the last bits from those of plain decoding. Rows in one line with the root do not: they commit
at once, and the likeliest chain is put there. A path that left the line is *provisional*. The next
block reads it once more, as an ordinary chain in front: the trunk.

    round r      rows   0 anchor   1 a   2 b   3 c under 1   4 d under 3        the target chooses a, c, d, e
                 row 1 is in line and commits, and with it its choice c; d, e are provisional
    round r + 1  rows   0 c   1 d   2 e   3 ...                                 the new tree hangs under e

Nothing decides about a trunk's rows but what decides about any proposal: each commits iff it is the
choice of the row above it. What the columns of branches hold is never kept.

`exact="off"` commits the whole path at once, branches and all, and moves its columns together: what
other systems do. The law of the text is the target's then, its bits are not plain decoding's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from jspec.decoding import growth
from jspec.decoding.growth import Growth
from jspec.decoding.state import DecodeState
from jspec.decoding.tree import Block
from jspec.drafters.base import Drafter
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError

EXACT = ("trunk", "off")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branching:
    """How drafts branch; a static argument of the compiled programs.

    Args:
      budget: rows of a block that are used, root and trunk included; the others are masked, so one
        engine serves every budget up to its rows.
      exact: `trunk` or `off`.
    """

    budget: int
    exact: str = "trunk"

    def __post_init__(self) -> None:
        if not isinstance(self.budget, int) or isinstance(self.budget, bool) or self.budget < 2:
            raise JspecError(
                f"the tree's budget is `{self.budget!r}` rows.",
                "a whole number of at least 2: the root, and a node.",
                "leave it out for drafts that are chains.",
            )
        if self.exact not in EXACT:
            raise JspecError(
                f"`tree_exact` is `{self.exact!r}`.",
                '"trunk" (the text is that of plain decoding) or "off" (its law is).',
                "choose one of the two.",
            )


def of(budget: int | None, exact: str | None) -> Branching | None:
    """What the options `tree_budget` and `tree_exact` ask for; None for chains. `tree_exact` left out is `trunk`."""
    if budget is None:
        if exact is not None:
            raise JspecError(
                f"`tree_exact` is `{exact!r}`, and there is no `tree_budget`.",
                "`tree_exact` together with a budget: drafts that are chains are exact anyway.",
                "give `tree_budget`, or leave `tree_exact` out.",
            )
        return None
    return Branching(budget=budget, exact=exact or "trunk")


def check(branching: Branching | None, config: EngineConfig, rule: str) -> None:
    """Refuses what the engine or the rule of acceptance cannot do."""
    if branching is None:
        return
    if branching.budget > config.rows:
        raise JspecError(
            f"the tree's budget is `{branching.budget}` rows, and the engine verifies `{config.rows}`.",
            f"2 to {config.rows}.",
            f"build the engine with rows={branching.budget} or more (`--rows` of the command), or lower the budget.",
        )
    if rule == "rejection":
        raise JspecError(
            "drafts are trees under the rule `rejection`.",
            "chains: that rule draws by the ratio test, which knows one proposal after each token.",
            'draft chains, or choose accept="choice".',
        )


def trunk(branching: Branching, state: DecodeState) -> Array:
    """How many provisional tokens head the next block, `[B]` int32; never more than could still be emitted."""
    most = jnp.clip(state.limit - state.length - 1, 0, branching.budget - 1)
    return jnp.where(state.running, jnp.minimum(state.trunk_count, most), 0)


def draft(
    config: EngineConfig, branching: Branching, drafter: Drafter, weights: Any, state: DecodeState
) -> tuple[Block, Array]:
    """The block to verify, and how many rows of each slot are below its root, `[B]` int32."""
    nodes = branching.budget - 1
    held = trunk(branching, state)
    last = jnp.take_along_axis(state.trunk, jnp.maximum(held - 1, 0)[:, None], axis=1)[:, 0]
    tip = jnp.where(held > 0, last, state.anchor)
    grown = drafter.grow(weights, state.drafter, tip, state.length - 1 + held, state.sampling, nodes)
    deepest = jnp.maximum(state.limit - state.length - 1 - held, 0)
    grown = growth.first(grown, jnp.where(state.running, nodes - held, 0), deepest)
    whole = hung(state.trunk, held, grown, nodes)
    block = growth.block(state.anchor, whole, jnp.full_like(held, nodes), config.rows)
    return block, jnp.sum(jnp.isfinite(whole.score), axis=1, dtype=jnp.int32)


def hung(trunk: Array, count: Array, grown: Growth, nodes: int) -> Growth:
    """A tree under a trunk: `nodes` nodes, of each slot first `count [B]` of `trunk [B, T]`, a chain."""
    order = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (trunk.shape[0], nodes))
    in_trunk = order < count[:, None]
    place = order - count[:, None]  # in the tree
    there = (place >= 0) & (place < grown.nodes)
    place = jnp.clip(place, 0, grown.nodes - 1)

    def joined(above: Array, below: Array) -> Array:
        return jnp.where(in_trunk, above, jnp.take_along_axis(below, place, axis=1))

    return Growth(
        tokens=joined(trunk[:, :nodes], grown.tokens),
        parents=joined(order - 1, grown.parents + count[:, None]),
        depth=joined(order + 1, grown.depth + count[:, None]),
        score=jnp.where(in_trunk | there, joined(jnp.zeros_like(order, jnp.float32), grown.score), -jnp.inf),
    )
