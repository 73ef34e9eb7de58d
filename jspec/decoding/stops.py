"""Stop strings, matched over the decoded text as it arrives.

Text is a sequence of characters; where tokens, rounds or the bytes of a character divide it makes no
difference. The answer ends as soon as a stop string is complete in it; of several that are complete
at the same character the longest counts. Text that could still become a stop string is held back, so what is
streamed is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokeniser(Protocol):
    """Ids to text as they arrive; `jspec.target.tokenizer.Stream` is one."""

    def push(self, ids: Sequence[int], /) -> str:
        """Takes the next ids; returns the text that is now certain."""

    def finish(self) -> str:
        """The tail."""


class AnswerText:
    """The text of one answer. Costs each token the same wherever it stands (known-failures SV-7).

    Attributes:
      stop: the stop string that ended the answer, or None.
    """

    def __init__(
        self, detokeniser: Detokeniser, stops: Sequence[str] = (), *, include: bool = False, min_tokens: int = 0
    ) -> None:
        """`include` keeps the stop string in the text; no stop counts before token `min_tokens`."""
        self._detokeniser, self._stops = detokeniser, tuple(stops)
        self._include, self._min_tokens = include, min_tokens
        self._reach = max(map(len, self._stops), default=0)
        self._held = ""  # decoded, not given out
        self._old = 0  # characters of it that were searched before
        self._tokens = 0
        self.stop: str | None = None

    def push(self, token: int) -> str:
        """Takes the next token; returns the text that is now final. After a stop there is none."""
        self._tokens += 1
        return self._take(self._detokeniser.push([token]))

    def finish(self) -> str:
        """What is left when no more tokens come; the answer may end on a stop string even here."""
        if self.stop is not None:
            return ""
        out = self._take(self._detokeniser.finish())
        out, self._held = out + self._held, ""
        return out

    def _take(self, text: str) -> str:
        if self.stop is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        if self._tokens >= self._min_tokens and (found := self._search()):
            start, end, self.stop = found
            out, self._held = self._held[: end if self._include else start], ""
            return out
        self._old = len(self._held)
        keep = self._hold()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._old -= len(out)
        return out

    def _search(self) -> tuple[int, int, str] | None:
        """The first stop string to be complete behind what was searched before: start, end, string."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, self._old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = (start, start + len(stop), stop)
        return best

    def _hold(self) -> int:
        """Characters at the end that could begin a stop string."""
        for size in range(min(self._reach - 1, len(self._held)), 0, -1):
            tail = self._held[len(self._held) - size :]
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stops):
                return size
        return 0
