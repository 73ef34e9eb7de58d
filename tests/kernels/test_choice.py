"""Which implementation computes: explicit, printed with reasons, part of the engine's fingerprint."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import tree
from jspec.engine import static
from jspec.errors import JspecError
from jspec.target import cache as kv
from jspec.target.products import Products
from pallas_kernels.tree_attention import api, shapes
from tests import tiny


def test_auto_falls_back_in_order_with_reasons():
    real = shapes.REAL[0]
    assert api.choose("auto", real, "tpu") == api.Choice("tpu")
    here = api.choose("auto", real, "cpu")
    assert here.name == "xla" and [r.split(":")[0] for r in here.reasons] == list(api.ORDER[:-1])
    many = api.choose("auto", dataclasses.replace(real, rows=200), "tpu")
    assert many.name == "xla" and "200 rows" in many.reasons[0]


def test_a_name_never_falls_back():
    with pytest.raises(api.Unsupported, match="200 rows"):
        api.choose("tpu", dataclasses.replace(shapes.REAL[0], rows=200), "tpu")
    with pytest.raises(JspecError, match="200 rows"):
        tiny.engine(chunk=200, kernel="tpu").attention(jnp.float32)
    with pytest.raises(JspecError, match="`kernel`"):
        tiny.engine(kernel="cuda")


def test_a_kernel_of_another_device_is_refused_before_anything_runs():
    with pytest.raises(JspecError, match="`tpu`, and JAX runs on `cpu`"):
        static.init(tiny.engine(kernel="tpu"), tiny.NOBODY, tiny.params(), None)


def test_the_choice_is_part_of_the_fingerprint():
    auto, xla, reference = (tiny.engine(kernel=k).fingerprint(jnp.float32) for k in ("auto", "xla", "reference"))
    assert auto == xla != reference
    assert tiny.engine(rows=4).fingerprint(jnp.float32) != xla != tiny.engine().fingerprint(jnp.bfloat16)
    assert tiny.engine().fingerprint(jnp.float32, Products(left=16)) != xla
    assert tiny.engine().fingerprint(jnp.float32, Products(reason="another")) == xla


@pytest.mark.parametrize("kernel", ["reference", "tpu"])
def test_the_verify_program_runs_through_the_kernel(kernel):
    from jax.experimental.pallas import tpu as pltpu

    def logits(kernel):
        config = tiny.engine(kernel=kernel)
        cache = kv.init(config.target, config.slots, config.capacity, jnp.float32)
        cache = cache.replace(length=jnp.asarray([0, 3, 17], jnp.int32))
        block = tree.chain(
            jnp.arange(3, dtype=jnp.int32), jnp.full((3, 7), 5, jnp.int32), jnp.full((3,), 7, jnp.int32), 8
        )
        return np.asarray(static.verify(config, tiny.params(), cache, block)[0])

    with pltpu.force_tpu_interpret_mode():
        got = logits(kernel)
    assert np.abs(got - logits("xla")).max() < 1e-5
    program = jax.make_jaxpr(static.verify, static_argnums=(0,))
    config = tiny.engine(kernel=kernel)
    cache = kv.init(config.target, config.slots, config.capacity, jnp.float32)
    zero = jnp.zeros((3,), jnp.int32)
    block = tree.chain(zero, jnp.zeros((3, 7), jnp.int32), zero, 8)
    assert ("pallas_call" in str(program(config, tiny.params(), cache, block))) == (kernel == "tpu")
