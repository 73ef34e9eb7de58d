"""Runs conversations through an engine and records a `Trace` of every turn.

Each turn is a request of its own. Turn 2 holds the run's own answer to turn 1, so a run whose
answers differ also gets other prompts: what a user of that run would see (known-failures BM-7).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.decoding.generate import RoundTimes, decode
from jspec.decoding.request import Request
from jspec.drafters.base import Drafter
from jspec.engine.config import EngineConfig
from jspec.measure.suites import Prompt
from jspec.measure.trace import Round, Trace
from jspec.target.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Sampling settings of a benchmark, the same for every request."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the chat template

    def __post_init__(self) -> None:
        # What no request could honour is refused here, before anything is loaded or measured.
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "switches"}
        Request(prompt=(0,), **shared)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """What runs: an engine with a drafter."""

    name: str
    engine: EngineConfig
    drafter: Drafter
    weights: Any


def answer(
    contender: Contender,
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    times: RoundTimes | None = None,
) -> tuple[list[list[Trace]], float]:
    """Answers a group of conversations, turn by turn, the group's turns together in the slots.

    Returns:
      traces per conversation and turn, and the seconds from the first request's start to the last
      token, summed over turns.
    """
    traces: list[list[Trace]] = [[] for _ in prompts]
    answers: list[list[str]] = [[] for _ in prompts]
    wall = 0.0
    for turn in range(max(len(p.turns) for p in prompts)):
        active = [i for i, p in enumerate(prompts) if turn < len(p.turns)]
        requests = [request(checkpoint, prompts[i], answers[i], settings) for i in active]
        done, seconds = _timed(contender, checkpoint, requests, times)
        wall += seconds
        for i, trace in zip(active, done, strict=True):
            traces[i].append(trace)
            answers[i].append(checkpoint.tokenizer.decode(list(trace.tokens)))
    return traces, wall


def request(checkpoint: Checkpoint, prompt: Prompt, answers: Sequence[str], settings: Settings) -> Request:
    """Turn `len(answers)` of a conversation as a request. Its seed follows from conversation and turn."""
    ids = checkpoint.tokenizer.render_chat(prompt.messages(answers), **settings.switches)
    return Request(
        prompt=tuple(ids),
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        seed=(settings.seed * 1_000_003 + prompt.conversation * 101 + len(answers)) % 2**64,
        end_ids=() if settings.ignore_eos else checkpoint.end_ids,
    )


def _timed(
    contender: Contender, checkpoint: Checkpoint, requests: list[Request], times: RoundTimes | None
) -> tuple[list[Trace], float]:
    count = len(requests)
    start, ready = [0.0] * count, [0.0] * count
    rounds: list[list[Round]] = [[] for _ in requests]
    finish: list[tuple[str, tuple[int, ...]]] = [("error", ())] * count
    first = last = None
    events = decode(
        contender.engine,
        checkpoint.params,
        requests,
        drafter=contender.drafter,
        weights=contender.weights,
        times=times,
    )
    for event in events:
        now = time.perf_counter()
        i = event.index
        if event.kind == "start":
            start[i] = ready[i] = now
            first = now if first is None else first
        elif event.kind == "prefilled":
            ready[i] = now
        elif event.kind == "tokens":
            rounds[i].append(Round(now, len(event.tokens), event.proposed, event.accepted))
        elif event.result is not None:
            finish[i] = (event.result.finish, event.result.tokens)
        last = now
    traces = [
        Trace(
            start=start[i],
            prefill_end=ready[i],
            rounds=tuple(rounds[i]),
            prompt_tokens=len(requests[i].prompt),
            tokens=finish[i][1],
            finish=finish[i][0],
        )
        for i in range(count)
    ]
    return traces, (last or 0.0) - (first or 0.0)
