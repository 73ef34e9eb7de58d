"""Every family and rope type against transformers, at positions 5, 500 and 2,000, through every loading path.

The references were made by `make_goldens.py`; where torch is installed it runs again here. Known
failures covered: LD-5 (long positions), LD-6 (rope of each layer kind), LD-14 (every rope type).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import tree
from jspec.target import attention, hf, loading, model, rope
from jspec.target import cache as kv
from tests.target import folders, make_goldens, test_gguf

GOLDENS = np.load(make_goldens.FILE)
CHUNK = 128
NAMES = list(folders.CONFIGS)
ATOL = 1e-4


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def chunk(params, cache, tokens, start, *, config):
    columns = attention.columns(jnp.int32(0), start[None], jnp.asarray(tree.chain_bits(CHUNK))[None], 2048, 256)
    positions = start[None, None] + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    taps = tuple(range(config.layers))
    hidden, features, finite, cache = model.forward(params, config, cache, tokens, positions, columns, taps=taps)
    return model.logits(params, hidden)[0], features[0], finite, cache


def run(checkpoint):
    """Logits `[3, V]` and taps `[3, L, D]` at the golden positions, read in chunks."""
    config, params = checkpoint.config, checkpoint.params
    tokens = np.pad(folders.text(), (0, -folders.LENGTH % CHUNK))
    cache = kv.init(config, 1, 2048, params.dtype)
    logits, taps = [], []
    for start in range(0, len(tokens), CHUNK):
        out = chunk(params, cache, tokens[None, start : start + CHUNK], np.int32(start), config=config)
        part, features, finite, cache = out
        assert bool(finite.all())
        for position in folders.POSITIONS:
            if start <= position < start + CHUNK:
                logits.append(np.asarray(part[position - start]))
                taps.append(np.asarray(features[position - start]).reshape(config.layers, -1))
    return np.stack(logits), np.stack(taps)


def golden(name):
    assert str(GOLDENS[f"{name}/digest"]) == make_goldens.digest(name), "run make_goldens.py again"
    return GOLDENS[f"{name}/logits"], GOLDENS[f"{name}/taps"]


def check(checkpoint, name, atol=ATOL):
    logits, taps = run(checkpoint)
    wanted_logits, wanted_taps = golden(name)
    np.testing.assert_allclose(logits, wanted_logits, rtol=0, atol=atol)
    np.testing.assert_allclose(taps, wanted_taps, rtol=0, atol=atol)


def load(folder, name, **settings):
    return hf.load(folder, context=folders.CONTEXT.get(name), **settings)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder for each checkpoint, written once."""
    place = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(name):
        config = folders.CONFIGS[name]
        return folders.write(place / name, config, folders.tensors(config))

    return make


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_taps_equal_transformers(made, name):
    check(load(made(name), name), name)


@pytest.mark.parametrize("name", NAMES)
def test_frequencies_equal_transformers(made, name):
    """known-failures LD-14: the table itself, for each layer kind."""
    config = load(made(name), name).config
    kinds = {"inv_freq": config.rope}
    if config.window_rope is not None:
        kinds = {"full_attention_inv_freq": config.rope, "sliding_attention_inv_freq": config.window_rope}
    for key, settings in kinds.items():
        table = rope.frequencies(settings, config.head_width)
        np.testing.assert_allclose(table, GOLDENS[f"{name}/{key}"], rtol=3e-6)


# --- Loading paths -------------------------------------------------------------------------------


def path_shards(folder, name):
    config = folders.CONFIGS[name]
    return hf.load(folders.write(folder, config, folders.tensors(config), shards=3))


def path_nested(folder, name, old):
    config, arrays = folders.nested(folders.CONFIGS[name], folders.tensors(folders.CONFIGS[name]), old=old)
    checkpoint = hf.load(folders.write(folder, config, arrays))
    assert any("the part for images" in note for note in checkpoint.notes)
    return checkpoint


def path_fused_experts(folder, name):
    """All experts of a layer in one tensor, as transformers 5 keeps them."""
    config = folders.CONFIGS[name]
    arrays = folders.tensors(config)
    for i in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{i}.mlp."
        if mlp + "gate.weight" in arrays:
            each = [
                [arrays.pop(f"{mlp}experts.{e}.{part}_proj.weight") for part in ("gate", "up", "down")]
                for e in range(4)
            ]
            arrays[mlp + "experts.gate_up_proj"] = np.stack([np.concatenate([gate, up]) for gate, up, _ in each])
            arrays[mlp + "experts.down_proj"] = np.stack([down for *_, down in each])
    return hf.load(folders.write(folder, config, arrays))


