"""The Hugging Face reader on tiny folders: what it decides, what it refuses, what it tells.

Known failures covered: LD-1 and LD-5 to LD-11, LD-14, LD-15 (target half). Each rule's test is followed by,
or holds, the fault that it is there for, planted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.target import cache as kv
from jspec.target import (
    describe,
    dtypes,
    families,
    hf,
    hf_tokenizer,
    known,
    loading,
    memory,
    model,
    plan,
    rope,
    shards,
    weights,
)
from jspec.target.config import RopeConfig, TargetConfig
from jspec.target.documents import Document
from tests.target import folders
from tests.target.folders import CONFIGS, V

LLAMA, TIED, GEMMA, MOE = CONFIGS["llama"], CONFIGS["llama-linear"], CONFIGS["gemma3"], CONFIGS["qwen3_moe"]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "tiny"


def write(
    folder: pathlib.Path,
    base: dict[str, Any] = LLAMA,
    *,
    config: dict[str, Any] | None = None,
    arrays: folders.Arrays | None = None,
    remove: tuple[str, ...] = (),
    **rest: Any,
) -> pathlib.Path:
    """A checkpoint with changes: keys of its configuration (`...` removes one), weights left out or replaced."""
    merged = {key: value for key, value in (base | (config or {})).items() if value is not ...}
    arrays = folders.tensors(base) if arrays is None else arrays
    return folders.write(folder, merged, {name: a for name, a in arrays.items() if name not in remove}, **rest)


def refused(folder: pathlib.Path, *told: str, **settings: Any) -> str:
    with pytest.raises(JspecError) as error:
        hf.load(folder, **settings)
    for part in told:
        assert part in str(error.value)
    return str(error.value)


def notes(checkpoint: Any) -> str:
    return "\n".join(checkpoint.notes)


# --- Weights -------------------------------------------------------------------------------------


def test_every_weight_arrives_where_it_belongs(folder):
    w = folders.tensors(CONFIGS["llama-biased"])
    checkpoint = hf.load(write(folder, CONFIGS["llama-biased"]))
    c, params = checkpoint.config, checkpoint.params
    assert c == TargetConfig(
        family="llama",
        vocab_size=V,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_width=16,
        ff_width=64,
        max_positions=4096,
        qkv_bias=True,
        out_bias=True,
        ff_bias=True,
        tied_head=False,
    )
    np.testing.assert_array_equal(params.embed, w["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params.head, w["lm_head.weight"])
    np.testing.assert_array_equal(params.final_norm, w["model.norm.weight"])
    for i, layer in enumerate(params.layers):
        m = f"model.layers.{i}."
        a = m + "self_attn."
        for kind, made in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            np.testing.assert_array_equal(made, np.concatenate([w[f"{a}{x}_proj.{kind}"] for x in "qkv"]))
        for kind, made in (("weight", layer.gate_up), ("bias", layer.gate_up_bias)):
            np.testing.assert_array_equal(made, np.concatenate([w[f"{m}mlp.{x}_proj.{kind}"] for x in ("gate", "up")]))
        np.testing.assert_array_equal(layer.attn_norm, w[m + "input_layernorm.weight"])
        np.testing.assert_array_equal(layer.ff_norm, w[m + "post_attention_layernorm.weight"])
        np.testing.assert_array_equal(layer.out, w[a + "o_proj.weight"])
        np.testing.assert_array_equal(layer.out_bias, w[a + "o_proj.bias"])
        np.testing.assert_array_equal(layer.down, w[m + "mlp.down_proj.weight"])
        np.testing.assert_array_equal(layer.down_bias, w[m + "mlp.down_proj.bias"])
    assert (checkpoint.name, checkpoint.source, checkpoint.license) == ("tiny", str(folder), None)


@pytest.mark.parametrize("name", CONFIGS)
def test_random_weights_have_the_shapes_of_the_checkpoint(folder, name):
    """`model.init` and the reader agree on what a configuration's weights are, and memory counts them."""
    checkpoint = hf.load(write(folder, CONFIGS[name]), context=folders.CONTEXT.get(name))
    c = checkpoint.config
    abstract = jax.eval_shape(lambda: model.init(jax.random.key(0), c, jnp.float32))
    jax.tree.map(
        lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), abstract, checkpoint.params
    )
    linear = sum(x.nbytes for x in jax.tree.leaves(checkpoint.params) if x.ndim > 1)
    routers = sum(layer.experts.router.nbytes for layer in checkpoint.params.layers if layer.experts is not None)
    assert memory.of_config(c, np.dtype(np.float32)) == linear - routers


