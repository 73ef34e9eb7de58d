"""Compiled to sm_90a on a machine without a GPU: `make aot`."""

import dataclasses

import pytest

pytest.importorskip("jax_plugins.xla_cuda12", reason="the CUDA plugin is not installed: make aot")

from bench import aot
from pallas_kernels.tree_attention import gpu, shapes

REAL = [shapes.for_gpu(s) for s in shapes.REAL if s.dtype == "bfloat16"]


def compiler_says(capfd, shape) -> str:
    """What ptxas printed about one kernel."""
    capfd.readouterr()
    aot.compile_kernel(aot.Chip("sm_90a"), "gpu", shape)
    captured = capfd.readouterr()
    return captured.out + captured.err


@pytest.mark.parametrize("shape", REAL, ids=shapes.Shape.name)
def test_compiles_without_spills(shape, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    said = compiler_says(capfd, shape)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "serialized" not in said  # ptxas's word for matrix products that wait for each other


def test_too_much_shared_memory_is_refused_by_us_and_by_the_compiler():
    shape = dataclasses.replace(REAL[0], width=256, key_block=128)
    assert "shared memory" in (gpu.refuses(shape) or "")
    with pytest.raises(Exception, match=r"(?i)shared memory|smem"):
        aot.compile_kernel(aot.Chip("sm_90a"), "gpu", shape)
