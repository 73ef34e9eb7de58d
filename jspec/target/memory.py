"""How much memory a target needs and the device has, so that what cannot fit is refused before it is loaded."""

from __future__ import annotations

import math
import pathlib

import jax
import numpy as np

from jspec.errors import JspecError
from jspec.target.config import TargetConfig
from jspec.target.plan import Plan

GIB = 1 << 30
LIMITS = "/sys/fs/cgroup"


def of_plan(plan: Plan, dtype: np.dtype) -> tuple[int, int]:
    """Bytes of all weights, and of the largest one, which is held twice while it is made."""
    sizes = [math.prod(w.shape) * (4 if w.exact else dtype.itemsize) for w in plan.values()]
    return sum(sizes), max(sizes)


def of_config(config: TargetConfig, dtype: np.dtype) -> int:
    """Bytes of all linear weights, from the configuration alone: an estimate before anything is fetched."""
    c = config
    attention = (2 * c.heads + 2 * c.kv_heads) * c.head_width * c.width
    dense, sparse = 3 * c.ff_width * c.width, 0
    if c.moe is not None:
        sparse = len(c.moe.layers)
        attention_and_experts = attention + 3 * c.moe.experts * c.moe.width * c.width
        blocks = sparse * attention_and_experts + (c.layers - sparse) * (attention + dense)
    else:
        blocks = c.layers * (attention + dense)
    return (blocks + (1 if c.tied_head else 2) * c.vocab_size * c.width) * dtype.itemsize


def available() -> int | None:
    """Bytes that the default device can still hold, as far as it tells; None if it does not.

    On a CPU what the system calls available, or what is left of the container's limit if that is less.
    """
    device = jax.devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else int(limit) - int(stats.get("bytes_in_use", 0))
    found = [n for n in (_system(), _container()) if n is not None]
    return min(found, default=None)


def check(name: str, need: int, dtype: str, free: int | None) -> None:
    """Refuses a target whose weights do not fit.

    Args:
      name: of the checkpoint.
      need: bytes.
      dtype: that the bytes were counted for.
      free: bytes, None where the device does not tell.
    """
    if free is None or need <= free:
        return
    half = " Or load it as bfloat16, which takes half of that." if dtype == "float32" else ""
    raise JspecError(
        f"the weights of `{name}` take {_gib(need)} as `{dtype}`, and {_gib(free)} of memory are free.",
        "weights that fit into the memory of the device.",
        f"free memory, or use a smaller checkpoint or a larger machine.{half}",
    )


def _system() -> int | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _container() -> int | None:
    """What is left of the memory limit of a container (cgroup version 2), not counting what can be dropped."""
    limit, used = (_lines(f"{LIMITS}/memory.{name}") for name in ("max", "current"))
    if not limit or not used or not limit[0].isdigit():
        return None
    cached = [int(line.split()[1]) for line in _lines(f"{LIMITS}/memory.stat") if line.startswith("inactive_file ")]
    return int(limit[0]) - int(used[0]) + sum(cached)


def _lines(path: str) -> list[str]:
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:
        return []


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
