"""What the machine is, and how fast it can read memory.

Decoding a token reads every weight once, so on most machines the read-only bandwidth of the memory
decides how fast plain decoding can be at best.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from jspec.errors import JspecError

GIB = 1 << 30
# Vector and matrix units that decide which products are fast; names as in /proc/cpuinfo.
_ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve", "i8mm")
_PACKAGES = ("jspec", "jax", "jaxlib", "numpy", "flax", "gguf", "transformers", "tokenizers")


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_bandwidth(*, size: int = GIB, repeats: int = 5) -> float:
    """Measures how fast all cores together can read main memory, in GB/s (10^9 bytes a second).

    Threads sum disjoint parts of one array; the best of `repeats` passes counts, since other work on
    the machine can only slow a pass down. Half the cores are tried as well: where two threads share
    a core, fewer can be faster. Takes about a second and frees its memory. On an accelerator use its
    data sheet's figure instead.

    Args:
      size: bytes to read per pass. Much more than the last-level cache, or the cache is measured.
      repeats: passes for each number of threads.
    """
    if size < 8 * cores() or repeats < 1:
        raise JspecError(
            f"`size` is `{size}` and `repeats` is `{repeats}`.",
            "at least 8 bytes a core and 1 pass.",
            "use the defaults, 1 GiB and 5 passes.",
        )
    try:
        words = np.empty(size // 8, np.uint64)
    except MemoryError as error:
        raise JspecError(
            f"{size / GIB:.1f} GiB for the bandwidth measurement could not be allocated.",
            "about 1 GiB of free memory.",
            "close other programs, or pass a smaller `size` that is still well above the last-level cache.",
        ) from error
    return max(_pass_bandwidth(words, threads, repeats) for threads in sorted({cores(), max(1, cores() // 2)}))


def _pass_bandwidth(words: np.ndarray, threads: int, repeats: int) -> float:
    parts = np.array_split(words, threads)
    together = threading.Barrier(threads)
    starts = np.zeros((repeats, threads))
    ends = np.zeros((repeats, threads))

    def read(i: int) -> None:
        # Written first, by the thread that reads it: pages never written all share one page of
        # zeros that stays in cache, and on several sockets the writer decides where a page lies.
        parts[i].fill(1)
        for r in range(repeats):
            together.wait()
            starts[r, i] = time.perf_counter()
            parts[i].sum()  # numpy lets go of the interpreter lock here
            ends[r, i] = time.perf_counter()

    readers = [threading.Thread(target=read, args=(i,)) for i in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    seconds = float((ends.max(axis=1) - starts.min(axis=1)).min())
    return words.nbytes / seconds / 1e9


def l3_bytes() -> int | None:
    """Size of the last-level cache that one core sees, in bytes; None where the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text()
    except OSError:
        try:
            listing = subprocess.run(
                ["lscpu", "-B"], capture_output=True, text=True, timeout=5, env={**os.environ, "LC_ALL": "C"}
            ).stdout
        except (OSError, subprocess.SubprocessError):
            return None
        found = re.search(r"^L3 cache:\s*(\d+)", listing, re.MULTILINE)
        text = found.group(1) if found else ""
    sized = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(sized[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[sized[2]] if sized else None


def device() -> dict[str, Any]:
    """Describes the device that computes.

    Returns:
      `kind` ("cpu", "gpu", "tpu"), `name`, `count`, and for the host `cores`, `isa` (those of the
      vector extensions that matter here) and `l3_bytes`. JAX is asked only where the program has
      imported it already; without it the host is described.
    """
    model, flags = _cpuinfo()
    found: dict[str, Any] = {
        "kind": "cpu",
        "name": model,
        "count": 1,
        "cores": cores(),
        "isa": [f for f in _ISA if f in flags],
        "l3_bytes": l3_bytes(),
    }
    jax = sys.modules.get("jax")
    if jax is not None and jax.default_backend() != "cpu":
        devices = jax.devices()
        found |= {"kind": jax.default_backend(), "name": devices[0].device_kind, "count": len(devices), "host": model}
    return found


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that can change a figure; None where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _cpuinfo() -> tuple[str, frozenset[str]]:
    """Model name and instruction-set flags of the first core."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    name = model.group(1).strip() if model else platform.machine()
    return name, frozenset(flags.group(1).split()) if flags else frozenset()
