"""How the products of few rows are laid out: by measurement, once a machine, and on record.

A product of a few rows costs its weights' bytes only where the backend runs it without turning the
weights around first. Which form does that differs by backend, number type, row count and machine
(docs/log.md), and with the form the last bits differ. So the form is part of the engine: it travels
with the weights (`TargetParams.products`), is chosen by timing the checkpoint's own weights, kept on
disk for the next process, and printed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array, lax

CLEARLY = 0.9  # a form replaces the plain one only if it takes less than this share of its time
ENOUGH = 64 << 20  # bytes; weights that fit into the processor's caches would measure those
TRIED = (4, 16, 64)  # rows at which the weights are tried as the left operand
PADDED = (1, 2, 4)  # rows that a single row may be padded to


@dataclasses.dataclass(frozen=True)
class Products:
    """The form of `x [rows, in]` times `weight [out, in]`, by row count.

    Args:
      least: fewer rows are padded to so many.
      left: from 2 to so many rows, the weights are the left operand and the rows the right one; 0 for
        never.
      reason: what decided it; part of no comparison.
    """

    least: int = 1
    left: int = 0
    reason: str = dataclasses.field(default="default", compare=False)

    def __str__(self) -> str:
        form = f"weights on the left up to {self.left} rows" if self.left else "weights on the right"
        return f"{form}, at least {self.least} rows ({self.reason})"


def default(dtype: jnp.dtype) -> Products:
    """What is used unmeasured: for small models, and off the CPU."""
    # XLA's CPU backend runs a bfloat16 product of one row 10 times slower than one of two or more.
    return Products(least=4) if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else Products()


def machine() -> str:
    """What the choice depends on besides the weights, as a key: processor, cores, versions, flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = sorted(
            {line for line in lines if line.split("\t")[0] in ("model name", "flags", "Features", "CPU part")}
        )
    except OSError:
        told = [platform.processor()]
    facts = (platform.machine(), *told, os.environ.get("XLA_FLAGS", ""))
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return f"{digest}, {os.cpu_count()} cores, jax {jax.__version__}"


def multiply(rows: Array, weight: Array, form: Products) -> Array:
    """`rows [n, in]` times `weight [out, in]` of one dtype, accumulated and returned in float32 `[n, out]`."""
    count = rows.shape[0]
    if count < form.least:
        rows = jnp.pad(rows, ((0, form.least - count), (0, 0)))
    # Without HIGHEST a float32 product runs in bfloat16 or TF32 passes on TPU and GPU.
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    if 2 <= rows.shape[0] <= form.left:
        # The barriers keep the transposes of the small arrays from being folded into the product,
        # which would turn it back into the other form.
        turned = lax.optimization_barrier(rows.T)
        along = (((1,), (0,)), ((), ()))
        out = lax.dot_general(weight, turned, along, precision=precision, preferred_element_type=jnp.float32)
        out = lax.optimization_barrier(out).T
    else:
        along = (((1,), (1,)), ((), ()))
        out = lax.dot_general(rows, weight, along, precision=precision, preferred_element_type=jnp.float32)
    return out[:count]


def choose(weights: Sequence[Array], store: Path, key: str) -> Products:
    """The form for these weights on this machine: read from `store`, or else measured and kept there.

    Args:
      weights: matrices `[out, in]` of one shape and dtype, one a layer.
      store: a JSON file of earlier choices; None keeps nothing.
      key: what the choice depends on besides the weights: machine and versions.
    """
    first = weights[0]
    if jax.default_backend() != "cpu" or sum(w.nbytes for w in weights) < ENOUGH:
        return default(first.dtype)
    unkept = dataclasses.replace(default(first.dtype), reason=f"default: `{store}` cannot be written")
    try:
        store = store.expanduser()
    except RuntimeError:  # there is no home folder
        return unkept
    key = f"{key}, {first.dtype} {first.shape}"
    kept = _read(store)
    if key in kept:
        return Products(**kept[key], reason="measured earlier on this machine")
    made = measure(lambda rows, form: _seconds(weights, rows, form))
    choice = {"least": made.least, "left": made.left}
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps({**kept, key: choice}, indent=1, sort_keys=True))
    except OSError:
        # The next process might measure otherwise, and write other text.
        return unkept
    return made


def measure(seconds: Callable[[int, Products], float]) -> Products:
    """Chooses from timings: `seconds(rows, form)` of one pass over the weights."""
    plain = {n: seconds(n, Products()) for n in sorted({*PADDED, *TRIED})}
    least = 1
    for n in PADDED[1:]:
        if plain[n] < CLEARLY * plain[least]:
            least = n
    left = 0
    for n in TRIED:
        if seconds(n, Products(left=n)) >= CLEARLY * plain[n]:
            break
        left = n
    return Products(least=least, left=left, reason="measured at load")


def _seconds(weights: Sequence[Array], rows: int, form: Products, repeats: int = 4) -> float:
    x = jnp.ones((rows, weights[0].shape[1]), weights[0].dtype)

    @jax.jit
    def run(x: Array, weights: Sequence[Array]) -> Array:
        total = jnp.float32(0)
        for weight in weights:  # each waits for the one before, as layers do
            y = multiply(x, weight, form)
            total = total + y[0, 0]
            x = x + (total * 0).astype(x.dtype)
        return total

    run(x, weights).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run(x, weights).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return best


def _read(store: Path) -> dict[str, dict[str, int]]:
    """Earlier choices; a file that cannot be read, or was meddled with, counts as none."""
    try:
        kept = json.loads(store.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict):
        return {}

    def sound(choice: object) -> bool:
        if not isinstance(choice, dict) or set(choice) != {"least", "left"}:
            return False
        return choice["least"] in PADDED and choice["left"] in (0, *TRIED)

    return {key: choice for key, choice in kept.items() if sound(choice)}
