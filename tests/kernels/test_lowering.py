"""Every shape of the table is lowered for the device it is meant for, on a machine that has none."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.tree_attention import api, shapes


def arguments(shape):
    """Shapes and dtypes of one call."""
    s, struct = shape, jax.ShapeDtypeStruct
    cache = struct((s.slots, s.groups, s.capacity, s.width), jnp.dtype(s.dtype))
    rows = api.Rows(
        slot=struct((), jnp.int32),
        start=struct((s.slots,), jnp.int32),
        ancestors=struct((s.slots, s.rows, s.words), jnp.uint32),
        positions=struct((s.slots, s.rows), jnp.int32) if s.window else None,
        window=s.window,
    )
    return struct((s.slots, s.rows, s.heads, s.width), jnp.float32), cache, cache, rows


def lowered(name, shape, kind, platform, cores):
    """Text of one implementation's program for an abstract device."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    run = jax.jit(functools.partial(api.attend, name, key_block=shape.key_block, cap=shape.cap))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = run.trace(*arguments(shape))
        return traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,)).as_text()


@pytest.mark.parametrize("shape", shapes.REAL, ids=shapes.Shape.name)
def test_lowers_for_tpu(shape):
    assert api.choose("tpu", shape).name == "tpu"
    assert "tpu_custom_call" in lowered("tpu", shape, "TPU v5 lite", "tpu", 1)


def test_a_block_that_mosaic_refuses_is_refused_first():
    odd = shapes.Shape(heads=4, groups=2, width=64, capacity=60, key_block=20)
    with pytest.raises(ValueError, match="divisible by 8"):
        lowered("tpu", odd, "TPU v5 lite", "tpu", 1)
    with pytest.raises(api.Unsupported, match="key blocks of 20"):
        api.choose("tpu", odd)