def test_fingerprints_tell_checkpoints_apart(tmp_path):
    first, second = hf.load(write(tmp_path / "a")), hf.load(write(tmp_path / "b", shards=2))
    arrays = folders.tensors(LLAMA)
    arrays["model.norm.weight"][7] += 1
    third = hf.load(write(tmp_path / "c", arrays=arrays))
    fourth = hf.load(write(tmp_path / "d", config={"rope_theta": 1e4}))
    assert len({x.fingerprint for x in (first, second, third, fourth)}) == 4
    assert first.fingerprint == hf.load(write(tmp_path / "e")).fingerprint


@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_rounded_once(folder, stored, dtype):
    w = folders.tensors(LLAMA)
    params = hf.load(write(folder, dtype=stored), dtype=dtype).params
    kept = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}[stored]
    wanted = w["model.layers.1.mlp.down_proj.weight"].astype(kept).astype(dtypes.DTYPES[dtype])
    np.testing.assert_array_equal(params.layers[1].down, wanted)
    assert params.dtype == params.head.dtype == params.layers[0].qkv.dtype == jnp.dtype(dtype)
    assert params.final_norm.dtype == params.layers[0].attn_norm.dtype == jnp.float32
    np.testing.assert_array_equal(params.final_norm, w["model.norm.weight"].astype(kept).astype(np.float32))


def test_large_tensors_are_read_in_pieces(folder, monkeypatch):
    whole = hf.load(write(folder, GEMMA, dtype="BF16")).params
    monkeypatch.setattr(weights, "CHUNK", 7)
    jax.tree.map(np.testing.assert_array_equal, hf.load(folder).params, whole)


@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("float32", np.inf), ("bfloat16", 3.4e38)])
def test_weights_that_are_not_finite(folder, dtype, value):
    arrays = folders.tensors(LLAMA)
    arrays["model.layers.1.self_attn.v_proj.weight"][3, 5] = value
    refused(write(folder, arrays=arrays), "v_proj.weight", f"`{dtype}`", dtype=dtype)


# --- LD-1: end ids -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [61, 62]}, {"eos_token_id": 61}, (61, 62)),
        ({"eos_token_id": 62}, {"eos_token_id": 61}, (62,)),
        (None, {"eos_token_id": 61}, (61,)),
        (None, {"eos_token_id": [61, 62]}, (61, 62)),
        ({"temperature": 0.6}, {"eos_token_id": 61}, (61,)),
        ({"eos_token_id": None}, {"eos_token_id": 61}, (61,)),
        (None, {"eos_token_id": None}, ()),
        (None, {}, ()),
    ],
)
def test_end_ids(folder, generation, config, ends):
    checkpoint = hf.load(write(folder, config=config, generation=generation))
    assert checkpoint.end_ids == ends and checkpoint.tokenizer.end_ids == ends


@pytest.mark.parametrize("bad", [64, -1, [62, 64], "62", True, [[62]], 10**30])
@pytest.mark.parametrize("where", ["generation", "config"])
def test_end_ids_outside_the_vocabulary(folder, bad, where):
    changes = {where: {"eos_token_id": bad}}
    file = "generation_config.json" if where == "generation" else "config.json"
    refused(write(folder, **changes), f"`{file}`", "`eos_token_id`", "0 to 63")


def test_one_end_id_of_several_is_not_enough(folder, monkeypatch):
    """The fault: config.json alone is asked."""
    write(folder, config={"eos_token_id": 61}, generation={"eos_token_id": [61, 62]})
    monkeypatch.setattr(hf, "GENERATION", "no such file")
    assert 62 not in hf.load(folder).end_ids


# --- LD-6, LD-7: what belongs to the family ------------------------------------------------------


