"""Exactness on real prompts: does speculation change a token, or a bit of the cache?

    python bench/exactness.py --data $DATA/eval                      the matrix, about 40 minutes on 2 cores
    python bench/exactness.py --data $DATA/eval --prompts 44 --tokens 48 --mixed
    python bench/exactness.py --data $DATA/eval --prompts 8 --controls

For each dtype and temperature, 64 prompts of five sets are decoded plainly, in order, by one engine
(8 slots, 8 rows). Then again with every drafter, shuffled, so that slots, neighbours and arrival
differ: tokens are compared, and all committed key/value columns bit by bit. With `--mixed` each request
of a batch has another processor (`MIXED`). `--controls` plants the faults that the design rules out, and
must report differences. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.decoding import probe, sampling
from jspec.decoding.generate import generate
from jspec.decoding.request import Request, Result
from jspec.decoding.state import DecodeState
from jspec.drafters import doubles
from jspec.drafters.base import Drafter, Plain
from jspec.drafters.ngram import NGram
from jspec.engine import static
from jspec.engine.config import EngineConfig
from jspec.startup import configure_cache
from jspec.target import attention, loading
from jspec.target.cache import unpack
from jspec.target.checkpoint import Checkpoint

SETS = ("math500", "gsm8k", "humaneval", "mbpp", "mt_bench")
MIXED: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.6},
    {"frequency_penalty": -0.3},
    {"logit_bias": {260: 2.0, 28: -100.0, 198: 1.5}},
    {"min_tokens": 24, "end_ids": (2, 30, 198)},  # the full stop and the line break end, but not early
    {"end_ids": (2, 28)},
    {"ignore_eos": True},
    {"logprobs": 3, "logprobs_kind": "processed"},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "choice_index": 3},
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of a run and the bits of every request's committed columns."""

    results: list[Result]
    columns: list[np.ndarray]  # per request [2 L, G, length - 1, hd]


