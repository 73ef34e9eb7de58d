"""The TPU kernel in the interpreter that knows memory: races, bounds, what was never written.

Each check has its planted fault: a detector that finds nothing anywhere proves nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention import api, shapes
from tests.kernels.cases import case
from tests.kernels.test_numbers import TOLERANCE, program

MEMORY = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, random_seed=0)


@pytest.fixture(autouse=True)
def clean_state():
    yield
    pltpu.reset_tpu_interpret_mode_state()


def raced(capfd, run) -> bool:
    """Whether a run raced: an exception in newer versions of JAX, a printed line in older ones."""
    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as e:
        if "RACE DETECTED" not in str(e):
            raise
        return True
    captured = capfd.readouterr()
    return "RACE DETECTED" in captured.out + captured.err


@pytest.mark.parametrize("shape", [shapes.SMALL[0], shapes.SMALL[4]], ids=shapes.Shape.name)
def test_no_race_no_stray_read(shape, capfd):
    call = case(shape, 3, [shape.key_block - 1, 0][: shape.slots], np.nan)
    got = []
    run = functools.partial(api.attend, "tpu", key_block=shape.key_block, cap=shape.cap, interpret=MEMORY)
    assert not raced(capfd, lambda: got.append(run(*call)) or got)
    wanted = program("reference", shape.key_block, shape.cap)(*call)
    assert np.abs(np.asarray(got[0]) - np.asarray(wanted)).max() <= TOLERANCE[shape.dtype]


def planted(kernel, index, semantics, interpret=MEMORY, scratch=()):
    """A tiny kernel with a fault: two steps over blocks of `x [2, 8, 128]`."""
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        grid=(2,),
        in_specs=[pl.BlockSpec((None, 8, 128), index)],
        out_specs=pl.BlockSpec((8, 128), lambda j: (0, 0)),
        scratch_shapes=list(scratch),
        compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
        interpret=interpret,
    )(jnp.ones((2, 8, 128), jnp.float32))


def test_a_planted_race_is_caught(capfd):
    def kernel(x, out):
        out[...] = jnp.where(pl.program_id(0) == 0, jnp.float32(0), out[...]) + x[...]

    # Blocks are summed into one output by steps that are said to be independent.
    assert raced(capfd, lambda: planted(kernel, lambda j: (j, 0, 0), "parallel"))


def test_a_planted_block_past_the_end_is_caught():
    def kernel(x, out):
        out[...] = x[...]

    with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds"):
        jax.block_until_ready(planted(kernel, lambda j: (j + 1, 0, 0), "arbitrary", pltpu.InterpretParams()))


def test_a_planted_uninitialised_read_is_caught():
    def kernel(x, out, scratch):
        out[...] = x[...] + scratch[...]

    scratch = [pltpu.VMEM((8, 128), jnp.float32)]
    out = planted(kernel, lambda j: (j, 0, 0), "arbitrary", pltpu.InterpretParams(), scratch)
    assert np.isnan(np.asarray(out)).all()
