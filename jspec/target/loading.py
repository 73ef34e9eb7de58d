"""One door to every checkpoint, recognised by what is given."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from jspec import startup
from jspec.errors import JspecError
from jspec.target import dtypes, gguf, hf, hub, known, products
from jspec.target.checkpoint import Checkpoint

EMBEDDED = "smollm2-135m"


def load(
    source: str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    context: int | None = None,
    revision: str | None = None,
) -> Checkpoint:
    """Loads a target.

    Args:
      source: None or `smollm2-135m` for the embedded model; the path of a GGUF file; a folder in
        Hugging Face's layout; a name of `configs/targets.toml`; or a hub id, `owner/model`. What exists
        on this machine comes first.
      dtype: of the linear weights, `bfloat16` or `float32`. Left out or `auto`, the checkpoint decides,
        and a GGUF file, which is mostly of smaller types, becomes `bfloat16`.
      context: for the rope type `dynamic`: the longest text, in tokens, that its frequencies are made for.
      revision: of a hub id: branch, tag or commit.

    Raises:
      JspecError: nothing of that name, or a checkpoint that is damaged, not supported or too large.
    """
    made = _read(source, dtype=dtype, context=context, revision=revision)
    layers = made.params.layers
    # The largest products, or where all blocks are mixtures the largest besides theirs.
    weights = [w for layer in layers if (w := layer.gate_up) is not None] or [layer.qkv for layer in layers]
    form = products.choose(weights, startup.folder() / "products.json", products.machine())
    return dataclasses.replace(made, params=made.params.replace(products=form))


def _read(
    source: str | os.PathLike[str] | None, *, dtype: str | None, context: int | None, revision: str | None
) -> Checkpoint:
    wish = dtypes.asked(dtype)
    name = EMBEDDED if source is None else os.fspath(source)
    path = pathlib.Path(name)
    if revision is not None and (name == EMBEDDED or os.path.lexists(path)):
        raise JspecError(
            f"`revision` is `{revision}` and `{name}` is local.", "a revision of a hub id.", "leave it out."
        )
    if name == EMBEDDED or path.suffix == ".gguf":
        if context is not None:
            raise JspecError(
                f"`context` is `{context}` and `{name}` is a GGUF file.",
                "a `context` for the rope type `dynamic`, which GGUF files do not have here.",
                "leave `context` out.",
            )
        return gguf.load(gguf.find_embedded() if name == EMBEDDED else path, dtype=wish or "bfloat16")
    if os.path.lexists(path):
        if not path.is_dir():
            raise JspecError(
                f"`{name}` is a file.",
                "a GGUF file, whose name ends in `.gguf`, or a folder in Hugging Face's layout.",
                "give the folder that the file is in.",
            )
        return hf.load(path, dtype=dtype, context=context)
    repo = known.targets()[name].hub if name in known.targets() else name
    if not hub.is_repo(repo):
        raise JspecError(
            f"`{name}` is no target: there is no such file or folder, and no target of that name.",
            f"a GGUF file, a folder, a hub id (`owner/model`), or one of {', '.join([EMBEDDED, *known.targets()])}.",
            "check the name or path for a typing error.",
        )
    folder, notes = hub.fetch(repo, revision=revision, dtype=dtype)
    made = hf.load(folder, dtype=dtype, context=context, name=repo.split("/")[1])
    return dataclasses.replace(made, source=f"{repo} ({folder})", notes=(*notes, *made.notes))
