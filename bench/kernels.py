"""Tree attention over the shape table on whatever device is there: ours, XLA's, and other libraries'.

    python bench/kernels.py                       the real shapes (an accelerator)
    python bench/kernels.py --small               those of the tests (a CPU, seconds)

For each shape: milliseconds (median of the repeats, warm), GB/s of cache read, and the share of the floor,
the time that this device needs to read the cache once at the bandwidth measured in the same run. Beside ours
stand those of `peer_attention.py`, JAX's own and tokamax's (`pip install tokamax`), or why they cannot
compute the shape. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decoding import tree
from jspec.measure import hardware
from jspec.target.cache import pack, storage_dtype, unpack
from pallas_kernels.tree_attention import api, shapes

sys.path.insert(0, str(Path(__file__).parent))
import peer_attention


def bandwidth(size: int) -> float:
    """Bytes a second that this device reads: the largest element of an array of `size` bytes, best of 5."""
    x = jnp.zeros((size // 4,), jnp.float32)
    run = jax.jit(jnp.max)
    run(x).block_until_ready()
    best = min(_seconds(run, (x,)) for _ in range(5))
    return size / best


def _seconds(run: Callable[..., Any], args: tuple[Any, ...], inner: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(inner):
        out = run(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) / inner


def arguments(shape: shapes.Shape) -> tuple[Any, ...]:
    """A chain at the end of a full cache."""
    s = shape
    keys = iter(jax.random.split(jax.random.key(0), 3))
    q = jax.random.normal(next(keys), (s.slots, s.rows, s.heads, s.width), jnp.float32)
    k, v = (
        jax.random.normal(next(keys), (s.slots, s.groups, s.capacity, s.width), jnp.float32).astype(s.dtype)
        for _ in range(2)
    )
    start = jnp.full((s.slots,), s.capacity - s.rows, jnp.int32)
    rows = api.Rows(
        slot=jnp.int32(0),
        start=start,
        ancestors=jnp.broadcast_to(jnp.asarray(tree.chain_bits(s.rows)), (s.slots, s.rows, s.words)),
        positions=start[:, None] + jnp.arange(s.rows, dtype=jnp.int32)[None] if s.window else None,
        window=s.window,
    )
    return q, k, v, rows


def implementations(shape: shapes.Shape, call: tuple[Any, ...]) -> dict[str, Any]:
    """What can compute a shape here: a function and its arguments; text is the reason why not."""
    here = jax.default_backend()
    found: dict[str, Any] = {}
    q, k, v, rows = call
    held = storage_dtype(k.dtype)
    cache = pack(k.astype(jnp.float32), held), pack(v.astype(jnp.float32), held)
    for name in ("tpu", "gpu", "xla"):
        if not api.runs_on(name, here):
            continue
        each = shapes.for_gpu(shape) if name == "gpu" else shape
        why = api.module(name).refuses(each)
        found[name] = why or (_ours(name, each), (q, *cache, rows))
    for name, peer in peer_attention.PEERS.items():
        why = peer_attention.refuses(peer, shape, here)
        found[name] = why or (peer.run(shape), peer.prepare(shape, *call))
    return found


def _ours(name: str, shape: shapes.Shape) -> Callable[..., Any]:
    run = functools.partial(api.attend, name, key_block=shape.key_block, cap=shape.cap)
    return lambda q, k, v, rows: run(q, unpack(k), unpack(v), rows)


def measure(shape: shapes.Shape, rate: float, repeats: int, inner: int) -> list[dict[str, Any]]:
    """Rows of one shape; implementations take turns, so that drift meets all of them."""
    runs, out = {}, []
    for name, found in implementations(shape, arguments(shape)).items():
        if not isinstance(found, str):
            run, call = jax.jit(found[0]), found[1]
            try:
                jax.block_until_ready(run(*call))
            except Exception as e:
                # A peer says only when it is tried what it cannot do; ours have refused before.
                if name not in peer_attention.PEERS:
                    raise
                found = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:200]}"
            else:
                runs[name] = run, call
                continue
        out.append({"shape": shape.name(), "kernel": name, "refused": found})
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (run, call) in runs.items():
            seconds[name].append(_seconds(run, call, inner))
    want = _numbers(*runs["xla"])
    for name, (run, call) in runs.items():
        median = statistics.median(seconds[name])
        out.append(
            {
                "shape": shape.name(),
                "kernel": name,
                "ms": round(median * 1e3, 4),
                "gb_s": round(shape.cache_bytes / median / 1e9, 1),
                "of_floor": round(shape.cache_bytes / rate / median, 3),
                "from_xla": float(np.abs(_numbers(run, call) - want).max()),
            }
        )
    return out


def _numbers(run: Callable[..., Any], call: tuple[Any, ...]) -> np.ndarray:
    return np.asarray(run(*call), np.float32).reshape(-1)


def table(asked: Sequence[shapes.Shape], repeats: int, inner: int) -> dict[str, Any]:
    """The rows of some shapes, against the bandwidth of this device."""
    rate = bandwidth(1 << 30)
    rows = []
    for shape in asked:
        for row in measure(shape, rate, repeats, inner):
            print(row, flush=True)
            rows.append(row)
    return {"read_gb_s": round(rate / 1e9, 1), "rows": rows}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the shapes of the tests")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--inner", type=int, default=10, help="calls in a row that one time is taken of")
    options = parser.parse_args()
    found = table(shapes.SMALL if options.small else shapes.REAL, options.repeats, options.inner)
    print(json.dumps({"schema": 1, "device": hardware.device(), "versions": hardware.versions(), **found}, default=str))


if __name__ == "__main__":
    main()
