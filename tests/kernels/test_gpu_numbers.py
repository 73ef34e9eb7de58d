"""The GPU kernel in its interpreter, against the reference.

JAX 0.10 keeps that interpreter private. It runs copies, barriers, masks and the softmax as they are; the
two products it is given are plain ones, since its own take no transposed operand. What the matrix unit
makes of them is a question for the compiler (`make aot`) and for a device.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("absl", reason="Mosaic GPU needs absl-py")

from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pallas_kernels.tree_attention import api, shapes
from tests.kernels.cases import case
from tests.kernels.test_lowering import lowered
from tests.kernels.test_numbers import TOLERANCE, program, shifted_differ

SMALL = [dataclasses.replace(s, key_block=64, dtype="bfloat16") for s in (shapes.SMALL[1], shapes.SMALL[2])]
WINDOW = dataclasses.replace(shapes.SMALL[5], rows=40)


@pytest.mark.parametrize("shape", [*SMALL, WINDOW], ids=shapes.Shape.name)
def test_numbers_are_the_reference_s(shape):
    run = program("gpu", shape.key_block, shape.cap, interpret=InterpretGPUParams())
    wanted = program("reference", shape.key_block, shape.cap)
    for seed, at in enumerate((0, shape.key_block - 1, shape.capacity - shape.rows)):
        call = case(shape, seed, [at, 1][: shape.slots])
        assert np.abs(np.asarray(run(*call)) - np.asarray(wanted(*call))).max() <= TOLERANCE[shape.dtype]


def test_a_token_s_bits_do_not_depend_on_its_row():
    run = program("gpu", 64, None, interpret=InterpretGPUParams())
    assert shifted_differ(lambda q, k, v, rows: run(q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16), rows)) == 0


@pytest.mark.parametrize("shape", [s for s in shapes.REAL if s.dtype == "bfloat16"], ids=shapes.Shape.name)
def test_lowers_for_cuda(shape):
    shape = shapes.for_gpu(shape)
    assert api.choose("auto", shape, "gpu").name == "gpu"
    assert "mosaic_gpu" in lowered("gpu", shape, "NVIDIA H200", "gpu", None)


def test_float32_and_wide_key_blocks_fall_back_with_a_reason():
    wide = api.choose("auto", shapes.REAL[0], "gpu")
    assert wide.name == "xla" and "key blocks of 256" in wide.reasons[1]
    single = api.choose("auto", dataclasses.replace(shapes.REAL[0], dtype="float32"), "gpu")
    assert single.name == "xla" and "TF32" in single.reasons[1]
