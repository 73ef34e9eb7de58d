"""Folders in Hugging Face's layout: where each weight goes, which are tied, what ends an answer, what is told.

Known failures covered: LD-1, LD-5, LD-7, LD-8. Each rule's test is followed by, or holds, the fault that it is
there for, planted.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.target import cache as kv
from jspec.target import (
    dtypes,
    families,
    hf,
    hf_tokenizer,
    memory,
    model,
    weights,
)
from jspec.target.config import RopeConfig, TargetConfig
from tests.target import folders
from tests.target.folders import CONFIGS, V
from tests.target.reading import GEMMA, LLAMA, TIED, notes, refused, write

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


# --- What is told --------------------------------------------------------------------------------


def test_license_is_read_from_the_model_card(folder):
    write(folder)
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# license: mit\n")
    assert hf.load(folder).license == "apache-2.0"
    (folder / "README.md").write_text("# A model\nlicense: mit\n")
    assert hf.load(folder).license is None


def test_cache_bytes_follow_the_head_width(folder):
    config = hf.load(write(folder, GEMMA)).config
    assert kv.bytes_per_token(config, jnp.float32) == 2 * 3 * 2 * 16 * 4


def test_a_folder_without_tokenizer(folder):
    write(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    refused(folder, "no `tokenizer.json`, only `tokenizer.model`")
    with pytest.raises(JspecError):
        hf_tokenizer.load(folder, V, ())
