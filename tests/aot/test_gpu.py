"""Compiled to sm_90a on a machine without a GPU: `make aot`."""

import contextlib
import dataclasses
import re

import jax
import pytest

pytest.importorskip("jax_plugins.xla_cuda12", reason="the CUDA plugin is not installed: make aot")

from bench import aot, compiler_reports
from jspec.engine.config import EngineConfig
from jspec.target import model
from pallas_kernels.tree_attention import gpu, shapes

ENGINE = EngineConfig(
    target=dataclasses.replace(aot.QWEN3_4B, layers=2), slots=2, rows=8, max_length=1000, key_block=128, kernel="gpu"
)
REAL = [shapes.for_gpu(s) for s in shapes.REAL if s.dtype == "bfloat16"]


@pytest.mark.parametrize("shape", REAL, ids=shapes.Shape.name)
def test_compiles_without_spills(shape):
    with compiler_reports.said() as told:
        aot.compile_kernel(aot.Chip("sm_90a"), "gpu", shape)
    found = compiler_reports.assembled(told[0])
    assert 0 < found.pop("registers") <= 255
    assert found == {"spilled": 0, "serialized": 0}  # ptxas's word for matrix products that wait for each other


def test_too_much_shared_memory_is_refused_by_us_and_by_the_compiler():
    shape = dataclasses.replace(REAL[0], width=256, key_block=128)
    assert "shared memory" in (gpu.refuses(shape) or "")
    with pytest.raises(Exception, match=r"(?i)shared memory|smem"):
        aot.compile_kernel(aot.Chip("sm_90a"), "gpu", shape)


def test_a_whole_round_passes_the_static_checks():
    lowered, cache, _ = aot.lower_round(aot.Chip("sm_90a"), ENGINE)
    compiled = lowered.compile()
    found = aot.check_round(lowered, compiled, ENGINE, cache)
    assert not any(found.values()), found
    hlo = compiled.as_text()
    assert hlo.count("mosaic_gpu_v2") == ENGINE.target.layers
    assert "reduce-precision(" in hlo
    # The same program in a process that keeps no choices (DT-5).
    with jax_caches("none"):
        assert aot.check_round(lowered, compiled, ENGINE, cache)["unkept_tuning"]


def test_this_compiler_leaves_roundings_out(monkeypatch):
    # What the check is for: judged before it is rounded, a key of 3.4e38 would be written as an infinity.
    monkeypatch.setattr(model, "rounded", lambda x, dtype: x.astype(dtype))
    config = dataclasses.replace(ENGINE, target=dataclasses.replace(ENGINE.target, layers=1))
    lowered, cache, _ = aot.lower_round(aot.Chip("sm_90a"), config)
    compiled = lowered.compile()
    assert aot.check_round(lowered, compiled, config, cache)["droppable_roundings"]
    hlo = compiled.as_text()
    types = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", hlo))
    judged = [types[name] for name in re.findall(r"is-finite\((%[\w.-]+)\)", hlo)]
    assert judged and set(judged) == {"f32"} and "reduce-precision(" not in hlo


@contextlib.contextmanager
def jax_caches(kinds):
    """JAX's choice of what else to keep beside its compiled programs."""
    before = jax.config.values["jax_persistent_cache_enable_xla_caches"]
    jax.config.update("jax_persistent_cache_enable_xla_caches", kinds)
    yield
    jax.config.update("jax_persistent_cache_enable_xla_caches", before)
