"""One door to every checkpoint: the embedded model or a file, recognised by what is given."""

from __future__ import annotations

from pathlib import Path

from jspec.errors import JspecError
from jspec.target import gguf
from jspec.target.checkpoint import Checkpoint

EMBEDDED = "smollm2-135m"


def load(source: str | Path | None = None, *, dtype: str | None = None) -> Checkpoint:
    """Loads a target.

    Args:
      source: None or `smollm2-135m` for the embedded model, or the path of a GGUF file.
      dtype: of the weights, `bfloat16` (the default) or `float32`.
    """
    wanted = dtype or "bfloat16"
    if source is None or source == EMBEDDED:
        return gguf.load(gguf.find_embedded(), dtype=wanted)
    path = Path(source)
    if path.suffix == ".gguf":
        return gguf.load(path, dtype=wanted)
    raise JspecError(f"`{source}` is no target.", f"`{EMBEDDED}`, or a GGUF file.", "check the path.")
