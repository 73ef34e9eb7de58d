"""The static checks find what they look for: each is shown a program with the fault and one without."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jspec.decoding import round as rounds
from jspec.decoding import sampling
from jspec.drafters.ngram import NGram
from jspec.engine import static
from jspec.target import attention, model
from jspec.target.cache import pack
from pallas_kernels import checks
from pallas_kernels.tree_attention import shapes, tpu
from tests import tiny
from tests.kernels.test_lowering import lowered

CACHE = jax.ShapeDtypeStruct((4, 2, 1024, 64), jnp.float32)  # 2 MiB
ROWS = jax.ShapeDtypeStruct((4, 2, 8, 64), jnp.float32)
START = jax.ShapeDtypeStruct((4,), jnp.int32)
ELEMENTS = 4 * 2 * 1024 * 64


def built(program, *args, **options):
    """Lowered and compiled."""
    lowered = jax.jit(program, **options).lower(*args)
    return lowered, lowered.compile()


def sliced(cache, rows, start):
    """The right update: one slice a slot."""
    for r in range(4):
        cache = lax.dynamic_update_slice(cache, rows[r : r + 1], (r, 0, start[r], 0))
    return cache


def batched(cache, rows, start):
    """The fault: a batched update, which becomes a scatter."""
    return jax.vmap(lambda c, r, s: lax.dynamic_update_slice(c, r, (0, s, 0)))(cache, rows, start)


def test_inexact_products():
    x, w = jnp.ones((8, 64)), jnp.ones((64, 64))
    exact, _ = built(lambda x, w: jnp.dot(x, w, precision="highest"), x, w)
    quick, _ = built(jnp.dot, x, w)
    half, _ = built(
        lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32), x.astype("bfloat16"), w.astype("bfloat16")
    )
    assert len(checks.inexact_dots(quick.as_text())) == 1
    assert checks.inexact_dots(exact.as_text()) == checks.inexact_dots(half.as_text()) == []


def test_copies_of_a_cache():
    _, moved = built(lambda c: jnp.swapaxes(c, 1, 2) + 0, CACHE)
    _, kept = built(lambda c: c + 1, CACHE)
    assert checks.large_copies(moved.as_text()) and not checks.large_copies(kept.as_text())


def test_donation():
    _, given = built(sliced, CACHE, ROWS, START, donate_argnums=0)
    _, lent = built(sliced, CACHE, ROWS, START)
    assert not checks.missing_donation(given, 4 * ELEMENTS)
    assert checks.missing_donation(lent, 4 * ELEMENTS)
    assert checks.large_copies(lent.as_text()) and not checks.large_copies(given.as_text())


def test_scatters():
    right, fault = (jax.jit(f).lower(CACHE, ROWS, START).as_text("hlo") for f in (sliced, batched))
    assert checks.scatters(fault, ELEMENTS) and not checks.scatters(right, ELEMENTS)


def test_sorts_over_the_vocabulary():
    logits = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
    _, fault = built(lambda x: jnp.sort(x, axis=-1), logits)
    _, right = built(lambda x: jnp.max(x, axis=-1), logits)
    assert checks.sorts(fault.as_text(), 4096) and not checks.sorts(right.as_text(), 4096)


def lowered_round(rows=8, slots=1, dtype=jnp.bfloat16):
    """A whole round of the tiny target, as it is given to a compiler."""
    config, drafter = tiny.engine(slots, rows=rows), NGram(proposals=rows - 1)
    params = tiny.params(dtype)
    state = static.init(config, drafter, params, None)
    program = jax.jit(lambda params, state: rounds.round(config, drafter, params, None, state))
    return config, program.lower(params, state)


def round_text(**shape):
    return lowered_round(**shape)[1].as_text()


def test_roundings_that_xla_may_leave_out():
    x = jnp.ones((8, 128))
    fault = jax.jit(lambda x: jnp.isfinite(x.T.astype(jnp.bfloat16)))
    back = jax.jit(lambda x: x.astype(jnp.bfloat16).reshape(-1).astype(jnp.float32) * 2)
    called = jax.jit(lambda x: jnp.pad(x.astype(jnp.bfloat16), ((0, 1), (0, 0))).astype(jnp.float32))
    right = jax.jit(lambda x: jnp.isfinite(lax.reduce_precision(x, 8, 7)))
    kept = jax.jit(lambda x: jnp.dot(x.astype(jnp.bfloat16), x.T.astype(jnp.bfloat16)))
    assert len(checks.droppable_roundings(fault.lower(x).as_text())) == 1
    assert len(checks.droppable_roundings(back.lower(x).as_text())) == 1
    assert len(checks.droppable_roundings(called.lower(x).as_text())) == 1
    assert not checks.droppable_roundings(right.lower(x).as_text())
    assert not checks.droppable_roundings(kept.lower(x).as_text())


@pytest.mark.parametrize("dtype", tiny.DTYPES)
def test_a_round_leaves_no_rounding_to_the_compiler(dtype, monkeypatch):
    assert not checks.droppable_roundings(round_text(dtype=dtype))
    if dtype == jnp.bfloat16:
        # The fault that stood there: a GPU judged keys before they were rounded to what the cache holds.
        monkeypatch.setattr(model, "rounded", lambda x, dtype: x.astype(dtype))
        found = checks.droppable_roundings(round_text())
        assert len(found) == 2 * tiny.T.layers and all("is_finite" in line for line in found)


def test_rows_that_fill_no_tile():
    assert not checks.unpadded_rows(round_text(rows=8))
    fault = checks.unpadded_rows(round_text(rows=5))
    assert fault and all(line.startswith("5 rows") for line in fault)


def test_kernels_pad_their_rows(monkeypatch):
    shape = dataclasses.replace(shapes.REAL[0], rows=5)  # 4 query heads a group: 20 rows
    monkeypatch.setattr(tpu, "round_up", lambda x, unit: x)
    fault = lowered("tpu", shape, "TPU v5 lite", "tpu", 1)
    assert checks.unpadded_rows(fault) == ["tpu_custom_call of 20 rows"]
    monkeypatch.undo()
    assert not checks.unpadded_rows(lowered("tpu", shape, "TPU v5 lite", "tpu", 1))
    pytest.importorskip("absl", reason="Mosaic GPU needs absl-py")
    text = lowered("gpu", shapes.for_gpu(shape), "NVIDIA H200", "gpu", None)
    assert "mosaic_gpu" in text and not checks.unpadded_rows(text)
    assert checks.unpadded_rows(text.replace("x64x128x", "x20x128x")) == ["mosaic_gpu_v2 of 20 rows"]


@pytest.mark.parametrize(
    "line",
    [
        '%y = (f32[16,64], s8[4096]) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul"',
        '%y = f32[16,64] fusion(%x, %w), kind=kCustom, backend_config={"kind":"__triton_nested_gemm_fusion"}',
        '%y = f32[16,64] fusion(%x, %w), kind=kCustom, backend_config={"kind":"__triton_gemm"}',
    ],
)
def test_choices_by_timing_that_nobody_keeps(line):
    other = '%z = f32[8] fusion(%x), kind=kCustom, backend_config={"kind":"__triton"}'
    assert len(checks.unkept_tuning(f"{line}\n{other}", kept=False)) == 1
    assert not checks.unkept_tuning(f"{line}\n{other}", kept=True)


def test_a_round_writes_slices_and_sorts_nothing(monkeypatch):
    config, right = lowered_round(slots=2)
    layer = config.slots * tiny.T.kv_heads * config.capacity * tiny.T.head_width // 2  # two numbers in a word
    before = right.as_text("hlo")
    assert not checks.scatters(before, layer) and not checks.sorts(before, tiny.T.vocab_size)

    def write(cache, rows, columns):
        return batched(cache, pack(rows.transpose(0, 2, 1, 3), cache.dtype), columns.start)

    monkeypatch.setattr(attention, "write", write)
    monkeypatch.setattr(sampling, "first_largest", lambda x: jnp.argsort(x, axis=-1)[..., -1].astype(jnp.int32))
    before = lowered_round(slots=2)[1].as_text("hlo")
    assert len(checks.scatters(before, layer)) == 2 * tiny.T.layers and checks.sorts(before, tiny.T.vocab_size)
