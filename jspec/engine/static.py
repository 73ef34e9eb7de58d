"""The static engine: `B` slots, a handful of compiled programs, the canonical bits.

Each function here is one compiled program. Configurations and drafters are static arguments, so
programs are shared by everything in the process that uses the same engine; settings of requests
are arrays, so nothing compiles after warm-up. The state is donated: use the one returned.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.decoding import logprobs
from jspec.decoding import round as rounds
from jspec.decoding import state as states
from jspec.decoding.branching import Branching
from jspec.decoding.processors import Occurrences, Processors
from jspec.decoding.sampling import Sampling
from jspec.decoding.state import DecodeState, RoundInfo
from jspec.decoding.tree import Block
from jspec.drafters.base import Drafter, Rows
from jspec.engine.config import EngineConfig
from jspec.target.cache import KVCache
from jspec.target.features import Features
from jspec.target.model import TargetParams


class Admission(flax.struct.PyTreeNode):
    """One request as arrays, for `admit`."""

    slot: Array  # [] int32
    anchor: Array  # [] int32, the last prompt token
    length: Array  # [] int32, prompt tokens
    limit: Array  # [] int32, prompt tokens and the most output tokens
    end_ids: Array  # [E] int32, -1 where unused
    sampling: Sampling  # of one slot, [1, ...]
    processors: Processors  # of one slot, [1, ...]
    prompt: Array  # [1, V] bool, which tokens the prompt holds, if a repetition penalty asks


@partial(jax.jit, static_argnums=(0, 1, 3))
def _init(config: EngineConfig, drafter: Drafter, weights: Any, dtype: Any) -> DecodeState:
    return states.init(config, dtype, drafter.init(weights, config.slots, config.capacity))


def init(config: EngineConfig, drafter: Drafter, params: TargetParams, weights: Any) -> DecodeState:
    """A fresh state with empty slots, made in one compiled program.

    Raises:
      JspecError: the engine's kernel does not run on this backend.
    """
    config.check_runs(params.dtype)
    return _init(config, drafter, weights, params.dtype)


@partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def prefill(
    config: EngineConfig, params: TargetParams, cache: KVCache, slot: Array, tokens: Array, start: Array, count: Array
) -> tuple[Features, Array, KVCache]:
    """The program (1, C) on one slot: see `decoding.round.prefill`."""
    return rounds.prefill(config, params, cache, slot, tokens, start, count)


@partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def observe(drafter: Drafter, weights: Any, state: Any, rows: Rows) -> Any:
    """Shows the drafter the rows of a prefill chunk."""
    return drafter.observe(weights, state, rows)


@partial(jax.jit, static_argnums=(0,), donate_argnums=(1,))
def reset(drafter: Drafter, state: DecodeState, slot: Array) -> DecodeState:
    """Empties one slot, so that prefill can fill it. Its old columns are masked, not cleared."""
    return state.replace(
        cache=state.cache.replace(length=state.cache.length.at[slot].set(0)),
        drafter=drafter.reset(state.drafter, slot),
        finish=state.finish.at[slot].set(states.LENGTH),
        length=state.length.at[slot].set(1),
        limit=state.limit.at[slot].set(1),
        trunk_count=state.trunk_count.at[slot].set(0),
    )


@partial(jax.jit, donate_argnums=(0,))
def admit(state: DecodeState, request: Admission) -> DecodeState:
    """Starts a prefilled slot: from here on its tokens come from rounds."""
    slot = request.slot

    def put(every: Array, one: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(every, one, slot, axis=0)

    return state.replace(
        anchor=state.anchor.at[slot].set(request.anchor),
        length=state.length.at[slot].set(request.length),
        limit=state.limit.at[slot].set(request.limit),
        end_ids=state.end_ids.at[slot].set(request.end_ids),
        finish=state.finish.at[slot].set(states.RUNNING),
        sampling=jax.tree.map(put, state.sampling, request.sampling),
        processors=jax.tree.map(put, state.processors, request.processors),
        seen=Occurrences(
            prompt=put(state.seen.prompt, request.prompt),
            output=put(state.seen.output, jnp.zeros(request.prompt.shape, jnp.int32)),
        ),
    )


@partial(jax.jit, donate_argnums=(0,))
def cancel(state: DecodeState, slot: Array) -> DecodeState:
    """Stops a slot where it is; others do not notice."""
    return state.replace(finish=state.finish.at[slot].set(states.STOP))


@partial(jax.jit, static_argnums=(0, 1), static_argnames=("branching",))
def draft(
    config: EngineConfig,
    drafter: Drafter,
    weights: Any,
    state: DecodeState,
    *,
    branching: Branching | None = None,
) -> tuple[Block, Array]:
    """The drafter's program: see `decoding.round.draft`."""
    return rounds.draft(config, drafter, weights, state, branching=branching)


@partial(jax.jit, static_argnums=(0, 1))
def draft_with_law(
    config: EngineConfig, drafter: Drafter, weights: Any, state: DecodeState
) -> tuple[Block, Array, Array | None]:
    """The same for the classical rule, with the law of every proposal."""
    return rounds.draft_with_law(config, drafter, weights, state)


@partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def verify(
    config: EngineConfig, params: TargetParams, cache: KVCache, block: Block
) -> tuple[Array, Features, Array, KVCache]:
    """The program (B, N) that makes every token: see `decoding.round.verify`. Knows no drafter."""
    return rounds.verify(config, params, cache, block)


@partial(jax.jit, static_argnums=(0,), static_argnames=("rule", "branching"), donate_argnums=(2,))
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
    """Choice, acceptance and bookkeeping: see `decoding.round.commit`."""
    return rounds.commit(
        drafter, weights, state, block, proposed, logits, features, finite, log_q, rule=rule, branching=branching
    )


@jax.jit
def process(state: DecodeState, block: Block, logits: Array) -> Array:
    """Penalties, bias and minimum length: see `decoding.round.process`. Changes nothing where nobody asks."""
    return rounds.process(state, block, logits)


@jax.jit
def log_probs(settings: Sampling, logits: Array, shaped: Array, processed: Array) -> Array:
    """Log-probabilities behind every row, before `commit` takes the state: see `decoding.logprobs.table`."""
    return logprobs.table(settings, logits, shaped, processed)


@jax.jit
def score(table: Array, tokens: Array, path: Array | None = None) -> logprobs.Scores:
    """Log-probabilities of what was emitted, by the rows `path [B, N]`: see `decoding.logprobs.score`."""
    return logprobs.score(table if path is None else jnp.take_along_axis(table, path[..., None], axis=1), tokens)


def step(
    config: EngineConfig,
    drafter: Drafter,
    params: TargetParams,
    weights: Any,
    state: DecodeState,
    *,
    rule: str = "choice",
    shaped: bool = True,
    processed: Array | None = None,
    branching: Branching | None = None,
) -> tuple[DecodeState, RoundInfo]:
    """One round, stepped by the host: a few programs, no host work between them.

    Args:
      rule: `choice` or `rejection`.
      shaped: False saves the program of the processors, where the host knows that no slot asks for them.
      processed: `[B]` bool, asks for log-probabilities, processed ones where True; they cost two
        programs more, and come as `RoundInfo.scores`.
      branching: drafts are trees; None, chains.
    """
    if rule == "choice":
        (block, proposed), log_q = draft(config, drafter, weights, state, branching=branching), None
    else:
        block, proposed, log_q = draft_with_law(config, drafter, weights, state)
    logits, features, finite, cache = verify(config, params, state.cache, block)
    state = state.replace(cache=cache)
    given = process(state, block, logits) if shaped else logits
    table = None if processed is None else log_probs(state.sampling, logits, given, processed)
    if rule == "choice":
        state, info = commit(drafter, weights, state, block, proposed, given, features, finite, branching=branching)
    else:
        state, info = commit(drafter, weights, state, block, proposed, given, features, finite, log_q, rule=rule)
    return state, info if table is None else info.replace(scores=score(table, info.tokens, info.path))


class Transcript(flax.struct.PyTreeNode):
    """What a loop on the device leaves behind."""

    tokens: Array  # [B, S + N] int32, emitted tokens of each slot from column 0
    count: Array  # [B] int32
    rounds: Array  # [] int32


@partial(jax.jit, static_argnums=(0, 1), static_argnames=("rule", "branching"), donate_argnums=(4,))
def run(
    config: EngineConfig,
    drafter: Drafter,
    params: TargetParams,
    weights: Any,
    state: DecodeState,
    *,
    rule: str = "choice",
    branching: Branching | None = None,
) -> tuple[DecodeState, Transcript]:
    """Rounds until every slot is done, without the host. The round is compiled into the loop, so
    its bits are those of the stepped engine only where `decoding.probe` found them equal."""
    rows = config.rows
    transcript = Transcript(
        tokens=jnp.zeros((config.slots, config.capacity + rows), jnp.int32),
        count=jnp.zeros((config.slots,), jnp.int32),
        rounds=jnp.int32(0),
    )

    def body(carry: tuple[DecodeState, Transcript]) -> tuple[DecodeState, Transcript]:
        state, out = carry
        state, info = rounds.round(config, drafter, params, weights, state, rule=rule, branching=branching)

        def put(slot: Array, tokens: Array) -> Array:
            row = lax.dynamic_slice_in_dim(info.tokens, slot, 1)
            return lax.dynamic_update_slice(tokens, row, (slot, out.count[slot]))

        tokens = lax.fori_loop(0, config.slots, put, out.tokens)
        return state, Transcript(tokens=tokens, count=out.count + info.count, rounds=out.rounds + 1)

    return lax.while_loop(lambda carry: jnp.any(carry[0].running), body, (state, transcript))


def chunks(config: EngineConfig, prompt: np.ndarray) -> list[tuple[Array, Array, Array]]:
    """`prompt[:-1]` on the grid of chunks: padded tokens `[C]`, start `[]` and count `[]` of each, int32."""
    body = prompt[:-1]
    out = []
    for start in range(0, len(body), config.chunk):
        part = body[start : start + config.chunk]
        padded = np.zeros((config.chunk,), np.int32)
        padded[: len(part)] = part
        out.append((jnp.asarray(padded), jnp.int32(start), jnp.int32(len(part))))
    return out
