"""One round of speculative decoding: draft, verify, process, commit.

    draft    the drafter proposes a chain behind each slot's anchor
    verify   the target reads the block: one program, whatever was proposed and whoever proposed it
    process  penalties, bias and minimum length act on the logits, where a request asks for them
    commit   the target's choices are compared with the proposals, the agreeing ones are committed

Two rules of choice, fixed when the programs are compiled: `"choice"`, the target's position-keyed choice
(`sampling.choose`), under which the text does not depend on the drafter, and `"rejection"`, the classical
rule (`rejection.choose`), under which its law does not.

`verify` produces every committed token and writes every key and value of generated text. "No
speculation" is the same program with an empty proposal. A host-stepped loop calls them as
separate compiled programs (`engine/static.py`); `round` composes them for loops that stay on the
device, which count as exact only where the probe found the composition equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jspec.decoding import accept, processors, rejection, sampling, tree
from jspec.decoding import branching as branchings
from jspec.decoding.branching import Branching
from jspec.decoding.state import ERROR, LAWLESS, LENGTH, RUNNING, STOP, DecodeState, RoundInfo
from jspec.decoding.tree import Block
from jspec.drafters.base import Drafter, Proposal, Rows
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from jspec.target import attention, model
from jspec.target import cache as kv
from jspec.target.cache import KVCache
from jspec.target.features import Features
from jspec.target.model import TargetParams

RULES = ("choice", "rejection")


def check_rule(rule: str) -> None:
    """Refuses a rule that does not exist."""
    if rule not in RULES:
        raise JspecError(
            f"`accept` is `{rule!r}`.",
            '"choice" (the target\'s own choice decides; the text does not depend on the drafter) or '
            '"rejection" (the ratio test; the law of the text does not).',
            "leave `accept` out for the default, `choice`.",
        )


def draft(
    config: EngineConfig,
    drafter: Drafter,
    weights: Any,
    state: DecodeState,
    *,
    branching: Branching | None = None,
) -> tuple[Block, Array]:
    """The block to verify, and how many rows of each slot are proposals, `[B]` int32.

    A slot that is done proposes nothing, and no slot proposes beyond its limit: those tokens could
    not be emitted.
    """
    if branching is not None:
        return branchings.draft(config, branching, drafter, weights, state)
    block, count, _ = _draft(config, drafter, weights, state)
    return block, count


def draft_with_law(
    config: EngineConfig, drafter: Drafter, weights: Any, state: DecodeState
) -> tuple[Block, Array, Array | None]:
    """As `draft`, and the law that the proposals were drawn from, `log_q [B, K, V]` float32.

    None stands for certainty: a drafter that does not draw declares its tokens so.

    Raises:
      JspecError: the drafter draws but gives no law, or one over another vocabulary.
    """
    block, count, proposal = _draft(config, drafter, weights, state)
    if not drafter.draws:
        return block, count, None
    wanted = (*proposal.tokens.shape, config.target.vocab_size)
    if proposal.log_q is None or proposal.log_q.shape != wanted:
        given = "no law" if proposal.log_q is None else f"a law of shape `{proposal.log_q.shape}`"
        raise JspecError(
            f"`{drafter.name}` draws its tokens and gives {given}.",
            f"`log_q` of shape {wanted}: slots, proposals, the target's vocabulary.",
            "return it with the proposal, or declare `draws` False: every token then counts as certain.",
        )
    return block, count, proposal.log_q


def _draft(config: EngineConfig, drafter: Drafter, weights: Any, state: DecodeState) -> tuple[Block, Array, Proposal]:
    position = state.length - 1
    proposal = drafter.propose(weights, state.drafter, state.anchor, position, state.sampling)
    room = jnp.clip(state.limit - state.length - 1, 0, proposal.tokens.shape[1])
    count = jnp.where(state.running, jnp.clip(proposal.count, 0, room), 0)
    return tree.chain(state.anchor, proposal.tokens, count, config.rows), count, proposal


def verify(
    config: EngineConfig, params: TargetParams, cache: KVCache, block: Block
) -> tuple[Array, Features, Array, KVCache]:
    """The target on a block: logits after every row.

    Returns:
      `logits [B, N, V]` float32, features `[B, N, T * D]` float32, `finite [B, N]` bool (False where
      a key or value was not a number), and the cache with the block written at columns
      `length .. length + N - 1`; `length` itself is unchanged.
    """
    positions = cache.length[:, None] + block.depth
    columns = attention.columns(
        jnp.int32(0),
        cache.length,
        block.ancestors,
        cache.capacity,
        config.key_block,
        config.attention(params.dtype).name,
    )
    hidden, features, finite, cache = model.forward(
        params, config.target, cache, block.tokens, positions, columns, taps=config.taps
    )
    return model.logits(params, hidden), Features(values=features, taps=config.taps), finite, cache


def process(state: DecodeState, block: Block, logits: Array) -> Array:
    """Penalties, bias and minimum length: the logits that choices are made from, `[B, N, V]` float32."""
    return processors.apply(logits, block, state.length, state.end_ids, state.running, state.processors, state.seen)


def commit(
    drafter: Drafter,
    weights: Any,
    state: DecodeState,
    block: Block,
    proposed: Array,
    logits: Array,
    features: Features,
    finite: Array,
    log_q: Array | None = None,
    *,
    rule: str = "choice",
    branching: Branching | None = None,
) -> tuple[DecodeState, RoundInfo]:
    """Chooses, accepts, and moves every running slot on.

    Arguments as `draft_with_law`, `verify` and, for `logits`, `process` return them; only the rule
    `rejection` reads `log_q`.
    """
    check_rule(rule)
    rows = block.rows
    order = jnp.arange(rows, dtype=jnp.int32)[None]
    position = state.length[:, None] + block.depth
    lawful = jnp.ones_like(state.running)
    # A slot that is done would make the others pay for its sampling.
    settings = state.sampling.replace(temperature=jnp.where(state.running, state.sampling.temperature, 0.0))
    if rule == "rejection":
        choice, lawful = rejection.choose(logits, log_q, block, position, settings)
    else:
        choice = sampling.choose(logits, position, settings)
    accepted = accept.accept(block, choice)
    whole = accept.committed(block, accepted)  # rows that commit, [B]
    sound = finite & jnp.isfinite(jnp.max(logits, axis=-1))
    seen = Rows(slot=jnp.int32(0), tokens=block.tokens, features=features, start=state.length - 1, count=whole)
    cache, reached, path = state.cache, whole, None  # `reached`: rows on the path, [B]
    if branching is not None:  # in a chain the path is the first rows
        path = accept.path(accepted)
        choice, sound = (jnp.take_along_axis(x, path, axis=1) for x in (choice, sound))
        seen = seen.replace(
            tokens=jnp.take_along_axis(block.tokens, path, axis=1),
            features=features.replace(values=jnp.take_along_axis(features.values, path[..., None], axis=1)),
        )
        reached = jnp.sum(accepted, axis=1, dtype=jnp.int32)
        if branching.exact == "off":
            whole, cache = reached, kv.reordered(cache, path)

    # What ends the request first: a row that is not a number, an end token, or the limit.
    in_path = order < whole[:, None]
    is_end = jnp.any(choice[:, :, None] == state.end_ids[:, None, :], axis=-1)
    first_bad = _first(in_path & ~sound, rows)
    first_end = _first(in_path & is_end, rows)
    room = state.limit - state.length
    count = jnp.minimum(jnp.minimum(whole, first_bad), jnp.minimum(first_end + 1, room))
    finish = jnp.where(
        first_end < count,
        STOP,
        jnp.where(count == room, LENGTH, jnp.where(first_bad < whole, ERROR, RUNNING)),
    )
    finish = jnp.where(lawful, finish, LAWLESS)
    running = state.running
    count = jnp.where(running & lawful, count, 0)
    finish = jnp.where(running, finish, state.finish)

    # A path that left the line goes on: what the target chose behind the rows that commit is the next trunk.
    reached = jnp.where(finish == RUNNING, jnp.minimum(reached, first_bad), 0)
    provisional = jnp.maximum(reached - count, 0)
    behind = jnp.minimum(jnp.arange(state.trunk.shape[1], dtype=jnp.int32)[None] + count[:, None], rows - 1)

    # Rows whose token is committed now, the anchor and the proposals that were emitted before the last; and those
    # of a provisional path, which come again when they commit.
    drafted = drafter.observe(weights, state.drafter, seen.replace(count=count + provisional))
    last = jnp.take_along_axis(choice, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    length = state.length + count
    moved = state.replace(
        cache=cache.replace(length=cache.length + count),
        drafter=drafted,
        anchor=jnp.where(count > 0, last, state.anchor),
        length=length,
        finish=finish,
        seen=processors.count(state.seen, choice, count),
        trunk=jnp.take_along_axis(choice, behind, axis=1),
        trunk_count=provisional,
    )
    info = RoundInfo(
        tokens=jnp.where(order < count[:, None], choice, 0),
        count=count,
        proposals=block.tokens[:, 1:],
        proposed=proposed,
        accepted=jnp.where(running, whole - 1, 0),
        finish=finish,
        trunk=jnp.zeros_like(count) if branching is None else branchings.trunk(branching, state),
        provisional=provisional,
        path=path if branching is not None and branching.exact == "off" else None,
    )
    return moved, info


def round(
    config: EngineConfig,
    drafter: Drafter,
    params: TargetParams,
    weights: Any,
    state: DecodeState,
    *,
    rule: str = "choice",
    branching: Branching | None = None,
) -> tuple[DecodeState, RoundInfo]:
    """One whole round in one expression, for loops on the device."""
    if rule == "choice":
        (block, proposed), log_q = draft(config, drafter, weights, state, branching=branching), None
    else:
        block, proposed, log_q = draft_with_law(config, drafter, weights, state)
    logits, features, finite, cache = verify(config, params, state.cache, block)
    state = state.replace(cache=cache)
    logits = process(state, block, logits)
    return commit(
        drafter, weights, state, block, proposed, logits, features, finite, log_q, rule=rule, branching=branching
    )


def prefill(
    config: EngineConfig, params: TargetParams, cache: KVCache, slot: Array, tokens: Array, start: Array, count: Array
) -> tuple[Features, Array, KVCache]:
    """Reads one chunk of a prompt into one slot; makes no token.

    Args:
      slot: `[]` int32.
      tokens: `[C]` int32, the chunk, padded.
      start: `[]` int32, a multiple of C: chunks lie on a grid that begins at position 0, so that a
        prompt's keys and values are a function of the prompt alone.
      count: `[]` int32, tokens of the chunk that are not padding.

    Returns:
      features `[1, C, T * D]`, `sound []` bool, and the cache with `length[slot] = start + count`.
    """
    chunk = tokens.shape[0]
    bits = jnp.asarray(tree.chain_bits(chunk))[None]
    kernel = config.attention(params.dtype).name
    columns = attention.columns(slot, start[None], bits, cache.capacity, config.key_block, kernel)
    positions = (start + jnp.arange(chunk, dtype=jnp.int32))[None]
    _, features, finite, cache = model.forward(
        params, config.target, cache, tokens[None], positions, columns, taps=config.taps
    )
    sound = jnp.all(finite | (jnp.arange(chunk, dtype=jnp.int32) >= count)[None])
    cache = cache.replace(length=cache.length.at[slot].set(start + count))
    return Features(values=features, taps=config.taps), sound, cache


def _first(mask: Array, none: int) -> Array:
    """Index of the first True along the last axis of `mask [B, N]`, `none` where there is none."""
    return jnp.where(jnp.any(mask, axis=-1), jnp.argmax(mask, axis=-1), none).astype(jnp.int32)
