"""Whether prompts to train with stand in a benchmark: exactly, or by 13 words in a row.

A drafter that has seen the questions of a benchmark is measured too well on it. 13 words is the customary length
(Brown et al., 2020, appendix C); words are compared in lower case, without punctuation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from jspec.errors import JspecError
from jspec.training.texts import Prompt

GRAM = 13  # words


@dataclasses.dataclass(frozen=True)
class Hit:
    """A prompt that stands in a benchmark."""

    prompt: str  # its id
    benchmark: str  # id of the benchmark's prompt
    words: str  # what both say


class Benchmarks:
    """The words of benchmark prompts, to look prompts up in."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.runs: dict[tuple[str, ...], str] = {}
        self.whole: dict[tuple[str, ...], str] = {}
        self.count = 0
        for prompt in prompts:
            self.count += 1
            for turn in prompt.turns:
                words = _words(turn)
                self.whole.setdefault(tuple(words), prompt.id)
                for run in _runs(words):
                    self.runs.setdefault(run, prompt.id)

    def find(self, prompt: Prompt) -> Hit | None:
        """The first hit of a prompt, if there is one."""
        for turn in prompt.turns:
            words = _words(turn)
            if tuple(words) in self.whole:
                return Hit(prompt.id, self.whole[tuple(words)], " ".join(words))
            for run in _runs(words):
                if run in self.runs:
                    return Hit(prompt.id, self.runs[run], " ".join(run))
        return None

    def apart(self, prompts: Iterable[Prompt], hits: list[Hit]) -> Iterator[Prompt]:
        """The prompts that stand in no benchmark; the others are appended to `hits`."""
        for prompt in prompts:
            hit = self.find(prompt)
            if hit is None:
                yield prompt
            else:
                hits.append(hit)


def refuse(hits: Sequence[Hit]) -> None:
    """Stops where a prompt stands in a benchmark."""
    if hits:
        first = hits[0]
        raise JspecError(
            f"{len(hits)} prompts to train with stand in a benchmark; the first, `{first.prompt}`, has "
            f"`{first.words}` in common with `{first.benchmark}`.",
            f"prompts that share no {GRAM} words in a row with what the drafter is measured on.",
            "leave these prompts out.",
        )


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _runs(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for i in range(len(words) - GRAM + 1):
        yield tuple(words[i : i + GRAM])
