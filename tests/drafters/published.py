"""Tiny checkpoints in published formats, built from the listings in `tests/data/drafter_formats` and from nothing else.

A listing has names, shapes and configurations as they stand in public repositories; only sizes are made
small here. Neither the reader nor the writer of the library is asked for a name or a shape.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jspec.drafters.formats import convert
from jspec.target import model
from tests import tiny
from tests.hostile import checkpoint

DATA = Path(__file__).parents[1] / "data" / "drafter_formats"
READ = ("zlab", "deepspec", "speculators", "specforge", "angelslim", "angelspec")

# The target: six blocks, so that first, last and middle ones differ.
T6 = dataclasses.replace(tiny.T, layers=6, family="qwen3", qk_norm=True)
PRUNED = np.array([*range(3, 40), 50, 51, 62])  # 40 of 64 tokens
SIZES = {
    "hidden_size": 32,
    "target_hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "mask_token_id": 63,
    "markov_rank": 5,
    "sliding_window": 9,
    "max_window_layers": 2,
    "max_position_embeddings": 256,
    "num_target_layers": 6,
    "target_num_hidden_layers": 6,
    "target_layer_ids": [1, 2, 4],
    "aux_hidden_state_layer_ids": [2, 3, 5],  # hidden states: the same blocks
}
TAPS = (1, 2, 4)


@functools.cache
def listing(name):
    return json.loads((DATA / f"{name}.json").read_text())


def variants(names=READ):
    return [(name, variant) for name in names for variant in listing(name)["variants"]]


@functools.cache
def target(family="qwen3", seed=0):
    """The target T6, with values that bfloat16 holds, so that copies of it in any dtype are exact."""
    config = dataclasses.replace(T6, family=family)
    made = jax.jit(lambda: model.init(jax.random.key(seed), config, jnp.float32))()
    made = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), made)
    return dataclasses.replace(checkpoint(), config=config, params=made, name="tiny", fingerprint=f"{seed}" * 64)


def small(config):
    """A listed configuration with tiny sizes, at whatever depth they stand."""
    whole = _find(config, "vocab_size")
    angelspec = "target_num_hidden_layers" in config

    def walk(value, key=None):
        if isinstance(value, dict):
            return {k: walk(v, k) for k, v in value.items()}
        if key == "draft_vocab_size":
            return 64 if value == whole else len(PRUNED)
        if key == "num_target_layers" and angelspec:
            return 3  # taps, there
        if key == "markov_rank" and value == 0:
            return 0
        if key == "block_size":
            return min(value, 8)
        if key == "layer_types":
            return [value[0], value[-1]]
        return copy.deepcopy(SIZES[key]) if key in SIZES and value is not None else value

    return walk(config)


def letters(config):
    found = {letter: _find(config, key) for letter, key in listing("zlab")["letters"].items() if letter != "T"}
    ids = _find(config, "target_layer_ids") or _find(config, "aux_hidden_state_layer_ids") or [0, 0, 0]
    found["T"] = len(ids)
    found["Vd"] = found["Vd"] or found["V"]
    found["hd"] = found["hd"] or found["D"] // found["H"]
    found["r"] = found["r"] or 5
    return found


def shapes(name, variant, values):
    """Every tensor of a variant: dtype and shape, its formulas worked out with the values of the letters."""
    out = {}
    for tensor, (dtype, shape) in listing(name)["variants"][variant]["tensors"].items():
        size = tuple(eval(formula, {}, values) for formula in shape)  # formulas of our own listings
        for i in range(values["N"]) if "{i}" in tensor else (0,):
            out[tensor.replace("{i}", str(i))] = (dtype, size)
    return out


def made(name, variant, seed=0):
    """Configuration and tensors of a tiny checkpoint, bfloat16 where the listing says so."""
    config = small(listing(name)["variants"][variant]["config"])
    rng, t = np.random.default_rng(seed), target()
    ids = PRUNED if _find(config, "draft_vocab_size") == len(PRUNED) else np.arange(64)
    tensors = {}
    for tensor, (dtype, shape) in shapes(name, variant, letters(config)).items():
        if tensor == "t2d":
            value = np.isin(np.arange(64), ids)
        elif tensor == "d2t":
            value = ids - np.arange(len(ids))
        elif tensor == "embed_tokens.weight":
            value = np.asarray(t.params.embed)
        elif tensor == "lm_head.weight":
            value = np.asarray(t.params.head)[ids if shape[0] == len(ids) else slice(None)]
        elif tensor.endswith("norm.weight"):
            value = 1 + 0.2 * rng.normal(size=shape)
        else:
            value = rng.normal(size=shape) * (1.0 if tensor == "layer_fusion_weights" else shape[-1] ** -0.5)
        tensors[tensor] = value.astype({"BF16": ml_dtypes.bfloat16, "I64": np.int64, "BOOL": np.bool_}[dtype])
    return config, tensors


def read(folder, name, variant, damage=None, to=None, dtype="float32", seed=0):
    """Builds a variant, damages it, and reads it for a target, the one above if left out."""
    config, tensors = made(name, variant, seed)
    if damage is not None:
        damage(config, tensors)
    put(folder, config, tensors)
    return convert.read(folder, to or target(), dtype), config, tensors


def put(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: np.array(v, order="C") for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def _find(config, key):
    """The first value of a key, at any depth."""
    if key in config and config[key] is not None:
        return config[key]
    for value in config.values():
        if isinstance(value, dict) and (found := _find(value, key)) is not None:
            return found
    return None
