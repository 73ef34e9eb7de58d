"""What a GPU's compiler chooses by timing: kept on disk, and part of an engine's fingerprint (known-failures DT-5).

XLA times several programs for a product and takes the fastest, so two processes may run two programs and get
two texts. JAX keeps the choices beside its compiled programs (`jspec.startup.configure_cache`), and whoever
finds one there takes it as it is. Choices are only ever added, so a folder of them is known by a mark that is
drawn once and lies among them: the same mark, the same choices; removed with them, it is drawn anew.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from pathlib import Path

import jax

_KIND = "xla_gpu_per_fusion_autotune_cache_dir"  # JAX's name of the option and of the folder
_MARK = "jspec-mark"


def store() -> Path | None:
    """The folder that choices are kept in; None where the next process would choose anew."""
    settings = jax.config.values
    kinds, cache = settings["jax_persistent_cache_enable_xla_caches"] or "", settings["jax_compilation_cache_dir"]
    if not settings["jax_enable_compilation_cache"] or not cache or "://" in cache:
        return None
    return Path(cache) / _KIND if kinds == "all" or _KIND in kinds else None


def mark() -> str:
    """Stands for the choices that programs compiled from here on are made by."""
    folder = store()
    if folder is None:
        return _own()
    path = folder / _MARK
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            drawn = folder / f"{_MARK}-{secrets.token_hex(16)}"
            drawn.write_text(drawn.name)
            with contextlib.suppress(FileExistsError):  # another process was faster: its mark counts
                os.link(drawn, path)
            drawn.unlink()
        return path.read_text()
    except OSError:
        return _own()


@functools.cache
def _own() -> str:
    """The mark of a process that keeps nothing: no other has it."""
    return f"this process alone, {secrets.token_hex(16)}"
