"""What must happen before the first array: the persistent compilation cache, and counting programs.

JAX keeps compiled programs on disk only if it is told where, and with its own thresholds only those
that took a second or more. `configure_cache` sets both; call it before anything is compiled, since
programs compiled earlier are not stored. `CompileCounter` counts what the backend was asked for and
tells programs compiled from programs read from the disk: "nothing compiles after warm-up" is
`counter.programs == 0`, "the second start found the cache" is `counter.loaded > 0`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType

import jax
from jax.experimental.compilation_cache import compilation_cache

# Events of jax.monitoring. The duration event fires for a program read from the cache as well, after
# the hit and on the same thread; "misses" fires when a program is handed to the cache for writing.
_HIT = "/jax/compilation_cache/cache_hits"
_STORED = "/jax/compilation_cache/cache_misses"
_PROGRAM = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """Where compiled programs are kept.

    Args:
      path: the folder (absolute) or the URL in use; None when programs are not kept.
      entries: programs found there; None for a URL, or when programs are not kept.
      reason: why programs are not kept; None when they are.
    """

    path: str | None
    entries: int | None
    reason: str | None

    def __str__(self) -> str:
        if self.path is None:
            return f"compile cache off: {self.reason}"
        found = "" if self.entries is None else f" ({self.entries} programs)"
        return f"compile cache {self.path}{found}"


def configure_cache(path: str | os.PathLike[str] | None = None) -> CacheReport:
    """Keeps compiled programs in a folder, so that a second process need not compile them again.

    A folder that cannot be written costs time, not correctness: one warning on stderr, no failure.
    Whoever can write to the folder can run code in this process, so a new one is private to the user.

    Args:
      path: a folder, or a URL that JAX understands (`gs://...`). Left out, the first of these that is
        set: `$JSPEC_CACHE_DIR`, JAX's own `jax_compilation_cache_dir`, `~/.cache/jspec/xla`
        (`$XDG_CACHE_HOME` in place of `~/.cache`).
    """
    settings = jax.config.values
    if not settings["jax_enable_compilation_cache"]:
        return CacheReport(None, None, "`jax_enable_compilation_cache` is false")
    wanted = str(path or os.environ.get("JSPEC_CACHE_DIR") or settings["jax_compilation_cache_dir"] or _default())
    entries, reason = None, None
    if "://" not in wanted:
        try:
            folder = Path(wanted).expanduser().absolute()
            wanted = str(folder)
            entries = _prepare(folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            reason = f"`{wanted}` cannot be written ({error})"
            print(
                f"jspec: warning: compile cache: {reason}; every start compiles anew."
                " To do: set JSPEC_CACHE_DIR to a folder that can be written.",
                file=sys.stderr,
            )
    chosen = None if reason else wanted
    jax.config.update("jax_compilation_cache_dir", chosen)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX opens the folder once, at the first compilation, and would not notice a later change.
    compilation_cache.reset_cache()
    return CacheReport(chosen, entries, reason)


def folder() -> Path:
    """Where jspec keeps what it can make again, `~` not yet expanded. It may not exist, nor be allowed to."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jspec")


def _default() -> Path:
    return folder() / "xla"


def _prepare(folder: Path) -> int:
    """Makes the folder, proves that it can be written, returns the number of programs in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    return sum(entry.name.endswith("-cache") for entry in os.scandir(folder))


class CompileCounter:
    """Counts the programs that JAX asks the backend for while the `with` block runs, on all threads.

    Operations outside `jit` are programs too, each compiled at its first use. Counters may nest.

    Attributes:
      names: of every program asked for, in order, as JAX calls them (`jit(verify)`).
      compiled: programs that were compiled, and `compile_s`, the seconds that took.
      loaded: programs read from the persistent cache instead, and `load_s`.
      stored: compiled programs handed to the persistent cache. Less than `compiled` means that some
        programs, such as those with host callbacks, cannot be kept; 0 that nothing is kept at all.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.compiled = 0
        self.compile_s = 0.0
        self.loaded = 0
        self.load_s = 0.0
        self.stored = 0
        self._lock = threading.Lock()
        self._thread = threading.local()

    @property
    def programs(self) -> int:
        """Programs asked for, whether compiled or loaded: 0 once everything is warm."""
        return self.compiled + self.loaded

    def __enter__(self) -> CompileCounter:
        jax.monitoring.register_event_listener(self._event)
        jax.monitoring.register_event_duration_secs_listener(self._duration)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_listener(self._event)
        jax.monitoring.unregister_event_duration_listener(self._duration)

    def _event(self, event: str, **_: str | int) -> None:
        if event == _HIT:
            self._thread.hit = True
        elif event == _STORED:
            with self._lock:
                self.stored += 1

    def _duration(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event != _PROGRAM:
            return
        hit = getattr(self._thread, "hit", False)
        self._thread.hit = False
        with self._lock:
            self.names.append(str(details.get("fun_name", "?")))
            if hit:
                self.loaded += 1
                self.load_s += duration_secs
            else:
                self.compiled += 1
                self.compile_s += duration_secs

    def __str__(self) -> str:
        return (
            f"{self.programs} programs: {self.loaded} from the cache in {self.load_s:.2f} s,"
            f" {self.compiled} compiled in {self.compile_s:.2f} s"
        )
