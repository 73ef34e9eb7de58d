"""Index and shards against each other. Known failures covered: LD-9, LD-10, LD-11, each with its fault planted."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from jspec.target import (
    hf,
    plan,
    shards,
)
from tests.target import folders
from tests.target.reading import LLAMA, notes, refused, write

INDEX = shards.INDEX


def edit_index(folder: pathlib.Path, change: Any) -> None:
    document = json.loads((folder / INDEX).read_text())
    change(document["weight_map"])
    (folder / INDEX).write_text(json.dumps(document))


def test_every_missing_shard_is_named_before_anything_is_read(folder, no_reading):
    write(folder, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    edit_index(folder, lambda where: where.update({"x": "model-00009-of-00003.safetensors"}))
    refused(folder, "`model-00002-of-00003.safetensors`", "`model-00009-of-00003.safetensors`")


def test_a_missing_shard_without_the_check(folder, monkeypatch):
    """The fault: what is not there is skipped. The comparison with the plan still stands in the way."""
    write(folder, shards=2)
    edit_index(folder, lambda where: [where.pop(t) for t, f in list(where.items()) if "00002-of" in f])
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "missing: ")
    monkeypatch.setattr(plan, "check", lambda *_: ([], None))
    with pytest.raises(KeyError):
        hf.load(folder)


def test_the_index_decides(folder):
    """known-failures LD-10: a stray file of zeros beside the shards."""
    write(folder, shards=2)
    zeros = {name: np.zeros_like(array) for name, array in folders.tensors(LLAMA).items()}
    folders.save(folder / "model.safetensors", zeros)
    checkpoint = hf.load(folder)
    np.testing.assert_array_equal(checkpoint.params.embed, folders.tensors(LLAMA)["model.embed_tokens.weight"])
    assert "not read: model.safetensors" in notes(checkpoint)
    # The fault: the file with the usual name is taken.
    (folder / INDEX).unlink()
    assert not np.asarray(hf.load(folder).params.embed).any()


def test_a_needed_tensor_that_the_index_forgot(folder):
    """known-failures LD-11: loaded, and told."""
    write(folder, shards=2)
    name = "model.layers.1.mlp.up_proj.weight"
    edit_index(folder, lambda where: where.pop(name))
    checkpoint = hf.load(folder)
    half = np.asarray(checkpoint.params.layers[1].gate_up)[64:]
    np.testing.assert_array_equal(half, folders.tensors(LLAMA)[name])
    assert name in notes(checkpoint)


def test_a_tensor_that_nobody_needs_and_the_index_forgot(folder):
    write(folder, shards=2, arrays=folders.tensors(LLAMA) | {"extra.weight": np.ones((2, 2), np.float32)})
    refused(folder, "not part of the model: `extra.weight`")
    edit_index(folder, lambda where: where.pop("extra.weight"))
    assert "extra.weight" in notes(hf.load(folder))


def test_a_tensor_that_its_file_does_not_hold(folder, no_reading):
    write(folder, shards=2)
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    edit_index(folder, lambda where: where.update({"model.norm.weight": first, "model.embed_tokens.weight": second}))
    refused(folder, "`model.norm.weight` (`model-00001-of-00002.safetensors`)", "`model.embed_tokens.weight`")


def test_one_tensor_in_two_files_that_the_index_forgot(folder):
    write(folder, shards=2)
    arrays = folders.tensors(LLAMA)
    for n in (0, 1):
        mine = {tensor: arrays[tensor] for tensor in list(arrays)[n::2]} | {
            "model.norm.weight": arrays["model.norm.weight"]
        }
        folders.save(folder / f"model-0000{n + 1}-of-00002.safetensors", mine)
    assert hf.load(folder).config  # the index says which one counts
    edit_index(folder, lambda where: where.pop("model.norm.weight"))
    refused(folder, "`model.norm.weight` is in", "does not say which")
