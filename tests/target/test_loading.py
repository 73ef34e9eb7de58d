"""The one door to every checkpoint."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jspec.errors import JspecError
from jspec.target import (
    known,
    loading,
)
from tests.target.reading import write


def test_the_door_takes_folders(folder, monkeypatch):
    write(folder)
    assert loading.load(folder, dtype="bfloat16").params.dtype == jnp.bfloat16
    monkeypatch.chdir(folder.parent)
    assert loading.load("tiny").name == "tiny"
    (folder.parent / "owner").mkdir()
    folder.rename(folder.parent / "owner" / "model")
    assert loading.load("owner/model").name == "model"  # what is here comes before the hub


@pytest.mark.parametrize(
    ("source", "settings", "told"),
    [
        ("no such thing", {}, "qwen3-0.6b"),
        ("../escape/../x/y", {}, "is no target"),
        ("file.txt", {}, "is a file"),
        ("missing.gguf", {}, "does not exist"),
        ("smollm2-135m", {"revision": "main"}, "`revision`"),
        ("smollm2-135m", {"context": 100}, "`context`"),
        (None, {"dtype": "float16"}, "`float16`"),
    ],
)
def test_the_door_refuses_by_name(tmp_path, monkeypatch, source, settings, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(JspecError) as error:
        loading.load(source, **settings)
    assert told in str(error.value)


def test_known_targets():
    assert {"qwen3-0.6b", "smollm2-1.7b", "gemma-3-270m"} <= set(known.targets())
    assert all(target.hub.count("/") == 1 for target in known.targets().values())
