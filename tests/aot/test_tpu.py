"""Compiled for TPUs that are not there, by the real compiler: `make aot`."""

import dataclasses

import pytest

pytest.importorskip("libtpu", reason="the extra `aot` is not installed: make aot")

from bench import aot
from jspec.engine.config import EngineConfig
from pallas_kernels import checks
from pallas_kernels.tree_attention import shapes

ENGINE = EngineConfig(
    target=dataclasses.replace(aot.QWEN3_4B, layers=2), slots=2, rows=8, max_length=1000, key_block=256, kernel="tpu"
)
LAYER = ENGINE.slots * ENGINE.target.kv_heads * ENGINE.capacity * ENGINE.target.head_width


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "v7x"])
def test_every_shape_compiles(chip):
    chip = aot.Chip(chip)
    for shape in (*shapes.SMALL, *shapes.REAL):
        _, compiled = aot.compile_kernel(chip, "tpu", shape)
        assert compiled.memory_analysis().argument_size_in_bytes >= shape.cache_bytes


def test_a_step_too_large_is_refused_by_us_and_by_the_compiler():
    shape = shapes.Shape(rows=8, heads=8, groups=1, width=256, capacity=32768, key_block=32768)
    assert "MiB" in aot.api.module("tpu").refuses(shape)
    with pytest.raises(Exception, match=r"(?i)vmem"):
        aot.compile_kernel(aot.Chip("v5e"), "tpu", shape)


def test_a_whole_round_passes_the_static_checks():
    lowered, compiled, cache, _ = aot.compile_round(aot.Chip("v5e"), ENGINE)
    found = checks.check(
        lowered, compiled, cache_bytes=cache, layer_elements=LAYER, vocabulary=ENGINE.target.vocab_size
    )
    assert not any(found.values()), found
    assert "tpu_custom_call" in compiled.as_text()


def test_a_round_that_keeps_its_old_state_is_caught():
    _, compiled, cache, _ = aot.compile_round(aot.Chip("v5e"), ENGINE, donate=False)
    assert checks.missing_donation(compiled, cache)
    assert checks.large_copies(compiled.as_text())
