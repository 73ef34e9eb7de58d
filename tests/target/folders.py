"""Tiny random checkpoints in Hugging Face's layout, one for every family and rope type.

Weights are drawn by tensor name, so they are the same wherever they are made and nothing but their
names and shapes is written down here. Names and shapes are spelled out by hand, not taken from the
reader's plan: they are what transformers gives the same tensors (`make_goldens.py` runs on them).
"""

from __future__ import annotations

import copy
import json
import pathlib
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]

V, D, H, G, HD, F, L = 64, 32, 4, 2, 8, 64, 2
LENGTH = 2001  # tokens of the golden text
POSITIONS = (5, 500, 2000)  # known-failures LD-5

_BASE = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_LLAMA = {**_BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
_QWEN2 = {**_BASE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "float32"}
_QWEN3 = {**_BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "float32", "head_dim": HD}
_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_GEMMA2 = {
    **_BASE,
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "torch_dtype": "float32",
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": 37,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 2.0,
    "num_hidden_layers": 3,
}
_GEMMA3 = {
    **_BASE,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "dtype": "float32",
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": 37,
    "num_hidden_layers": 3,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "rope_theta": 500_000.0, "rope_scaling": None, "tie_word_embeddings": False},
    "llama-linear": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}, "tie_word_embeddings": True},
    "llama-dynamic": {**_LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "tie_word_embeddings": True},
    "llama-dynamic-long": {
        **_LLAMA,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "llama-llama3": {
        **_LLAMA,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        "tie_word_embeddings": True,
    },
    "llama-yarn": {
        **_LLAMA,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 20_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 256,
        },
        "tie_word_embeddings": True,
    },
    "llama-biased": {**_LLAMA, "head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "qwen2": {**_QWEN2, "rope_theta": 1_000_000.0, "tie_word_embeddings": True},
    "qwen2-window": {
        **_QWEN2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "use_sliding_window": True,
        "sliding_window": 37,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
    },
    "qwen3": {**_QWEN3, "rope_theta": 1_000_000.0, "tie_word_embeddings": True},
    "qwen3-yarn": {
        **_QWEN3,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        "max_position_embeddings": 640,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        **_MOE,
        "rope_theta": 1_000_000.0,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    },
    "qwen3_moe-sparse": {**_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "tie_word_embeddings": True},
    "gemma2": {**_GEMMA2, "rope_theta": 10_000.0},
    "gemma3": {
        **_GEMMA3,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    },
    "gemma3-capped": {
        **_GEMMA3,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
        },
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
    },
}
# What `load` must be told where the checkpoint alone does not decide.
CONTEXT = {"llama-dynamic-long": LENGTH}


