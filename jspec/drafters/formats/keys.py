"""`Keys`: settings that may stand in one of several objects of a configuration.

Older files have the drafter's own settings beside those of its body, newer ones in an object of their
own (known-failures DR-6). Either is read; two places that disagree are refused, not ranked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jspec.target.documents import Document


@dataclasses.dataclass(frozen=True)
class Keys:
    """The objects to look into, those that speak most closely of the drafter first."""

    places: tuple[Document, ...]

    @classmethod
    def of(cls, *places: Document | None) -> Keys:
        return cls(tuple(place for place in places if place is not None))

    @property
    def main(self) -> Document:
        """The place that errors name."""
        return self.places[0]

    def integer(self, key: str, default: Any = None) -> Any:
        return self._found(key, default, lambda place: place.integer(key))

    def number(self, key: str, default: Any = None) -> Any:
        return self._found(key, default, lambda place: place.number(key))

    def flag(self, key: str, default: Any = None) -> Any:
        return self._found(key, default, lambda place: place.flag(key, False))

    def text(self, key: str, default: Any = None) -> Any:
        return self._found(key, default, lambda place: place.text(key))

    def items(self, key: str, kind: type, default: Any = None) -> Any:
        return self._found(key, default, lambda place: place.items(key, kind))

    def place(self, key: str) -> Document:
        """Where a key stands; the first place if it stands nowhere."""
        return next((place for place in self.places if key in place), self.main)

    def unread(self) -> set[str]:
        return {key for place in self.places for key in place.unread()}

    def _found(self, key: str, default: Any, read: Callable[[Document], Any]) -> Any:
        for place in self.places:
            place.mentions(key)
        given = [(place, read(place)) for place in self.places if key in place]
        if not given:
            return default
        first, value = given[0]
        for other, second in given[1:]:
            if second != value:
                other.refuse(f"gives `{key}` as `{second}`, and {first.file} as `{value}`", "one value")
        return value
