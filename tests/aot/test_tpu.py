"""Compiled for TPUs that are not there, by the real compiler: `make aot`."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

pytest.importorskip("libtpu", reason="the extra `aot` is not installed: make aot")

from bench import aot, compiler_reports, kernels, peer_attention
from jspec.decoding import sampling
from jspec.engine.config import EngineConfig
from jspec.target import attention, model, products
from pallas_kernels import checks
from pallas_kernels.tree_attention import shapes

ENGINE = EngineConfig(
    target=dataclasses.replace(aot.QWEN3_4B, layers=2), slots=2, rows=8, max_length=1000, key_block=256, kernel="tpu"
)
LAYER = ENGINE.slots * ENGINE.target.kv_heads * ENGINE.capacity * ENGINE.target.head_width
ONE_LAYER = dataclasses.replace(ENGINE.target, layers=1)


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


def test_schedules_come_from_a_process_of_their_own():
    shape = shapes.REAL[0]
    wide = dataclasses.replace(shape, key_block=512)
    found = aot.schedules(["v5e", "sm_90a"], [shape, wide, dataclasses.replace(shape, rows=200)])
    assert set(found) == {("v5e", shape.name()), ("v5e", wide.name())}
    one, other = found.values()
    assert 0 < one.step < other.step < 2 * one.step  # a wider block: more a step, and fewer steps


@pytest.mark.parametrize(("name", "shape"), [("jax ragged_paged", shapes.REAL[0]), ("jax flash", shapes.REAL[6])])
def test_the_peers_of_the_bench_compile(name, shape, monkeypatch):
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

    monkeypatch.setattr(tuned_block_sizes, "get_tpu_version", lambda: 5)  # it asks the device that is there
    peer = peer_attention.PEERS[name]
    assert peer_attention.refuses(peer, shape, "tpu") is None
    call = jax.eval_shape(lambda: peer.prepare(shape, *kernels.arguments(shape)))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        lowered = aot.Chip("v5e").lower(jax.jit(peer.run(shape)), *call)
    assert "tpu_custom_call" in lowered.compile().as_text()


def test_a_whole_round_passes_the_static_checks():
    lowered, cache, _ = aot.lower_round(aot.Chip("v5e"), ENGINE)
    compiled = lowered.compile()
    found = aot.check_round(lowered, compiled, ENGINE, cache)
    assert not any(found.values()), found
    assert "tpu_custom_call" in compiled.as_text() and compiler_reports.vmem(compiled.as_text()) < 16 << 20


def test_a_round_that_keeps_its_old_state_is_caught():
    lowered, cache, _ = aot.lower_round(aot.Chip("v5e"), ENGINE, donate=False)
    found = aot.check_round(lowered, lowered.compile(), ENGINE, cache)
    assert found["missing_donation"] and found["large_copies"]


def test_batched_writes_and_a_sorted_vocabulary_are_caught(monkeypatch):
    def batched(cache, rows, columns):
        rows = rows.transpose(0, 2, 1, 3).astype(cache.dtype)
        return jax.vmap(lambda c, r, s: lax.dynamic_update_slice(c, r, (0, s, 0)))(cache, rows, columns.start)

    monkeypatch.setattr(attention, "write", batched)
    monkeypatch.setattr(sampling, "first_largest", lambda x: jnp.argsort(x, axis=-1)[..., -1].astype(jnp.int32))
    lowered, *_ = aot.lower_round(aot.Chip("v5e"), dataclasses.replace(ENGINE, target=ONE_LAYER))
    before = lowered.as_text("hlo")  # the compiler makes loops of such scatters, and takes minutes for such sorts
    assert checks.scatters(before, LAYER) and checks.sorts(before, ENGINE.target.vocab_size)


def test_faults_that_the_source_shows_are_caught(monkeypatch):
    chip = aot.Chip("v5e")
    single = dataclasses.replace(ENGINE, target=ONE_LAYER, slots=1, rows=5)
    lowered, *_ = aot.lower_round(chip, single)
    assert checks.unpadded_rows(lowered.as_text()) and not checks.droppable_roundings(lowered.as_text())
    monkeypatch.setattr(model, "rounded", lambda x, dtype: x.astype(dtype))
    monkeypatch.setattr(
        products, "multiply", lambda x, w, form: jnp.dot(x.astype(jnp.float32), w.T.astype(jnp.float32))
    )
    lowered, *_ = aot.lower_round(chip, single)
    assert checks.droppable_roundings(lowered.as_text()) and checks.inexact_dots(lowered.as_text())


def in_groups(x):
    """The fault: the CPU's search for a maximum, whose groups of 64 a TPU stores as 128."""
    grouped = x.reshape(*x.shape[:-1], -1, sampling.GROUP)
    group = jnp.argmax(jnp.max(grouped, axis=-1), axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(grouped, group[..., None, None], axis=-2)[..., 0, :]
    return group * sampling.GROUP + jnp.argmax(inside, axis=-1).astype(jnp.int32)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "argmax in groups"])
def test_the_choice_holds_the_logits_a_few_times(monkeypatch, fault):
    if fault:
        monkeypatch.setattr(sampling, "first_largest", in_groups)
    config = dataclasses.replace(ENGINE, target=ONE_LAYER, slots=8, rows=32)
    compiled = aot.lower_round(aot.Chip("v5e"), config)[0].compile()
    logits = 8 * 32 * config.target.vocab_size * 4
    assert (compiled.memory_analysis().temp_size_in_bytes > 6 * logits) == fault