def test_norm_offset_and_embedding_scale_follow_the_family(tmp_path):
    """known-failures LD-7: a stored 0 is Gemma's one, a stored 1 is Llama's."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32)), jnp.float32)
    unit = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    for name in CONFIGS:
        gemma = name.startswith("gemma")
        arrays = folders.tensors(CONFIGS[name])
        for tensor in arrays:
            if "norm" in tensor:
                arrays[tensor][:] = 0.0 if gemma else 1.0
        checkpoint = hf.load(write(tmp_path / name, CONFIGS[name], arrays=arrays), context=folders.CONTEXT.get(name))
        params, config = checkpoint.params, checkpoint.config
        for layer in params.layers:
            for norm in (layer.attn_norm, layer.ff_norm, layer.attn_out_norm, layer.ff_out_norm, params.final_norm):
                if norm is not None:
                    np.testing.assert_allclose(model.rms_norm(unit, norm, config.norm_eps), unit, atol=1e-4)
            for norm in (layer.q_norm, layer.k_norm):
                if norm is not None:
                    np.testing.assert_array_equal(norm, np.ones_like(norm))
        started = model.embed(params, config, jnp.asarray([3]))[0] / params.embed[3]
        np.testing.assert_allclose(started, math.sqrt(32) if gemma else 1.0, rtol=1e-6)


def test_the_embedding_scale_is_rounded_with_the_weights(folder):
    checkpoint = hf.load(write(folder, GEMMA), dtype="bfloat16")
    started = model.embed(checkpoint.params, checkpoint.config, jnp.asarray([3]))[0]
    np.testing.assert_array_equal(started, checkpoint.params.embed[3].astype(jnp.float32) * np.float32(5.65625))


def test_a_forgotten_norm_offset_is_noticed(tmp_path, monkeypatch):
    """The fault: the offset of one generation of a family is lost with the next."""
    monkeypatch.setitem(
        families.FAMILIES, "gemma3_text", dataclasses.replace(families.FAMILIES["gemma3_text"], norm_plus=0.0)
    )
    with pytest.raises(AssertionError):
        test_norm_offset_and_embedding_scale_follow_the_family(tmp_path)


def test_rope_of_each_layer_kind(folder):
    """known-failures LD-6; the numbers are compared in `test_parity.py`."""
    config = hf.load(write(folder, GEMMA)).config
    assert config.windowed == (0, 1) and config.window == 37 and config.max_positions == 4096
    assert config.rope_of(2) == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert config.rope_of(0) == config.rope_of(1) == RopeConfig(theta=1e4)


# --- LD-8: tied heads ----------------------------------------------------------------------------


def hidden_logits(checkpoint):
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, 32)), jnp.float32)
    return np.asarray(model.logits(checkpoint.params, hidden))


def test_a_tied_head_is_the_embedding(tmp_path):
    before = hf.load(write(tmp_path / "a", TIED))
    assert before.params.head is None
    arrays = folders.tensors(TIED)
    arrays["model.embed_tokens.weight"][3] *= 10
    small, large = hidden_logits(before), hidden_logits(hf.load(write(tmp_path / "b", TIED, arrays=arrays)))
    np.testing.assert_allclose(large[..., 3], 10 * small[..., 3], rtol=1e-5)
    np.testing.assert_array_equal(np.delete(large, 3, -1), np.delete(small, 3, -1))


def test_a_tied_head_is_not_kept_twice(folder):
    params = hf.load(write(folder, TIED)).params
    linear = sum(math.prod(s) for s in folders.shapes(TIED).values()) * 4
    assert sum(x.nbytes for x in jax.tree.leaves(params)) == linear


def test_a_stored_copy_of_the_embedding_is_told_and_left(folder):
    arrays = folders.tensors(TIED)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    checkpoint = hf.load(write(folder, TIED, arrays=arrays))
    assert checkpoint.params.head is None and "lm_head.weight" in notes(checkpoint)


def test_a_head_that_contradicts_being_tied(folder):
    arrays = folders.tensors(TIED)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"] + 1
    write(folder, TIED, arrays=arrays)
    refused(folder, "`lm_head.weight` differs", "tie_word_embeddings")


def test_an_untied_model_needs_its_head(folder):
    """The fault: a head that is not stored stays at its random start."""
    refused(write(folder, remove=("lm_head.weight",)), "missing: `lm_head.weight` [64, 32]")


# --- LD-9, LD-10, LD-11: index and shards --------------------------------------------------------

INDEX = shards.INDEX


def edit_index(folder: pathlib.Path, change: Any) -> None:
    document = json.loads((folder / INDEX).read_text())
    change(document["weight_map"])
    (folder / INDEX).write_text(json.dumps(document))


@pytest.fixture
def no_reading(monkeypatch):
    monkeypatch.setattr(weights, "_fill", lambda *_: pytest.fail("a weight was read"))


def test_every_missing_shard_is_named_before_anything_is_read(folder, no_reading):
    write(folder, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    edit_index(folder, lambda where: where.update({"x": "model-00009-of-00003.safetensors"}))
    refused(folder, "`model-00002-of-00003.safetensors`", "`model-00009-of-00003.safetensors`")


def test_a_missing_shard_without_the_check(folder, monkeypatch):
    """The fault: what is not there is skipped. The comparison with the plan still stands in the way."""
    write(folder, shards=2)
    edit_index(folder, lambda where: [where.pop(t) for t, f in list(where.items()) if "00002-of" in f])
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "missing: ")
    monkeypatch.setattr(plan, "check", lambda *_: ([], None))
    with pytest.raises(KeyError):
        hf.load(folder)


def test_the_index_decides(folder):
    """known-failures LD-10: a stray file of zeros beside the shards."""
    write(folder, shards=2)
    zeros = {name: np.zeros_like(array) for name, array in folders.tensors(LLAMA).items()}
    folders.save(folder / "model.safetensors", zeros)
    checkpoint = hf.load(folder)
    np.testing.assert_array_equal(checkpoint.params.embed, folders.tensors(LLAMA)["model.embed_tokens.weight"])
    assert "not read: model.safetensors" in notes(checkpoint)
    # The fault: the file with the usual name is taken.
    (folder / INDEX).unlink()
    assert not np.asarray(hf.load(folder).params.embed).any()


def test_a_needed_tensor_that_the_index_forgot(folder):
    """known-failures LD-11: loaded, and told."""
    write(folder, shards=2)
    name = "model.layers.1.mlp.up_proj.weight"
    edit_index(folder, lambda where: where.pop(name))
    checkpoint = hf.load(folder)
    half = np.asarray(checkpoint.params.layers[1].gate_up)[64:]
    np.testing.assert_array_equal(half, folders.tensors(LLAMA)[name])
    assert name in notes(checkpoint)


def test_a_tensor_that_nobody_needs_and_the_index_forgot(folder):
    write(folder, shards=2, arrays=folders.tensors(LLAMA) | {"extra.weight": np.ones((2, 2), np.float32)})
    refused(folder, "not part of the model: `extra.weight`")
    edit_index(folder, lambda where: where.pop("extra.weight"))
    assert "extra.weight" in notes(hf.load(folder))


def test_a_tensor_that_its_file_does_not_hold(folder, no_reading):
    write(folder, shards=2)
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    edit_index(folder, lambda where: where.update({"model.norm.weight": first, "model.embed_tokens.weight": second}))
    refused(folder, "`model.norm.weight` (`model-00001-of-00002.safetensors`)", "`model.embed_tokens.weight`")


def test_one_tensor_in_two_files_that_the_index_forgot(folder):
    write(folder, shards=2)
    arrays = folders.tensors(LLAMA)
    for n in (0, 1):
        mine = {tensor: arrays[tensor] for tensor in list(arrays)[n::2]} | {
            "model.norm.weight": arrays["model.norm.weight"]
        }
        folders.save(folder / f"model-0000{n + 1}-of-00002.safetensors", mine)
    assert hf.load(folder).config  # the index says which one counts
    edit_index(folder, lambda where: where.pop("model.norm.weight"))
    refused(folder, "`model.norm.weight` is in", "does not say which")


# --- Tensors -------------------------------------------------------------------------------------


def test_all_faults_are_told_at_once_and_before_anything_is_read(folder, no_reading):
    arrays = folders.tensors(LLAMA)
    arrays["model.norm.weight"] = np.ones(31, np.float32)
    arrays["model.layers.0.self_attn.q_proj.weight"] = np.ones((32, 32), np.int8)
    arrays["model.layers.7.mlp.down_proj.weight"] = np.ones((2, 2), np.float32)
    write(folder, arrays=arrays, remove=("model.layers.1.mlp.up_proj.weight",))
    refused(
        folder,
        "missing: `model.layers.1.mlp.up_proj.weight` [64, 32]",
        "of another shape: `model.norm.weight` is [31], not [32]",
        "`model.layers.0.self_attn.q_proj.weight` (I8)",
        "not part of the model: `model.layers.7.mlp.down_proj.weight`",
    )


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        (LLAMA, "mtp.layers.0.mlp.up_proj.weight"),
        (LLAMA, "model.mtp_layers.0.norm.weight"),
    ],
)
def test_harmless_extras_are_told(folder, config, name):
    arrays = folders.tensors(config) | {name: np.ones(4, np.float32)}
    assert name in notes(hf.load(write(folder, config, arrays=arrays)))


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.patch.weight",  # a Llama has none
        "model.layers.0.self_attn.q_proj.bias",  # and this one no biases
        "model.layers.0.self_attn.q_norm.weight",
        "lm_head.bias",
        "xmtp.layers.0.weight",
        "model.layers.0.inv_freq",
    ],
)
def test_other_extras_are_refused(folder, name):
    arrays = folders.tensors(LLAMA) | {name: np.ones(4, np.float32)}
    refused(write(folder, arrays=arrays), f"not part of the model: `{name}`")


def test_settings_that_nobody_reads_are_told(folder):
    checkpoint = hf.load(write(folder, config={"residual_multiplier": 0.5, "use_cache": True, "auto_map": {"x": "y"}}))
    assert "not read: auto_map, residual_multiplier" in notes(checkpoint)


# --- LD-14: rope ---------------------------------------------------------------------------------

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


# --- LD-15: number types -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "stored", "asked", "used", "rule"),
    [
        ({"torch_dtype": "bfloat16"}, "F32", None, "bfloat16", "`torch_dtype` of config.json"),
        ({"dtype": "bfloat16"}, "F32", None, "bfloat16", "`dtype` of config.json"),
        ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, "F32", None, "bfloat16", "`dtype`"),
        ({"torch_dtype": "float16"}, "F32", None, "bfloat16", "bfloat16 for float16"),
        ({"torch_dtype": "float32"}, "BF16", None, "float32", "`torch_dtype`"),
        ({}, "F32", None, "float32", "the tensors' own type"),
        ({}, "BF16", None, "bfloat16", "the tensors' own type"),
        ({}, "F16", None, "bfloat16", "bfloat16 for float16: the tensors' own type"),
        ({"torch_dtype": "auto"}, "BF16", "auto", "bfloat16", "the tensors' own type"),
        ({"dtype": "auto", "torch_dtype": "float32"}, "BF16", None, "float32", "`torch_dtype`"),
        ({"torch_dtype": "bfloat16"}, "BF16", "float32", "float32", "asked for by the caller"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "F32", "float32", "float32", "asked for"),
        ({"torch_dtype": "float64"}, "F32", "bfloat16", "bfloat16", "asked for"),
    ],
)
def test_dtype_rule(folder, config, stored, asked, used, rule):
    write(folder, config={"torch_dtype": ..., **config}, dtype=stored)
    checkpoint = hf.load(folder, dtype=asked)
    assert checkpoint.params.dtype == jnp.dtype(used)
    assert checkpoint.dtype_rule.startswith(used) and rule in checkpoint.dtype_rule
    assert any(checkpoint.dtype_rule in line for line in describe.describe(checkpoint))


@pytest.mark.parametrize(
    ("config", "asked", "told"),
    [
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, None, "`dtype` as `bfloat16` and `torch_dtype` as `float32`"),
        ({"dtype": "bfloat17"}, None, "`bfloat17`"),
        ({"torch_dtype": 16}, None, "`torch_dtype`"),
        ({}, "float16", "`float16`"),
        ({}, "int8", "`int8`"),
    ],
)
def test_dtypes_that_are_refused(folder, config, asked, told):
    refused(write(folder, config={"torch_dtype": ..., **config}), told, dtype=asked)


def test_a_dtype_in_the_wrong_order_is_noticed(folder, monkeypatch):
    """The fault: the tensors' own type is taken, whatever the configuration says."""
    monkeypatch.setattr(dtypes, "said", lambda doc: None)
    with pytest.raises(AssertionError):
        test_dtype_rule(folder, {"torch_dtype": "bfloat16"}, "F32", None, "bfloat16", "`torch_dtype`")


