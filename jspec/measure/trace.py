"""`Trace`: what a benchmark observes of one request, and nothing that it derives.

Every figure of `jspec.measure.metrics` is computed from these records, so that a figure can always
be checked by hand against the rounds behind it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jspec.errors import JspecError

FAILED = ("error", "abort")  # values of `Trace.finish` that mean the request has no valid answer


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One verification round of one request.

    `emitted` counts the tokens that reached the answer, after the cut at an end id or at the token
    limit; the end id itself is a token of the answer. `proposed` and `accepted` are counted before
    that cut, as vLLM's counters are: a proposal accepted behind an end id still counts.
    `emitted == 0` marks a padded round: the slot was already done and only kept its place in the
    batch. It is no round of the request.
    """

    end: float  # seconds, when the round's tokens reached the host
    emitted: int
    proposed: int = 0  # draft tokens verified; 0 means that there was no draft
    accepted: int = 0  # of those, the ones the target agreed with, up to the first refusal


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """One request from admission to its last token, in seconds on one clock.

    Prefill makes no token here: the first token belongs to the first round.
    """

    start: float  # the request is handed to the engine
    prefill_end: float  # all of the prompt but its last token is in the cache
    rounds: tuple[Round, ...]
    prompt_tokens: int
    tokens: tuple[int, ...]  # the answer's token ids
    finish: str  # "stop", "length", or one of FAILED
    content_start: float | None = None  # first token after a reasoning span, when the model marks one

    def __post_init__(self) -> None:
        clock = [self.start, self.prefill_end, *(r.end for r in self.rounds)]
        if not all(math.isfinite(t) for t in clock) or any(b < a for a, b in itertools.pairwise(clock)):
            raise _inconsistent(f"times {clock[:6]} that are not finite or run backwards")
        for i, r in enumerate(self.rounds):
            if r.emitted < 0 or not 0 <= r.accepted <= r.proposed:
                raise _inconsistent(f"round {i} with emitted={r.emitted}, proposed={r.proposed}, accepted={r.accepted}")
        emitted = sum(r.emitted for r in self.rounds)
        if emitted != len(self.tokens):
            raise _inconsistent(f"rounds that emitted {emitted} tokens beside an answer of {len(self.tokens)}")

    @property
    def live_rounds(self) -> tuple[Round, ...]:
        """The rounds that worked for this request, padded ones left out."""
        return tuple(r for r in self.rounds if r.emitted)

    @property
    def failed(self) -> bool:
        return self.finish in FAILED

    @property
    def timed(self) -> bool:
        """Whether there is a first token, without which no latency is defined."""
        return any(r.emitted for r in self.rounds)

    @property
    def end(self) -> float:
        """When the last token arrived; the end of prefill where there is none."""
        return max((r.end for r in self.rounds if r.emitted), default=self.prefill_end)

    @property
    def latency_s(self) -> float:
        return self.end - self.start

    @property
    def decode_s(self) -> float:
        """Seconds from the end of prefill to the last token."""
        return self.end - self.prefill_end

    @property
    def ttft_s(self) -> float:
        """Seconds to the end of the first round, whatever kind of token it brought."""
        return self.live_rounds[0].end - self.start

    @property
    def chunk_gaps_s(self) -> list[float]:
        """Seconds between consecutive rounds: what a reader of the stream waits for each chunk."""
        live = self.live_rounds
        return [b.end - a.end for a, b in itertools.pairwise(live)]


def accepted_prefix(matches: ArrayLike) -> NDArray[np.int64]:
    """Counts the accepted proposals of each row: matches before the first refusal.

    `matches` is `[..., K]`, true where a draft token equals the target's own choice. A match behind
    a refusal was made on a path that the target left, so it is worth nothing: [1, 0, 1, 1] counts 1.
    """
    return np.cumprod(np.asarray(matches, dtype=bool), axis=-1, dtype=np.int64).sum(axis=-1)


def _inconsistent(what: str) -> JspecError:
    return JspecError(
        f"a trace has {what}.",
        "start <= prefill_end <= round ends, 0 <= accepted <= proposed, and as many emitted tokens as the answer has.",
        "check the code that recorded the trace; no figure can be drawn from it.",
    )
