"""Tiny GGUF files, written by the `gguf` package."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, FF, LAYERS = 32, 4, 2, 8, 64, 2
LETTERS = [chr(b) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE else None for b in range(256)]
OTHERS = iter(range(256, 512))
TOKENS = ["<|im_start|>", "<|im_end|>", *(letter or chr(next(OTHERS)) for letter in LETTERS), "he"]
VOCAB = len(TOKENS)

Arrays = dict[str, np.ndarray]


def shapes(width: int = WIDTH, head_width: int = HEAD_WIDTH, ff: int = FF, tied: bool = True) -> dict[str, tuple]:
    """Every tensor of a tiny Llama, slowest dimension first."""
    table: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, width), "output_norm.weight": (width,)}
    if not tied:
        table["output.weight"] = (VOCAB, width)
    for i in range(LAYERS):
        table |= {
            f"blk.{i}.attn_norm.weight": (width,),
            f"blk.{i}.attn_q.weight": (HEADS * head_width, width),
            f"blk.{i}.attn_k.weight": (KV_HEADS * head_width, width),
            f"blk.{i}.attn_v.weight": (KV_HEADS * head_width, width),
            f"blk.{i}.attn_output.weight": (width, HEADS * head_width),
            f"blk.{i}.ffn_norm.weight": (width,),
            f"blk.{i}.ffn_gate.weight": (ff, width),
            f"blk.{i}.ffn_up.weight": (ff, width),
            f"blk.{i}.ffn_down.weight": (width, ff),
        }
    return table


def weights(seed: int = 0, **sizes: Any) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape).astype(np.float32)
        for name, shape in shapes(**sizes).items()
    }


def write(
    path: pathlib.Path,
    tensors: Arrays,
    meta: Mapping[str, Any] | None = None,
    *,
    architecture: str = "llama",
    packed: Mapping[str, GGMLQuantizationType] | None = None,
) -> pathlib.Path:
    """Writes a file; `meta` changes its metadata (None removes), `packed` names tensors given as raw bytes."""
    table: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": FF,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
        "llama.rope.dimension_count": HEAD_WIDTH,
        "general.license": "apache-2.0",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3] + [1] * 257,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (table | dict(meta or {})).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(packed or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