def read_prompts(folder: Path, count: int, checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    """The first prompts of each set in turn, through the chat template."""
    per_set = [[json.loads(line)["turns"][0] for line in (folder / f"{name}.jsonl").open()] for name in SETS]
    texts = [per_set[i % len(SETS)][i // len(SETS)] for i in range(count)]
    return [tuple(checkpoint.tokenizer.render_chat([{"role": "user", "content": text}])) for text in texts]


def run(
    config: EngineConfig,
    checkpoint: Checkpoint,
    requests: list[Request],
    drafter: Drafter,
    weights: Any,
    *,
    shuffle: int | None = None,
) -> Outcome:
    """Decodes `requests`, in another order if `shuffle` is a seed; outcome in the order given."""
    order = list(range(len(requests)))
    if shuffle is not None:
        random.Random(shuffle).shuffle(order)
    columns: dict[int, np.ndarray] = {}

    def keep(state: DecodeState, slot: int, index: int) -> None:
        held = int(state.length[slot]) - 1
        arrays = [probe.bits(x)[slot, :, :held] for x in (*state.cache.keys, *state.cache.values)]
        columns[order[index]] = np.stack(arrays)

    shuffled = [requests[i] for i in order]
    results = generate(config, checkpoint.params, shuffled, drafter=drafter, weights=weights, on_finish=keep)
    back = dict(zip(order, results, strict=True))
    return Outcome([back[i] for i in range(len(requests))], [columns[i] for i in range(len(requests))])


def compare(a: Outcome, b: Outcome) -> dict[str, int]:
    """Differing sequences, and differing bits over the columns that both committed."""
    bits = 0
    for x, y in zip(a.columns, b.columns, strict=True):
        shared = min(x.shape[2], y.shape[2])
        bits += int(np.bitwise_count(x[:, :, :shared] ^ y[:, :, :shared]).sum())
    sequences = sum(x.tokens != y.tokens for x, y in zip(a.results, b.results, strict=True))
    return {"sequences": sequences, "kv_bits": bits}


def drafters(
    config: EngineConfig, checkpoint: Checkpoint, requests: list[Request], plain: Outcome
) -> list[tuple[Drafter, Any]]:
    """Every drafter of the matrix with its weights."""
    texts = [r.prompt + o.tokens for r, o in zip(requests, plain.results, strict=True)]
    width = config.rows - 1
    return [
        (Plain(), None),
        (NGram(proposals=min(3, width)), None),
        (NGram(proposals=width), None),
        (doubles.Random(proposals=width, vocab=config.target.vocab_size), None),
        (doubles.Oracle(proposals=width), doubles.script(texts, config.capacity)),
        (doubles.Self(proposals=width, engine=config), checkpoint.params),
    ]


def matrix(
    checkpoint: Checkpoint, prompts: list[tuple[int, ...]], slots: int, tokens: int, mixed: bool
) -> list[dict[str, Any]]:
    """All drafters at T = 0 and T = 0.8 with top-p 0.95."""
    longest = max(map(len, prompts)) + tokens
    config = EngineConfig(target=checkpoint.config, slots=slots, rows=8, max_length=longest)
    rows = []
    for temperature in (0.0, 0.8):
        requests = [
            Request(
                prompt=p,
                max_tokens=tokens,
                temperature=temperature,
                **{"top_p": 0.95, "seed": 1000 + i, "end_ids": checkpoint.end_ids}
                | (MIXED[i % len(MIXED)] if mixed else {}),
            )
            for i, p in enumerate(prompts)
        ]
        plain = run(config, checkpoint, requests, Plain(), None)
        for number, (drafter, weights) in enumerate(drafters(config, checkpoint, requests, plain)):
            begin = time.perf_counter()
            outcome = run(config, checkpoint, requests, drafter, weights, shuffle=number)
            rounds = sum(r.rounds for r in outcome.results)
            rows.append(
                {
                    "dtype": str(checkpoint.params.dtype),
                    "slots": slots,
                    "temperature": temperature,
                    "mixed": mixed,
                    "drafter": drafter.name,
                    "prompts": len(prompts),
                    "tokens": sum(len(r.tokens) for r in outcome.results),
                    "rounds": rounds,
                    "accepted": sum(r.accepted for r in outcome.results),
                    "proposed": sum(r.proposed for r in outcome.results),
                    "kv_bits_compared": sum(c.nbytes * 8 for c in plain.columns),
                    **compare(plain, outcome),
                    "seconds": round(time.perf_counter() - begin, 1),
                }
            )
            print(rows[-1], flush=True)
    return rows


def split_read(q: Array, keys: Array, values: Array, columns: attention.Columns, **_: Any) -> Array:
    """The fault: cached and in-flight keys as two sums, combined at the end."""
    slots, rows, heads, width = q.shape
    groups = keys.shape[1]
    here = [lax.dynamic_slice_in_dim(x, columns.slot, slots) for x in (keys, values)]
    k, v = (unpack(x).astype(jnp.float32) for x in here)
    folded = q.reshape(slots, rows, groups, heads // groups, width)
    scores = jnp.einsum("rngmh,rgsh->rgmns", folded, k) * jnp.float32(width**-0.5)
    cached = lax.broadcasted_iota(jnp.int32, (1, 1, keys.shape[2]), 2) < columns.start[:, None, None]
    parts = []
    for part in (columns.visible & cached, columns.visible & ~cached):
        seen = part[:, None, None]
        top = jnp.max(jnp.where(seen, scores, jnp.float32(-1e30)), axis=-1, keepdims=True)
        weight = jnp.where(seen, jnp.exp(scores - top), jnp.float32(0))
        parts.append((top, jnp.sum(weight, -1, keepdims=True), jnp.einsum("rgmns,rgsh->rgmnh", weight, v)))
    (top_a, total_a, out_a), (top_b, total_b, out_b) = parts
    top = jnp.maximum(top_a, top_b)
    a, b = jnp.exp(top_a - top), jnp.exp(top_b - top)
    out = (out_a * a + out_b * b) / (total_a * a + total_b * b)
    return out.transpose(0, 3, 1, 2, 4).reshape(slots, rows, heads * width)


def controls(checkpoint: Checkpoint, prompts: list[tuple[int, ...]], tokens: int) -> list[dict[str, Any]]:
    """Plants three faults and reports what differs; each must."""
    longest = max(map(len, prompts)) + tokens
    config = EngineConfig(target=checkpoint.config, slots=8, rows=8, max_length=longest)
    greedy = [Request(prompt=p, max_tokens=tokens, temperature=0.0, seed=0) for p in prompts]
    sampled = [Request(prompt=p, max_tokens=tokens, temperature=0.8, top_p=0.95, seed=i) for i, p in enumerate(prompts)]
    ngram = NGram(proposals=7)
    rows = []

    def report(fault: str, found: dict[str, int]) -> None:
        rows.append({"control": fault, "dtype": str(checkpoint.params.dtype), "prompts": len(prompts), **found})
        print(rows[-1], flush=True)

    plain = run(config, checkpoint, greedy, Plain(), None)
    report("none (right engine, must be 0)", compare(plain, run(config, checkpoint, greedy, ngram, None)))

    # Two chunk sizes may share their bits by luck of the compiler; a chunk of one row does not in float32.
    for chunk in (config.chunk // 2, 1):
        other = dataclasses.replace(config, chunk=chunk)
        found = compare(plain, run(other, checkpoint, greedy, Plain(), None))
        report(f"prefill by the program of {chunk} rows for {config.chunk}", found)

    right_read = attention.read
    attention.read = split_read
    jax.clear_caches()
    faulty = run(config, checkpoint, greedy, Plain(), None)
    report("cached and in-flight keys summed apart", compare(faulty, run(config, checkpoint, greedy, ngram, None)))
    attention.read = right_read
    jax.clear_caches()

    right_commit = static.commit

    def stream(drafter: Drafter, weights: Any, state: DecodeState, *rest: Any, **rule: Any) -> Any:
        """Fresh noise every round, as a key that is split from round to round would give."""
        moved: sampling.Sampling = state.sampling.replace(seed=state.sampling.seed + jnp.uint32(1))
        return right_commit(drafter, weights, state.replace(sampling=moved), *rest, **rule)

    static.commit = stream
    faulty = run(config, checkpoint, sampled, Plain(), None)
    report("noise from a running stream", compare(faulty, run(config, checkpoint, sampled, ngram, None)))
    static.commit = right_commit
    return rows


def main() -> None:
    """Runs the matrix or the controls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with math500.jsonl, gsm8k.jsonl, ...")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--mixed", action="store_true", help="another processor for each request of a batch")
    parser.add_argument("--controls", action="store_true", help="plant faults instead; each must be seen")
    args = parser.parse_args()
    configure_cache()
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        checkpoint = loading.load(dtype=dtype)
        prompts = read_prompts(args.data, args.prompts, checkpoint)
        if args.controls:
            rows += controls(checkpoint, prompts, args.tokens)
        else:
            rows += matrix(checkpoint, prompts, args.slots, args.tokens, args.mixed)
    print(json.dumps({"jax": jax.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
