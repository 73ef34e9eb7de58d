"""Tiny Hugging Face folders with changes, read back: what the tests of the readers share."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from jspec.errors import JspecError
from jspec.target import hf
from tests.target import folders
from tests.target.folders import CONFIGS

LLAMA, TIED, GEMMA, MOE = CONFIGS["llama"], CONFIGS["llama-linear"], CONFIGS["gemma3"], CONFIGS["qwen3_moe"]


def write(
    folder: pathlib.Path,
    base: dict[str, Any] = LLAMA,
    *,
    config: dict[str, Any] | None = None,
    arrays: folders.Arrays | None = None,
    remove: tuple[str, ...] = (),
    **rest: Any,
) -> pathlib.Path:
    """A checkpoint with changes: keys of its configuration (`...` removes one), weights left out or replaced."""
    merged = {key: value for key, value in (base | (config or {})).items() if value is not ...}
    arrays = folders.tensors(base) if arrays is None else arrays
    return folders.write(folder, merged, {name: a for name, a in arrays.items() if name not in remove}, **rest)


def refused(folder: pathlib.Path, *told: str, **settings: Any) -> str:
    with pytest.raises(JspecError) as error:
        hf.load(folder, **settings)
    for part in told:
        assert part in str(error.value)
    return str(error.value)


def notes(checkpoint: Any) -> str:
    return "\n".join(checkpoint.notes)