def test_a_vision_models_settings_hold_for_its_text_part(folder):
    config, arrays = folders.nested(GEMMA | {"dtype": ...}, folders.tensors(GEMMA), old=True)
    config["text_config"].pop("dtype")
    config["torch_dtype"] = "bfloat16"
    checkpoint = hf.load(folders.write(folder, config, arrays))
    assert checkpoint.params.dtype == jnp.bfloat16 and checkpoint.end_ids == (1, 62)


# --- Configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "config", "told"),
    [
        (LLAMA, {"model_type": "mamba"}, "`mamba`"),
        (LLAMA, {"model_type": ...}, "`model_type`"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "`LlamaForSequenceClassification`"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "`gptq`"),
        (LLAMA, {"hidden_act": "relu"}, "`relu`"),
        (LLAMA, {"num_key_value_heads": 3}, "`3` key/value heads"),
        (LLAMA, {"hidden_size": 30}, "`30` and `4` query heads"),
        (LLAMA, {"head_dim": 7}, "`7`"),
        (LLAMA, {"num_hidden_layers": 10**9}, "`1000000000`"),
        (LLAMA, {"num_hidden_layers": 9000}, "`9000` layers"),
        (LLAMA, {"num_hidden_layers": 0}, "`0`"),
        (LLAMA, {"vocab_size": "64"}, "`'64'`"),
        (LLAMA, {"tie_word_embeddings": 1}, "`tie_word_embeddings`"),
        (LLAMA, {"rms_norm_eps": 0}, "`rms_norm_eps`"),
        (CONFIGS["qwen2-window"], {"layer_types": ["full_attention"]}, "`1` entries"),
        (CONFIGS["qwen2-window"], {"layer_types": ["full_attention", "x", "x"]}, "`x`"),
        (CONFIGS["qwen2"], {"layer_types": ["sliding_attention"] * 2}, "`use_sliding_window`"),
        (MOE, {"num_experts_per_tok": 5}, "`5` of `4` experts"),
        (MOE, {"decoder_sparse_step": 0}, "`decoder_sparse_step`"),
        (GEMMA, {"sliding_window": None}, "`sliding_window` null"),
        (GEMMA, {"sliding_window": 0}, "`sliding_window` as `0`"),
        (GEMMA, {"sliding_window_pattern": 0}, "`sliding_window_pattern`"),
        (GEMMA, {"use_bidirectional_attention": True}, "`use_bidirectional_attention`"),
        (GEMMA, {"final_logit_softcapping": -1.0}, "`logit_cap`"),
    ],
)
def test_configurations_that_are_refused(folder, base, config, told):
    refused(write(folder, base, config=config), told)


