"""Targets that have a name: `configs/targets.toml`."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tomllib
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Known:
    """A named target and where it is."""

    name: str
    hub: str
    note: str


@functools.cache
def targets() -> Mapping[str, Known]:
    """All named targets, by name; none if the file did not travel with the package."""
    package = pathlib.Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        path = folder / "targets.toml"
        if path.is_file():
            table = tomllib.loads(path.read_text(encoding="utf-8"))
            return {name: Known(name, entry["hub"], entry.get("note", "")) for name, entry in table.items()}
    return {}