def path_gguf(folder, name):
    config, w = folders.CONFIGS[name], folders.tensors(folders.CONFIGS[name])
    meta = {
        "llama.context_length": config["max_position_embeddings"],
        "llama.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.tokens": list(folders.tokenizer()["model"]["vocab"]) + list(folders.SPECIAL),
        "tokenizer.ggml.token_type": [1] * (folders.V - 3) + [3] * 3,
    }
    renamed = {"token_embd.weight": w["model.embed_tokens.weight"], "output_norm.weight": w["model.norm.weight"]}
    renamed["output.weight"] = w["lm_head.weight"]
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for i in range(config["num_hidden_layers"]):
        for there, here in parts.items():
            renamed[f"blk.{i}.{there}.weight"] = w[f"model.layers.{i}.{here}.weight"]
        for letter, heads in (("q", folders.H), ("k", folders.G)):
            key = f"blk.{i}.attn_{letter}.weight"
            renamed[key] = test_gguf.as_converted(renamed[key], heads)
    folder.mkdir()
    return loading.load(test_gguf.write(folder / "t.gguf", renamed, meta), dtype="float32")


def path_door(folder, name):
    config = folders.CONFIGS[name]
    return loading.load(folders.write(folder, config, folders.tensors(config)), context=folders.CONTEXT.get(name))


PATHS = {
    "shards": (path_shards, "llama"),
    "shards of experts": (path_shards, "qwen3_moe"),
    "part of a model, old names": (functools.partial(path_nested, old=True), "gemma3"),
    "part of a model, new names": (functools.partial(path_nested, old=False), "gemma3"),
    "experts in one tensor": (path_fused_experts, "qwen3_moe"),
    "gguf": (path_gguf, "llama"),
    "loading.load": (path_door, "llama-dynamic-long"),
}


@pytest.mark.parametrize("path", PATHS)
def test_every_loading_path_gives_the_same(tmp_path, path):
    """known-failures LD-5. The hub's is in `test_hub.py`."""
    make, name = PATHS[path]
    check(make(tmp_path / "t", name), name)


# --- The checks notice ---------------------------------------------------------------------------

# What has gone wrong elsewhere, as changes of the configuration.
FAULTS = {
    "rope scaling read and not applied": ("llama-llama3", {"rope": lambda r: dataclasses.replace(r, kind="default")}),
    "yarn without its scale": ("llama-yarn", {"rope": lambda r: dataclasses.replace(r, scale=1.0)}),
    "the full layers' rope in the windowed ones": ("gemma3", {"window_rope": lambda r: None}),
    "scaling in the windowed layers too": (
        "gemma3",
        {"window_rope": lambda r: dataclasses.replace(r, kind="linear", factor=8.0)},
    ),
    "a window of one more": ("gemma3", {"window": lambda w: w + 1}),
    "the window in every layer": ("gemma3", {"windowed": lambda _: (0, 1, 2)}),
    "no embedding scale": ("gemma3", {"embed_scale": lambda _: 1.0}),
    "scores scaled by the head": ("gemma3", {"query_scale": lambda _: None}),
    "no cap on scores": ("gemma2", {"score_cap": lambda _: None}),
    "SiLU for GELU": ("gemma2", {"activation": lambda _: "silu"}),
    "experts' shares not normalised": ("qwen3_moe", {"moe": lambda m: dataclasses.replace(m, normalize=False)}),
    "dynamic rope made for another length": (
        "llama-dynamic-long",
        {"rope": lambda r: dataclasses.replace(r, length=1000)},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(made, fault):
    name, changes = FAULTS[fault]
    checkpoint = load(made(name), name)
    config = checkpoint.config
    config = dataclasses.replace(config, **{key: change(getattr(config, key)) for key, change in changes.items()})
    logits, _ = run(dataclasses.replace(checkpoint, config=config))
    worst = np.abs(logits - golden(name)[0]).max(axis=1)
    assert worst[-1] > 10 * ATOL
    if fault == "a window of one more":
        assert worst[0] < ATOL  # a short text would have passed


# --- Live ----------------------------------------------------------------------------------------

PEERS = "compares with torch and transformers, of the extra `reference`; without them the goldens stand in"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES)
def test_live_transformers_gives_the_goldens(made, name):
    for peer in ("torch", "transformers"):
        pytest.importorskip(peer, reason=PEERS)
    now = make_goldens.reference(made(name))
    for key, value in now.items():
        np.testing.assert_allclose(value, GOLDENS[f"{name}/{key}"], rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["llama-biased", "qwen2", "qwen3_moe", "gemma2", "gemma3"])
def test_live_folders_that_transformers_writes_are_read(made, tmp_path, name):
    """Its own spelling of configuration and names, whatever it is in the version at hand."""
    pytest.importorskip("torch", reason=PEERS)
    transformers = pytest.importorskip("transformers", reason=PEERS)
    transformers.AutoModelForCausalLM.from_pretrained(made(name)).save_pretrained(tmp_path)
    folders.write_tokenizer(tmp_path)
    again, first = load(tmp_path, name), load(made(name), name)
    assert again.config == first.config
    jax.tree.map(np.testing.assert_array_equal, again.params, first.params)
