"""Fixtures of the readers' tests."""

from __future__ import annotations

import pathlib

import pytest

from jspec.target import weights


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where a checkpoint called `tiny` is to be written."""
    return tmp_path / "tiny"


@pytest.fixture
def no_reading(monkeypatch):
    monkeypatch.setattr(weights, "_fill", lambda *_: pytest.fail("a weight was read"))
