"""The host's loop over a static engine: fill free slots, run a round, report what came out.

`decode` is a generator of events, so that a command line streams them, a benchmark times them and a
server forwards them, all from the same loop. It owns no model state beyond the `DecodeState` that
it passes from round to round.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.decoding import branching as branchings
from jspec.decoding import state as states
from jspec.decoding.branching import Branching
from jspec.decoding.request import Request, Result, TokenLogprob, admission, capped, check
from jspec.decoding.round import check_rule
from jspec.decoding.state import DecodeState, RoundInfo
from jspec.decoding.stops import AnswerText, Detokeniser
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
    text: str = ""  # with `tokens` and `done`: what became final, if the loop was given a tokenizer
    logprobs: tuple[TokenLogprob, ...] = ()  # with `tokens`, when asked for


class TextSource(Protocol):
    """What makes detokenisers; `jspec.target.tokenizer.Tokenizer` is one."""

    def stream(self) -> Detokeniser:
        """A fresh detokeniser."""


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
    answer: AnswerText | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    pieces: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0


OnFinish = Callable[[DecodeState, int, int], None]
# Index of a request and its tokens so far, to whether it is to end here.
Abort = Callable[[int, Sequence[int]], bool]


def decode(
    config: EngineConfig,
    params: TargetParams,
    requests: Iterable[Request],
    *,
    drafter: Drafter | None = None,
    weights: Any = None,
    on_finish: OnFinish | None = None,
    times: RoundTimes | None = None,
    tokenizer: TextSource | None = None,
    accept: str = "choice",
    branching: Branching | None = None,
    abort: Abort | None = None,
) -> Iterator[Event]:
    """Decodes requests in the order given, `B` at a time.

    A generator that is closed early leaves nothing behind.

    Args:
      config: the engine.
      params: the target's weights.
      requests: taken one by one as slots become free.
      drafter: proposes; None decodes plainly, by the same programs.
      weights: what `drafter.weights` returned.
      on_finish: called with the state, the slot and the request's index when a request is done and
        its slot not yet reused, for tests that look at the cache.
      times: filled with the time of each part of the rounds.
      tokenizer: turns tokens into text, which stop strings need; events and results then carry it.
      accept: `choice` (the text does not depend on the drafter), or `rejection` (only its law does
        not).
      branching: drafts are trees; None, chains.
      abort: asked after each round of a request that goes on; true ends it there, as `abort`, and
        frees its slot.

    Raises:
      JspecError: a request that the engine cannot take, before it gets a slot; its neighbours'
        tokens so far have been reported.
    """
    drafter = drafter or Plain()
    check_rule(accept)
    check_drafter(config, drafter)
    branchings.check(branching, config, accept)
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
                fresh = _Slot(index, request, _answer(request, index, tokenizer))
                yield Event("start", index)
                state, sound = _prefill(config, drafter, params, weights, state, request, number)
                if not sound:
                    yield Event("done", index, result=_result(config, drafter, fresh, states.ERROR))
                    continue
                state = static.admit(state, entry)
                yield Event("prefilled", index)
                slots[number] = fresh
        if not any(slots):
            return
        shaped = any(slot is not None and slot.request.shaped for slot in slots)
        state, info = _step(
            config, drafter, params, weights, state, times, accept, shaped, _processed(slots), branching
        )
        for number, slot in enumerate(slots):
            if slot is None:
                continue
            event, finish = _take(slot, info, number)
            if finish == states.RUNNING and abort is not None and abort(slot.index, slot.tokens):
                finish = states.ABORT
            if finish != states.RUNNING and int(info.finish[number]) == states.RUNNING:
                state = static.cancel(state, jnp.int32(number))
            yield event
            if finish != states.RUNNING:
                if on_finish is not None:
                    on_finish(state, number, slot.index)
                slots[number] = None
                tail = slot.answer.finish() if slot.answer is not None else ""
                slot.pieces.append(tail)
                if slot.answer is not None and slot.answer.stop is not None:  # even by the tail
                    finish = states.STOP
                yield Event("done", slot.index, result=_result(config, drafter, slot, finish), text=tail)


def check_drafter(config: EngineConfig, drafter: Drafter) -> None:
    """Refuses a drafter that the engine cannot serve."""
    if drafter.proposals > config.rows - 1:
        raise JspecError(
            f"`{drafter.name}` proposes `{drafter.proposals}` tokens, and the engine verifies `{config.rows}` rows.",
            f"at most {config.rows - 1} proposals: the first row is the last committed token.",
            f"build the engine with rows={drafter.proposals + 1} or more (`--rows` of the command), "
            "or draft fewer tokens.",
        )
    if missing := set(drafter.taps) - set(config.taps):
        raise JspecError(
            f"`{drafter.name}` reads the target's blocks `{sorted(missing)}`, which the engine does not tap.",
            f"drafters that read among `{list(config.taps)}`.",
            "build the engine with the taps of every drafter that it will use.",
        )


def generate(
    config: EngineConfig,
    params: TargetParams,
    requests: Iterable[Request],
    *,
    drafter: Drafter | None = None,
    weights: Any = None,
    on_finish: OnFinish | None = None,
    tokenizer: TextSource | None = None,
    accept: str = "choice",
    branching: Branching | None = None,
    abort: Abort | None = None,
) -> list[Result]:
    """All results, in the order of the requests. Arguments as in `decode`.

    Raises:
      JspecError: a request that the engine cannot take; nothing has been decoded then.
    """
    requests = list(requests)
    for request in requests:
        check(config, request)
    events = decode(
        config,
        params,
        requests,
        drafter=drafter,
        weights=weights,
        on_finish=on_finish,
        tokenizer=tokenizer,
        accept=accept,
        branching=branching,
        abort=abort,
    )
    results = {event.index: event.result for event in events if event.result is not None}
    return [results[i] for i in sorted(results)]


def warm_up(
    config: EngineConfig,
    params: TargetParams,
    *,
    drafter: Drafter | None = None,
    weights: Any = None,
    accept: str = "choice",
    branching: Branching | None = None,
) -> None:
    """Runs every program of an engine once, so that no later request compiles, whatever it asks for."""
    request = Request(prompt=(0, 0), max_tokens=1, temperature=0.0, presence_penalty=1.0, logprobs=0)
    generate(config, params, [request], drafter=drafter, weights=weights, accept=accept, branching=branching)
    state = static.init(config, drafter or Plain(), params, weights)
    jax.block_until_ready(static.cancel(state, jnp.int32(0)).finish)


def _answer(request: Request, index: int, tokenizer: TextSource | None) -> AnswerText | None:
    """The text of a request, where there is a tokenizer to write it."""
    if tokenizer is None:
        if request.stop:
            raise JspecError(
                f"request {index} has stop strings, `{request.stop[0]}` first, and the loop has no tokenizer.",
                "`stop` together with a tokenizer: stop strings are matched over text.",
                "give `tokenizer=checkpoint.tokenizer`, or end tokens in `end_ids`.",
            )
        return None
    return AnswerText(tokenizer.stream(), request.stop, include=request.include_stop, min_tokens=request.min_tokens)


def _processed(slots: list[_Slot | None]) -> Array | None:
    """Which kind of log-probabilities each slot gets, `[B]` bool; None if nobody asks."""
    if not any(s is not None and s.request.logprobs is not None for s in slots):
        return None
    return jnp.asarray(np.array([s is not None and s.request.logprobs_kind == "processed" for s in slots]))


def _take(slot: _Slot, info: RoundInfo, number: int) -> tuple[Event, int]:
    """Adds a round's tokens to a slot's answer, up to a stop string; the event and how the slot stands.

    Tokens behind a stop are dropped. The device has committed them to columns that nobody reads: the
    slot is cancelled, and its next request starts from a reset.
    """
    finish = int(info.finish[number])
    fresh, text = [], ""
    for token in info.tokens[number, : int(info.count[number])].tolist():
        fresh.append(token)
        if slot.answer is not None:
            text += slot.answer.push(token)
            if slot.answer.stop is not None:
                finish = states.STOP
                break
    scores = _logprobs(slot.request, info, number, fresh)
    slot.tokens.extend(fresh)
    slot.pieces.append(text)
    slot.logprobs.extend(scores)
    slot.rounds += 1
    proposed, accepted = int(info.proposed[number]), int(info.accepted[number])
    slot.proposed += proposed
    slot.accepted += accepted
    return Event("tokens", slot.index, tuple(fresh), proposed, accepted, text=text, logprobs=scores), finish


def _logprobs(request: Request, info: RoundInfo, number: int, tokens: list[int]) -> tuple[TokenLogprob, ...]:
    if request.logprobs is None or info.scores is None:
        return ()
    scores = info.scores
    ids = scores.ids[number, :, : request.logprobs].tolist()
    values = scores.values[number, :, : request.logprobs].tolist()
    return tuple(
        TokenLogprob(
            token=token,
            logprob=float(scores.chosen[number, row]),
            rank=int(scores.rank[number, row]),
            top=tuple(zip(ids[row], values[row], strict=True)),
        )
        for row, token in enumerate(tokens)
    )


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
    rule: str,
    shaped: bool,
    processed: Array | None,
    branching: Branching | None,
) -> tuple[DecodeState, Any]:
    if times is None or rule != "choice" or shaped or processed is not None:
        began = time.perf_counter()
        state, info = static.step(
            config,
            drafter,
            params,
            weights,
            state,
            rule=rule,
            shaped=shaped,
            processed=processed,
            branching=branching,
        )
        info = jax.device_get(info)
        if times is not None:  # only the parts of a plain round are told apart
            times.verify += time.perf_counter() - began
            times.rounds += 1
        return state, info
    t0 = time.perf_counter()
    block, proposed = jax.block_until_ready(static.draft(config, drafter, weights, state, branching=branching))
    t1 = time.perf_counter()
    out = jax.block_until_ready(static.verify(config, params, state.cache, block))
    t2 = time.perf_counter()
    logits, features, finite, cache = out
    state, info = static.commit(
        drafter,
        weights,
        state.replace(cache=cache),
        block,
        proposed,
        logits,
        features,
        finite,
        branching=branching,
    )
    info = jax.device_get(info)
    times.draft += t1 - t0
    times.verify += t2 - t1
    times.host += time.perf_counter() - t2
    times.rounds += 1
    return state, info


def _result(config: EngineConfig, drafter: Drafter, slot: _Slot, finish: int) -> Result:
    error = None
    if finish == states.LAWLESS:
        error = (
            f"`{drafter.name}` proposed tokens to request {slot.index} without a law that could have drawn them, "
            f"in round {slot.rounds}, after {len(slot.tokens)} output tokens; nothing of that step was emitted."
        )
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
        stop=slot.answer.stop if slot.answer is not None else None,
        text="".join(slot.pieces) if slot.answer is not None else None,
        logprobs=tuple(slot.logprobs) if slot.request.logprobs is not None else None,
    )