@pytest.mark.parametrize("sizes", [{"num_experts": 0}, {"mlp_only_layers": [0, 1, 2]}])
def test_a_mixture_without_experts_is_dense(folder, sizes):
    made = hf.load(write(folder, MOE | sizes, arrays=folders.tensors(MOE | {"mlp_only_layers": [0, 1, 2]})))
    assert made.config.moe is None


def test_null_counts_as_absent(folder):
    made = hf.load(write(folder, config={"head_dim": None, "num_key_value_heads": 2, "mlp_bias": None}))
    assert made.config == hf.load(folder).config and made.config.head_width == 8


def test_gemma2_caps_can_be_switched_off(folder):
    made = hf.load(write(folder, CONFIGS["gemma2"], config={"attn_logit_softcapping": None}))
    assert made.config.score_cap is None and made.config.logit_cap == 3.0
    assert hf.load(write(folder, CONFIGS["gemma2"], config={"attn_logit_softcapping": ...})).config.score_cap == 50.0


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", families.FAMILIES)
def test_live_defaults_are_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(kind)
    doc = Document({"model_type": kind}, "config.json")
    c = families.FAMILIES[kind].config(doc)
    assert (c.vocab_size, c.width, c.layers, c.heads, c.kv_heads, c.ff_width, c.norm_eps, c.tied_head) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.intermediate_size,
        theirs.rms_norm_eps,
        theirs.tie_word_embeddings,
    )
    assert c.head_width == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert c.max_positions == theirs.max_position_embeddings
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * c.layers
    assert c.windowed == tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    assert not c.windowed or c.window == theirs.sliding_window
    assert (c.score_cap, c.logit_cap) == tuple(
        getattr(theirs, name, None) for name in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    ropes = theirs.rope_parameters
    full = ropes.get("full_attention", ropes)
    assert c.rope == RopeConfig(theta=full["rope_theta"])
    if c.window_rope is not None:
        assert c.window_rope == RopeConfig(theta=ropes["sliding_attention"]["rope_theta"])
    if c.moe is not None:
        assert (c.moe.experts, c.moe.per_token, c.moe.width, c.moe.normalize) == (
            theirs.num_experts,
            theirs.num_experts_per_tok,
            theirs.moe_intermediate_size,
            theirs.norm_topk_prob,
        )


# --- Memory --------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_by_name_and_before_anything_is_read(folder, no_reading):
    write(folder)
    need = sum(math.prod(shape) for shape in folders.shapes(LLAMA).values()) * 4
    refused(folder, "`tiny`", "`float32`", "0.00 GiB", "bfloat16", free=need - 1)
    assert "bfloat16, which" not in refused(folder, "`bfloat16`", dtype="bfloat16", free=need // 4)


def test_memory_that_is_there(tmp_path, monkeypatch):
    free = memory.available()
    assert free is not None and free > 1 << 26
    for name, text in (
        ("max", f"{1 << 30}\n"),
        ("current", f"{1 << 29}\n"),
        ("stat", f"anon 5\ninactive_file {1 << 20}\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory, "LIMITS", str(tmp_path))
    assert memory.available() == min(free, (1 << 29) + (1 << 20)) or free < 1 << 30
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container() is None
    memory.check("x", 10**18, "float32", None)  # a device that does not tell


# --- What is told --------------------------------------------------------------------------------


def test_license_is_read_from_the_model_card(folder):
    write(folder)
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# license: mit\n")
    assert hf.load(folder).license == "apache-2.0"
    (folder / "README.md").write_text("# A model\nlicense: mit\n")
    assert hf.load(folder).license is None


def test_describe(folder):
    write(folder, GEMMA, generation={"eos_token_id": [61, 62]}, config={"strange_setting": 1})
    told = "\n".join(describe.describe(hf.load(folder)))
    for part in (
        "tiny: gemma3_text",
        "layers 0-1: the last 37 tokens",
        "layers 2: all earlier tokens",
        "rope linear, base 1e+06, factor 8",
        "norm on q and k",
        "embedding times 5.65685",
        "the embedding (tied)",
        "62 '<|end|>'",
        "enable_thinking",
        "strange_setting",
        "float32: `dtype` of config.json",
    ):
        assert part in told, told
    told = "\n".join(describe.describe(hf.load(write(folder.parent / "moe", MOE))))
    assert "layers 0, 2: 2 of 4 for each token, width 24, shares summing to 1" in told


# --- One door ------------------------------------------------------------------------------------


def test_the_door_takes_folders(folder, monkeypatch):
    write(folder)
    assert loading.load(folder, dtype="bfloat16").params.dtype == jnp.bfloat16
    monkeypatch.chdir(folder.parent)
    assert loading.load("tiny").name == "tiny"
    (folder.parent / "owner").mkdir()
    folder.rename(folder.parent / "owner" / "model")
    assert loading.load("owner/model").name == "model"  # what is here comes before the hub


@pytest.mark.parametrize(
    ("source", "settings", "told"),
    [
        ("no such thing", {}, "qwen3-0.6b"),
        ("../escape/../x/y", {}, "is no target"),
        ("file.txt", {}, "is a file"),
        ("missing.gguf", {}, "does not exist"),
        ("smollm2-135m", {"revision": "main"}, "`revision`"),
        ("smollm2-135m", {"context": 100}, "`context`"),
        (None, {"dtype": "float16"}, "`float16`"),
    ],
)
def test_the_door_refuses_by_name(tmp_path, monkeypatch, source, settings, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(JspecError) as error:
        loading.load(source, **settings)
    assert told in str(error.value)


def test_known_targets():
    assert {"qwen3-0.6b", "smollm2-1.7b", "gemma-3-270m"} <= set(known.targets())
    assert all(target.hub.count("/") == 1 for target in known.targets().values())


def test_cache_bytes_follow_the_head_width(folder):
    config = hf.load(write(folder, GEMMA)).config
    assert kv.bytes_per_token(config, jnp.float32) == 2 * 3 * 2 * 16 * 4


def test_a_folder_without_tokenizer(folder):
    write(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    refused(folder, "no `tokenizer.json`, only `tokenizer.model`")
    with pytest.raises(JspecError):
        hf_tokenizer.load(folder, V, ())
