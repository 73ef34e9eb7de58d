"""What one step costs, over slots B and rows N, beside the floor that memory sets.

    python bench/decode.py                                   the curve, bf16 and f32
    python bench/decode.py --slots 1 --rows 1 8 --dtypes bfloat16
    python bench/decode.py --slots 8 16 32 64 --rows 1 --prefill 64 128 256

The embedded model, every slot at the same length, one greedy round without proposals: verify, choice,
bookkeeping, and the host's wait. All shapes of a dtype take turns, so that noise of the machine falls
on each alike; medians are printed, and the ratio to B = 1, N = 1. The floor is the bytes that a step
must read (weights, head, keys and values) over the read-only bandwidth of all cores. The last line of
output is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decoding.state import RUNNING, DecodeState
from jspec.drafters.base import Plain
from jspec.engine import static
from jspec.engine.config import EngineConfig
from jspec.measure import card, hardware
from jspec.startup import configure_cache
from jspec.target import cache as kv
from jspec.target import loading
from jspec.target.checkpoint import Checkpoint


def stepper(
    checkpoint: Checkpoint, slots: int, rows: int, length: int, temperature: float, **shape: int
) -> Callable[[], float]:
    """A function that makes one round of an engine of its own and returns its seconds."""
    config = EngineConfig(target=checkpoint.config, slots=slots, rows=rows, max_length=2 * length, **shape)
    params, drafter = checkpoint.params, Plain()
    fresh = static.init(config, drafter, params, None)
    full = jnp.full((slots,), length, jnp.int32)
    held: list[DecodeState] = [
        fresh.replace(
            cache=fresh.cache.replace(length=full - 1),
            length=full,
            limit=full * 2,
            anchor=full % 1000,
            finish=jnp.full((slots,), RUNNING, jnp.int32),
            sampling=fresh.sampling.replace(
                temperature=jnp.full((slots,), temperature, jnp.float32), top_p=jnp.full((slots,), 0.95, jnp.float32)
            ),
        )
    ]
    left = [0]

    def step() -> float:
        if left[0] == 0:  # back to the same length, so that every repeat reads as much
            held[0] = held[0].replace(
                cache=held[0].cache.replace(length=full - 1), length=jnp.copy(full), limit=full * 2
            )
            left[0] = 16
        left[0] -= 1
        begin = time.perf_counter()
        held[0], info = static.step(config, drafter, params, None, held[0], shaped=False)
        jax.device_get(info)
        return time.perf_counter() - begin

    return step


def prefiller(checkpoint: Checkpoint, chunk: int, length: int) -> Callable[[], float]:
    """A function that reads one chunk of a prompt, behind `length` tokens, and returns its seconds."""
    config = EngineConfig(target=checkpoint.config, max_length=2 * length + chunk, chunk=chunk)
    held = [kv.init(checkpoint.config, 1, config.capacity, checkpoint.params.dtype)]
    tokens = jnp.arange(chunk, dtype=jnp.int32)
    start = length // chunk * chunk

    def step() -> float:
        begin = time.perf_counter()
        _, sound, held[0] = static.prefill(
            config, checkpoint.params, held[0], jnp.int32(0), tokens, jnp.int32(start), jnp.int32(chunk)
        )
        jax.block_until_ready(sound)
        return time.perf_counter() - begin

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="chunk sizes")
    parser.add_argument("--length", type=int, default=200, help="tokens in every slot")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="in alternation; with top-p 0.95")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    configure_cache()
    bandwidth = hardware.read_bandwidth()
    print(f"{hardware.device()}\nread-only bandwidth {bandwidth:.1f} GB/s")
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        checkpoint = loading.load(dtype=dtype)
        params = checkpoint.params
        head = params.embed if params.head is None else params.head
        weights = sum(x.nbytes for x in jax.tree.leaves(params.layers)) + head.nbytes
        per_token = kv.bytes_per_token(checkpoint.config, params.dtype)
        shapes = [(b, n, t) for b in args.slots for n in args.rows for t in args.temperatures]
        steps = {(b, n, t): stepper(checkpoint, b, n, args.length, t) for b, n, t in shapes}
        reads = {c: prefiller(checkpoint, c, args.length) for c in args.prefill}
        for step in (*steps.values(), *reads.values()):
            step(), step()
        times: dict[Any, list[float]] = {s: [] for s in (*steps, *reads)}
        for _ in range(args.repeats):
            for key, step in (*steps.items(), *reads.items()):
                times[key].append(step())
        base = float(np.median(times[shapes[0]])) if shapes else 1.0
        for b, n, t in shapes:
            ms = 1e3 * float(np.median(times[b, n, t]))
            kv_bytes = b * args.length * per_token
            floor = 1e3 * b / card.floor_tps(b, weight_bytes=weights, kv_bytes=kv_bytes, bandwidth_gb_s=bandwidth)
            rows.append(
                {"dtype": dtype, "B": b, "N": n, "T": t, "ms": round(ms, 2), "ratio": round(ms / 1e3 / base, 2),
                 "floor_ms": round(floor, 2), "share": round(floor / ms, 3), "steps_tok_s": round(1e3 * b / ms, 1)}
            )  # fmt: skip
            print(rows[-1], flush=True)
        for chunk in args.prefill:
            ms = 1e3 * float(np.median(times[chunk]))
            rows.append({"dtype": dtype, "prefill": chunk, "ms": round(ms, 2), "tok_s": round(1e3 * chunk / ms)})
            print(rows[-1], flush=True)
    print(json.dumps({"versions": hardware.versions(), "bandwidth_gb_s": bandwidth, "rows": rows}, default=str))


if __name__ == "__main__":
    main()
