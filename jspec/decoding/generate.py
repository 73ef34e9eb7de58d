"""The host's loop over a static engine: fill free slots, run a round, report what came out.

`decode` is a generator of events, so that a command line streams them, a benchmark times them and a
server forwards them, all from the same loop. It owns no model state beyond the `DecodeState` that
it passes from round to round.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decoding import state as states
from jspec.decoding.request import Request, Result, admission, capped, check
from jspec.decoding.state import DecodeState
from jspec.drafters.base import Drafter, Plain, Rows
from jspec.engine import static
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from jspec.target.model import TargetParams


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened to one request.

    kind: `start` (it got a slot), `prefilled`, `tokens` (a round emitted some), `done`.
    """

    kind: str
    index: int  # of the request, in the order given
    tokens: tuple[int, ...] = ()
    proposed: int = 0
    accepted: int = 0
    result: Result | None = None  # with `done`


@dataclasses.dataclass
class RoundTimes:
    """Seconds spent in each part of the rounds, when `decode` is asked to measure them.

    The host then waits after each program, which costs it a dispatch or two a round.
    """

    draft: float = 0.0
    verify: float = 0.0
    host: float = 0.0  # commit, transfer and bookkeeping
    rounds: int = 0


@dataclasses.dataclass
class _Slot:
    index: int
    request: Request
    tokens: list[int]
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0


OnFinish = Callable[[DecodeState, int, int], None]


def decode(
    config: EngineConfig,
    params: TargetParams,
    requests: Iterable[Request],
    *,
    drafter: Drafter | None = None,
    weights: Any = None,
    on_finish: OnFinish | None = None,
    times: RoundTimes | None = None,
) -> Iterator[Event]:
    """Decodes requests in the order given, `B` at a time.

    Args:
      config: the engine.
      params: the target's weights.
      requests: taken one by one as slots become free.
      drafter: proposes; None decodes plainly, by the same programs.
      weights: what `drafter.weights` returned.
      on_finish: called with the state, the slot and the request's index when a request is done and
        its slot not yet reused, for tests that look at the cache.
      times: filled with the time of each part of the rounds.

    Raises:
      JspecError: a request that the engine cannot take, before it gets a slot; its neighbours'
        tokens so far have been reported.
    """
    drafter = drafter or Plain()
    if drafter.proposals > config.rows - 1:
        raise JspecError(
            f"`{drafter.name}` proposes `{drafter.proposals}` tokens, and the engine verifies `{config.rows}` rows.",
            f"at most {config.rows - 1} proposals: the first row is the last committed token.",
            f"build the engine with rows={drafter.proposals + 1} or more, or draft fewer tokens.",
        )
    if missing := set(drafter.taps) - set(config.taps):
        raise JspecError(
            f"`{drafter.name}` reads the target's blocks `{sorted(missing)}`, which the engine does not tap.",
            f"drafters that read among `{list(config.taps)}`.",
            "build the engine with the taps of every drafter that it will use.",
        )
    state = static.init(config, drafter, params, weights)
    queue = iter(enumerate(requests))
    slots: list[_Slot | None] = [None] * config.slots
    waiting = True
    while True:
        for number in range(config.slots):
            while waiting and slots[number] is None:
                index, request = next(queue, (-1, None))
                if request is None:
                    waiting = False
                    break
                request = request.with_seed()
                entry = admission(config, request, number)
                yield Event("start", index)
                state, sound = _prefill(config, drafter, params, weights, state, request, number)
                if not sound:
                    yield Event("done", index, result=_result(config, _Slot(index, request, []), states.ERROR))
                    continue
                state = static.admit(state, entry)
                yield Event("prefilled", index)
                slots[number] = _Slot(index, request, [])
        if not any(slots):
            return
        state, info = _step(config, drafter, params, weights, state, times)
        for number, slot in enumerate(slots):
            if slot is None:
                continue
            count = int(info.count[number])
            fresh = tuple(int(t) for t in info.tokens[number, :count])
            slot.tokens.extend(fresh)
            slot.rounds += 1
            slot.proposed += int(info.proposed[number])
            slot.accepted += int(info.accepted[number])
            yield Event("tokens", slot.index, fresh, int(info.proposed[number]), int(info.accepted[number]))
            finish = int(info.finish[number])
            if finish != states.RUNNING:
                if on_finish is not None:
                    on_finish(state, number, slot.index)
                slots[number] = None
                yield Event("done", slot.index, result=_result(config, slot, finish))


def generate(
    config: EngineConfig,
    params: TargetParams,
    requests: Iterable[Request],
    *,
    drafter: Drafter | None = None,
    weights: Any = None,
    on_finish: OnFinish | None = None,
) -> list[Result]:
    """All results, in the order of the requests. Arguments as in `decode`.

    Raises:
      JspecError: a request that the engine cannot take; nothing has been decoded then.
    """
    requests = list(requests)
    for request in requests:
        check(config, request)
    events = decode(config, params, requests, drafter=drafter, weights=weights, on_finish=on_finish)
    results = {event.index: event.result for event in events if event.result is not None}
    return [results[i] for i in sorted(results)]


def _prefill(
    config: EngineConfig,
    drafter: Drafter,
    params: TargetParams,
    weights: Any,
    state: DecodeState,
    request: Request,
    number: int,
) -> tuple[DecodeState, bool]:
    """Reads `prompt[:-1]` into a slot; False if a key or value was not a number."""
    slot = jnp.int32(number)
    state = static.reset(drafter, state, slot)
    sounds = []
    for tokens, start, count in static.chunks(config, np.asarray(request.prompt, np.int32)):
        features, sound, cache = static.prefill(config, params, state.cache, slot, tokens, start, count)
        rows = Rows(slot=slot, tokens=tokens[None], features=features, start=start[None], count=count[None])
        state = state.replace(cache=cache, drafter=static.observe(drafter, weights, state.drafter, rows))
        sounds.append(sound)
    jax.block_until_ready(state.cache.length)
    return state, all(bool(s) for s in sounds)


def _step(
    config: EngineConfig,
    drafter: Drafter,
    params: TargetParams,
    weights: Any,
    state: DecodeState,
    times: RoundTimes | None,
) -> tuple[DecodeState, Any]:
    if times is None:
        state, info = static.step(config, drafter, params, weights, state)
        return state, jax.device_get(info)
    t0 = time.perf_counter()
    block, proposed = jax.block_until_ready(static.draft(config, drafter, weights, state))
    t1 = time.perf_counter()
    out = jax.block_until_ready(static.verify(config, params, state.cache, block))
    t2 = time.perf_counter()
    logits, features, finite, cache = out
    state, info = static.commit(drafter, weights, state.replace(cache=cache), block, proposed, logits, features, finite)
    info = jax.device_get(info)
    times.draft += t1 - t0
    times.verify += t2 - t1
    times.host += time.perf_counter() - t2
    times.rounds += 1
    return state, info


def _result(config: EngineConfig, slot: _Slot, finish: int) -> Result:
    error = None
    if finish == states.ERROR:
        where = f"round {slot.rounds}" if slot.rounds else "prefill"
        error = (
            f"the target's numbers were not finite in {where}, after {len(slot.tokens)} output tokens; "
            "nothing of that step was emitted."
        )
    assert slot.request.seed is not None
    return Result(
        tokens=tuple(slot.tokens),
        finish=states.FINISH_NAMES[finish],
        error=error,
        seed=slot.request.seed,
        max_tokens=capped(config, slot.request),
        rounds=slot.rounds,
        proposed=slot.proposed,
        accepted=slot.accepted,
    )
