"""What comes back: `Answer`, and `Chunk` while it is being written."""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.decoding.request import Result, TokenLogprob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens counted: those of the prompt, and those of the answer with its end token or stop string."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How speculation went for one answer; drafted tokens behind the end of the answer count too."""

    rounds: int
    proposed: int  # drafted tokens that were verified
    accepted: int  # of them accepted

    @property
    def rate(self) -> float | None:
        """Accepted of the proposed; None if nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def length(self) -> float | None:
        """Tokens a round, the target's own included; None before the first round."""
        return 1 + self.accepted / self.rounds if self.rounds else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer to one prompt."""

    text: str  # special tokens left out; with `echo` the prompt comes first
    ids: tuple[int, ...]  # of the answer, an end token included
    finish_reason: str  # "stop", "length" or "error"
    stop: str | None  # the stop string that ended it
    error: str | None  # why, when `finish_reason` is "error"
    prompt: int  # index of the prompt
    choice: int  # which of its `n` answers
    usage: Usage
    acceptance: Acceptance
    seed: int  # given or drawn: with the same engine, prompt and settings it gives the same answer
    settings: dict[str, Any]  # every setting as it was in force, by name
    logprobs: tuple[TokenLogprob, ...] | None  # one for each id, when asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one round added to one answer; the last chunk of an answer holds it whole."""

    prompt: int
    choice: int
    text: str  # final; characters that could still change are held back
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    answer: Answer | None = None


def answer(
    result: Result, *, prompt: int, choice: int, prompt_tokens: int, prefix: str, settings: dict[str, Any]
) -> Answer:
    """An `Answer` of the loop's `Result`; `prefix` is the echoed prompt."""
    return Answer(
        text=prefix + (result.text or ""),
        ids=result.tokens,
        finish_reason=result.finish,
        stop=result.stop,
        error=result.error,
        prompt=prompt,
        choice=choice,
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=len(result.tokens)),
        acceptance=Acceptance(rounds=result.rounds, proposed=result.proposed, accepted=result.accepted),
        seed=result.seed,
        settings=settings | {"seed": result.seed, "max_tokens": result.max_tokens},
        logprobs=result.logprobs,
    )
