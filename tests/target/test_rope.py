"""Rope settings: read, applied or refused, and checked on the table of frequencies. Known failure covered: LD-14."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest

from jspec.target import (
    families,
    hf,
    rope,
)
from jspec.target.config import RopeConfig
from jspec.target.documents import Document
from tests.target.folders import CONFIGS
from tests.target.reading import refused, write

LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 1024}


def read_rope(settings, *, theta=10_000.0, positions=2048, **doc):
    return families.read_rope(Document(doc, "config.json"), settings, theta, 10_000.0, positions)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_llama3_frequencies_by_hand(key):
    table = rope.frequencies(read_rope({key: "llama3", **LLAMA3}), 8)
    np.testing.assert_allclose(table, [1, 0.1, 0.0030868, 0.000125], rtol=2e-5)
    # The fault: the settings are read under one key only, so the type is `default`.
    assert abs(rope.frequencies(RopeConfig(), 8)[2] - table[2]) > 0.005


def test_other_frequencies_by_hand():
    base = np.array([1, 0.1, 0.01, 0.001])
    check = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    check(rope.frequencies(read_rope(None), 8), base)
    check(rope.frequencies(read_rope({"type": "linear", "factor": 4}), 8), base / 4)
    # Twice the length at factor 4: theta grows by (4 * 2 - 3) ** (8 / 6).
    dynamic = read_rope({"type": "dynamic", "factor": 4})
    check(rope.frequencies(dynamic, 8), base)
    check(
        rope.frequencies(dataclasses.replace(dynamic, length=4096), 8),
        (1e4 * 5 ** (8 / 6)) ** -np.array([0, 0.25, 0.5, 0.75]),
    )
    # Original length 1024: pair i turns 1024 / 2 pi / 10 ** i times, that is 163, 16.3, 1.63 and 0.163 times.
    # beta_fast 32 lies at pair 0.707 and beta_slow 1 at pair 2.21, rounded to 0 and 3: thirds.
    yarn = read_rope({"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024})
    check(rope.frequencies(yarn, 8), base * (1 - 0.75 * np.array([0, 1 / 3, 2 / 3, 1])))
    assert yarn.scale == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_scales(settings, scale):
    assert read_rope({"rope_type": "yarn", "factor": 4.0, **settings}).scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "`longrope`"),
        ({"rope_scaling": {"type": "mrope"}}, "`mrope`"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "`type` as `linear`"),
        ({"rope_scaling": {"type": "linear"}}, "`factor`"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "`factor` as `0.5`"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "`beta_fast`"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "`low_freq_factor`"),
        ({"rope_scaling": {**LLAMA3, "type": "llama3", "high_freq_factor": 1}}, "low `1.0` and high `1.0`"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "`rope_theta` as `500000`"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, "differ"),
        ({"partial_rotary_factor": 0.5}, "`0.5` of each head"),
        ({"rope_theta": 0}, "`rope's theta`"),
        ({"rope_theta": float("inf")}, "not finite"),
        ({"rope_scaling": "linear"}, "an object"),
    ],
)
def test_rope_that_cannot_be_applied_is_refused(folder, config, told):
    refused(write(folder, config=config), told)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 4 * 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512}}, 8192),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"type": "llama3", **LLAMA3}}, 4096),
    ],
)
def test_longest_text(folder, config, longest):
    assert hf.load(write(folder, config=config)).config.max_positions == longest


def test_context_is_for_dynamic_rope(tmp_path):
    dynamic = write(tmp_path / "a", CONFIGS["llama-dynamic"])
    config = hf.load(dynamic, context=9000).config
    assert (config.max_positions, config.rope.length, config.rope.original) == (9000, 9000, 4096)
    assert hf.load(dynamic, context=10).config.max_positions == 4096
    refused(dynamic, "`context`", context=0)
    refused(write(tmp_path / "b"), "`context` is `9000`", "`default`", context=9000)
