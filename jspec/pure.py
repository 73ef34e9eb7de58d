"""The pure layer: the three functions that everything else is made of, for loops of one's own.

    state        = init(config, drafter, params, weights)
    state, sound = prefill(config, drafter, params, weights, state, slot, prompt, length)
    state        = start(state, request)
    state, info  = round(config, drafter, params, weights, state)

All are traceable: `docs/pure.md` runs whole generations inside one `jax.lax.while_loop`. None holds
anything; what a round needs is the state, what an observer wants is the info. The engine
(`jspec.engine.static`) compiles the same functions one by one, which is what the promise of equal bits is
about; a program that inlines them is another program (docs/exactness.md).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jspec.decoding import round as rounds
from jspec.decoding import state as states
from jspec.decoding.request import Request
from jspec.decoding.request import admission as _admission
from jspec.decoding.round import round
from jspec.decoding.state import DecodeState, RoundInfo
from jspec.drafters.base import Drafter, Rows
from jspec.engine import static
from jspec.engine.config import EngineConfig
from jspec.engine.static import Admission
from jspec.errors import JspecError
from jspec.target.model import TargetParams

__all__ = ["Admission", "DecodeState", "RoundInfo", "admission", "init", "prefill", "round", "start"]


def init(config: EngineConfig, drafter: Drafter, params: TargetParams, weights: Any) -> DecodeState:
    """A state whose slots are all empty.

    Args:
      config, drafter: static.
      weights: what `drafter.weights` returned.
    """
    return states.init(config, params.dtype, drafter.init(weights, config.slots, config.capacity))


def prefill(
    config: EngineConfig,
    drafter: Drafter,
    params: TargetParams,
    weights: Any,
    state: DecodeState,
    slot: Array,
    prompt: Array,
    length: Array,
) -> tuple[DecodeState, Array]:
    """Empties a slot and reads `prompt[:length - 1]` into it; the last prompt token is the first anchor.

    Args:
      slot: `[]` int32.
      prompt: `[P]` int32, padded; P <= S. Whole chunks of it are read, as many as `length` needs.
      length: `[]` int32, at least 1.

    Returns:
      the state, and `sound []` bool: False if a key or value was not a number.
    """
    chunk = config.chunk
    body = jnp.pad(prompt, (0, -prompt.shape[0] % chunk))
    state = static.reset(drafter, state, slot)

    def read(step: Array, carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, sound = carry
        start = step * chunk
        tokens = lax.dynamic_slice_in_dim(body, start, chunk)
        count = jnp.minimum(length - 1 - start, chunk)
        features, good, cache = rounds.prefill(config, params, state.cache, slot, tokens, start, count)
        rows = Rows(slot=slot, tokens=tokens[None], features=features, start=start[None], count=count[None])
        drafted = drafter.observe(weights, state.drafter, rows)
        return state.replace(cache=cache, drafter=drafted), sound & good

    chunks = (length - 1 + chunk - 1) // chunk
    return lax.fori_loop(0, chunks, read, (state, jnp.bool_(True)))


def admission(config: EngineConfig, request: Request, slot: int) -> Admission:
    """A request as arrays, made on the host.

    Raises:
      JspecError: the request asks for something that takes the host after each round, or that the
        engine cannot take.
    """
    for name in ("stop", "logprobs"):
        value = getattr(request, name)
        if value not in ((), None):
            raise JspecError(
                f"`{name}` of the request is `{value!r}`, and a round has neither text nor tables.",
                "requests without `stop` and `logprobs`; end tokens go into `end_ids`.",
                "leave it out, or use `jspec.generate` or `jspec.decode`.",
            )
    if request.seed is None:
        raise JspecError(
            "the request has no seed.",
            "a seed that you know, so that the text can be had again.",
            "admit `request.with_seed()`, which draws one.",
        )
    return _admission(config, request, slot)


def start(state: DecodeState, request: Admission) -> DecodeState:
    """Starts a prefilled slot. `request` comes from `admission(config, request, slot)`, on the host or stacked."""
    return static.admit(state, request)
