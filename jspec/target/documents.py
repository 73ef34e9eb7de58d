"""JSON from foreign files, read with care: a value of the wrong kind is refused where it is read, by name."""

from __future__ import annotations

import json
import math
import os
import pathlib
import stat
from collections.abc import Mapping
from typing import Any, NoReturn

from jspec.errors import JspecError

MIB = 1 << 20
LIMIT = 16 * MIB  # a configuration; tokenizers are larger and say so
DEPTH = 64  # of nesting; a model's configuration needs three

_REQUIRED = object()


class Document:
    """An object of a JSON file. Null counts as absent, as it does for the authors of such files.

    Attributes:
      file: the name told in errors.
      data: the object as it was read.
    """

    def __init__(self, data: Mapping[str, Any], file: str) -> None:
        self.data = dict(data)
        self.file = file
        self._seen: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.data.get(key) is not None

    def mentions(self, key: str) -> bool:
        """Whether the key is there, null or not."""
        self._seen.add(key)
        return key in self.data

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, str, "a text")

    def flag(self, key: str, default: bool) -> bool:
        return self._get(key, default, bool, "true or false")

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, int, "a whole number")

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A finite float, or the default."""
        value = self._get(key, default, (int, float), "a number")
        if value is default:
            return value
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            self.refuse(f"gives `{key}` as a number that is not finite", "a finite number")
        return value

    def items(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """A list of values of one type."""
        value = self._get(key, default, list, "a list")
        if value is not default and not all(_is(item, kind) for item in value):
            self.refuse(f"gives `{key}` as `{_short(value)}`", f"a list of values of type `{kind.__name__}`")
        return value

    def child(self, key: str) -> Document | None:
        """The object under a key; None without one."""
        value = self._get(key, None, dict, "an object")
        return None if value is None else Document(value, f"{self.file}: {key}")

    def unread(self) -> list[str]:
        """Keys that no one has asked for."""
        return sorted(set(self.data) - self._seen)

    def refuse(self, given: str, allowed: str) -> NoReturn:
        raise JspecError(f"`{self.file}` {given}.", f"{allowed}.", "use another checkpoint, or get the file again.")

    def _get(self, key: str, default: Any, kind: type | tuple[type, ...], kind_name: str) -> Any:
        self._seen.add(key)
        value = self.data.get(key)
        if value is None:
            if default is _REQUIRED:
                self.refuse(f"lacks the key `{key}`", f"a file that gives it, as {kind_name}")
            return default
        if not _is(value, kind):
            self.refuse(f"gives `{key}` as `{_short(value)}`", kind_name)
        return value


def read(path: pathlib.Path, limit: int = LIMIT) -> Document:
    """Reads a file that holds one JSON object.

    Raises:
      JspecError: it is missing, too large, not UTF-8, not JSON, not an object, or names a key twice.
    """
    return Document(parse(contents(path, limit), path.name), path.name)


def contents(path: pathlib.Path, limit: int = LIMIT) -> bytes:
    """The bytes of a small file.

    Raises:
      JspecError: it is missing, too large, or not an ordinary file: a pipe would be waited for, and a
        device may have no end.
    """
    try:
        state = os.stat(path)
        if not stat.S_ISREG(state.st_mode):
            raise _broken(path.name, "is not an ordinary file", "a file, or a link to one")
        if state.st_size > limit:
            raise _broken(path.name, f"has {state.st_size:,} bytes", f"at most {limit:,}")
        return path.read_bytes()
    except OSError as error:
        raise _broken(path.name, f"cannot be read ({error.strerror or error})") from None


def read_if_there(path: pathlib.Path, limit: int = LIMIT) -> Document | None:
    """As `read`, and None if there is no such file."""
    return read(path, limit) if os.path.lexists(path) else None


def parse(data: bytes, file: str) -> dict[str, Any]:
    """JSON to a dictionary; errors as those of `read`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
            raise _broken(file, f"has the key `{_short(twice)}` twice in one object")
        return made

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
    except UnicodeDecodeError:
        raise _broken(file, "is not UTF-8 text") from None
    except JspecError:
        raise
    except ValueError as error:  # a number of thousands of digits is one, too
        raise _broken(file, f"is not JSON ({error})") from None
    except RecursionError:
        raise _broken(file, "is nested too deeply") from None
    if not isinstance(value, dict):
        raise _broken(file, f"holds `{_short(value)}`", "an object, in braces")
    if _depth(value) > DEPTH:
        raise _broken(file, "is nested too deeply", f"at most {DEPTH} levels")
    return value


def _depth(value: Any) -> int:
    """Levels of nesting, without recursion."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        item, level = waiting.pop()
        deepest = max(deepest, level)
        children = item.values() if isinstance(item, dict) else item
        waiting += [(child, level + 1) for child in children if isinstance(child, dict | list)]
    return deepest


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _short(value: Any) -> str:
    # A number may have more digits than Python agrees to print.
    text = "a huge number" if isinstance(value, int) and abs(value) > 10**40 else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _broken(file: str, what: str, allowed: str = "a whole, undamaged JSON file") -> JspecError:
    return JspecError(f"`{file}` {what}.", f"{allowed}.", "check that this is the file you meant, or get it again.")
