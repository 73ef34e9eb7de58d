"""Which number type a target runs in. Known failure covered: LD-15 (target half)."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jspec.target import (
    describe,
    dtypes,
    hf,
)
from tests.target import folders
from tests.target.reading import GEMMA, refused, write


@pytest.mark.parametrize(
    ("config", "stored", "asked", "used", "rule"),
    [
        ({"torch_dtype": "bfloat16"}, "F32", None, "bfloat16", "`torch_dtype` of config.json"),
        ({"dtype": "bfloat16"}, "F32", None, "bfloat16", "`dtype` of config.json"),
        ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, "F32", None, "bfloat16", "`dtype`"),
        ({"torch_dtype": "float16"}, "F32", None, "bfloat16", "bfloat16 for float16"),
        ({"torch_dtype": "float32"}, "BF16", None, "float32", "`torch_dtype`"),
        ({}, "F32", None, "float32", "the tensors' own type"),
        ({}, "BF16", None, "bfloat16", "the tensors' own type"),
        ({}, "F16", None, "bfloat16", "bfloat16 for float16: the tensors' own type"),
        ({"torch_dtype": "auto"}, "BF16", "auto", "bfloat16", "the tensors' own type"),
        ({"dtype": "auto", "torch_dtype": "float32"}, "BF16", None, "float32", "`torch_dtype`"),
        ({"torch_dtype": "bfloat16"}, "BF16", "float32", "float32", "asked for by the caller"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "F32", "float32", "float32", "asked for"),
        ({"torch_dtype": "float64"}, "F32", "bfloat16", "bfloat16", "asked for"),
    ],
)
def test_dtype_rule(folder, config, stored, asked, used, rule):
    write(folder, config={"torch_dtype": ..., **config}, dtype=stored)
    checkpoint = hf.load(folder, dtype=asked)
    assert checkpoint.params.dtype == jnp.dtype(used)
    assert checkpoint.dtype_rule.startswith(used) and rule in checkpoint.dtype_rule
    assert any(checkpoint.dtype_rule in line for line in describe.describe(checkpoint))


@pytest.mark.parametrize(
    ("config", "asked", "told"),
    [
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, None, "`dtype` as `bfloat16` and `torch_dtype` as `float32`"),
        ({"dtype": "bfloat17"}, None, "`bfloat17`"),
        ({"torch_dtype": 16}, None, "`torch_dtype`"),
        ({}, "float16", "`float16`"),
        ({}, "int8", "`int8`"),
    ],
)
def test_dtypes_that_are_refused(folder, config, asked, told):
    refused(write(folder, config={"torch_dtype": ..., **config}), told, dtype=asked)


def test_a_dtype_in_the_wrong_order_is_noticed(folder, monkeypatch):
    """The fault: the tensors' own type is taken, whatever the configuration says."""
    monkeypatch.setattr(dtypes, "said", lambda doc: None)
    with pytest.raises(AssertionError):
        test_dtype_rule(folder, {"torch_dtype": "bfloat16"}, "F32", None, "bfloat16", "`torch_dtype`")


def test_a_vision_models_settings_hold_for_its_text_part(folder):
    config, arrays = folders.nested(GEMMA | {"dtype": ...}, folders.tensors(GEMMA), old=True)
    config["text_config"].pop("dtype")
    config["torch_dtype"] = "bfloat16"
    checkpoint = hf.load(folders.write(folder, config, arrays))
    assert checkpoint.params.dtype == jnp.bfloat16 and checkpoint.end_ids == (1, 62)