def text() -> np.ndarray:
    """The golden text's ids, `[LENGTH]` int32."""
    return np.random.default_rng(7).integers(0, V, LENGTH).astype(np.int32)


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint, by transformers' name."""
    c = config
    kind, d, f = c["model_type"], c["hidden_size"], c["intermediate_size"]
    hd = c.get("head_dim", d // c["num_attention_heads"])
    q, kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd
    gemma = kind.startswith("gemma")
    table: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], d), "model.norm.weight": (d,)}
    if not c.get("tie_word_embeddings", gemma):
        table["lm_head.weight"] = (c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        attn, mlp = layer + "self_attn.", layer + "mlp."
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
        table |= {f"{layer}{name}.weight": (d,) for name in norms}
        rows = {"q": q, "k": kv, "v": kv}
        table |= {f"{attn}{x}_proj.weight": (n, d) for x, n in rows.items()} | {attn + "o_proj.weight": (d, q)}
        if kind == "qwen2" or c.get("attention_bias"):
            table |= {f"{attn}{x}_proj.bias": (n,) for x, n in rows.items()}
        if c.get("attention_bias"):
            table[attn + "o_proj.bias"] = (d,)
        if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            table |= {attn + "q_norm.weight": (hd,), attn + "k_norm.weight": (hd,)}
        dense = i in (c.get("mlp_only_layers") or []) or (i + 1) % c.get("decoder_sparse_step", 1)
        if kind == "qwen3_moe" and not dense:
            table[mlp + "gate.weight"] = (c["num_experts"], d)
            for e in range(c["num_experts"]):
                expert, w = f"{mlp}experts.{e}.", c["moe_intermediate_size"]
                table |= {expert + "gate_proj.weight": (w, d), expert + "up_proj.weight": (w, d)}
                table[expert + "down_proj.weight"] = (d, w)
        else:
            table |= {
                mlp + "gate_proj.weight": (f, d),
                mlp + "up_proj.weight": (f, d),
                mlp + "down_proj.weight": (d, f),
            }
            if c.get("mlp_bias"):
                table |= {mlp + "gate_proj.bias": (f,), mlp + "up_proj.bias": (f,), mlp + "down_proj.bias": (d,)}
    return table


def tensors(config: Mapping[str, Any], seed: int = 0) -> Arrays:
    """Random weights, float32. Queries and keys are large, so that attention looks at single tokens far back."""
    made = {}
    for name, shape in shapes(config).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if name.endswith("norm.weight") and config["model_type"].startswith("gemma"):
            mean, scale = 0.0, 0.3
        elif "norm" in name:
            mean, scale = 1.0, 0.3
        elif name.endswith(".bias"):
            mean, scale = 0.0, 0.3
        else:
            mean, scale = 0.0, (2.0 if ".q_proj" in name or ".k_proj" in name else 1.0) * shape[-1] ** -0.5
        made[name] = rng.normal(mean, scale, shape).astype(np.float32)
    return made


def nested(config: Mapping[str, Any], arrays: Arrays, *, old: bool) -> tuple[dict[str, Any], Arrays]:
    """A text model as part of a vision model, in the spelling before or since transformers 4.52."""
    whole = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {key: value for key, value in config.items() if key != "architectures"},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 8},
        "eos_token_id": [1, 62],
    }
    start = "language_model.model." if old else "model.language_model."
    moved = {start + name.removeprefix("model."): array for name, array in arrays.items()}
    vision = ("vision_tower.patch.weight", "multi_modal_projector.weight")
    for name in vision:
        moved[("" if old else "model.") + name] = np.ones((3, 2), np.float32)
    return whole, moved


# --- Writing -------------------------------------------------------------------------------------

_STORED = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def save(path: pathlib.Path, arrays: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    """A safetensors file. Arrays that are not floating are stored as they are."""
    header, data, at = {}, [], 0
    for name, array in arrays.items():
        floating = array.dtype == np.float32
        raw = (array.astype(_STORED[dtype]) if floating else array).tobytes()
        kind = dtype if floating else {"int8": "I8", "int64": "I64", "float64": "F64"}[array.dtype.name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def write(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    *,
    dtype: str = "F32",
    shards: int = 1,
    generation: Mapping[str, Any] | None = None,
    tokens: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """A whole checkpoint; with more than one shard, dealt out tensor by tensor and indexed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if shards == 1:
        save(folder / "model.safetensors", arrays, dtype)
    else:
        index = {}
        for n in range(shards):
            name = f"model-{n + 1:05}-of-{shards:05}.safetensors"
            mine = {tensor: arrays[tensor] for tensor in list(arrays)[n::shards]}
            save(folder / name, mine, dtype)
            index |= dict.fromkeys(mine, name)
        document = {"metadata": {"total_size": 0}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    write_tokenizer(folder, **(tokens or {}))
    return folder


CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?:;-()'ĠĊ"
SPECIAL = ("<|start|>", "<|end|>", "<|turn|>")
SPECIAL_IDS = {text: V - len(SPECIAL) + i for i, text in enumerate(SPECIAL)}
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}()\n{% endif %}{% endif %}"
)


def tokenizer() -> dict[str, Any]:
    """A byte-level `tokenizer.json` with the ids 0 to 63, made by hand."""
    vocab = {character: i for i, character in enumerate(CHARACTERS)}
    merges = [("h", "e"), ("l", "l"), ("o", "Ġ")]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    while len(vocab) < V - len(SPECIAL):
        vocab[f"<unused{len(vocab)}>"] = len(vocab)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, "special": text != "<|turn|>", **flags} for text, i in SPECIAL_IDS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(merge) for merge in merges],
        },
    }


def write_tokenizer(
    folder: pathlib.Path, *, changes: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None
) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, each with changes."""
    made = copy.deepcopy(tokenizer()) | dict(changes or {})
    (folder / "tokenizer.json").write_text(json.dumps(made))
    settings = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | dict(config or {})))
