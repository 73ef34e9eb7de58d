"""jspec's own files of a drafter: a folder of `config.json` and `model.safetensors`.

The configuration says everything that the weights do not: slot convention, taps, mask token, which target
they belong to and how they were trained. Tensors are named by their place in the parameter tree,
`layers.0.q` for instance; the draft vocabulary is the tensor `ids`, target ids in the order of columns.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save as to_bytes

from jspec.drafters.block import weights as block
from jspec.drafters.block.config import BlockConfig
from jspec.drafters.eagle3 import weights as eagle3
from jspec.drafters.eagle3.config import EagleConfig
from jspec.errors import JspecError
from jspec.target import documents, shards
from jspec.target.config import RopeConfig
from jspec.target.documents import Document

FORMAT = "jspec.drafter"
VERSION = 1
CONFIG = "config.json"
IDS = "ids"
DTYPES: Mapping[str, Any] = {
    **{"F32": np.float32, "BF16": ml_dtypes.bfloat16, "I32": np.int32},  # of our files
    **{"F16": np.float16, "I64": np.int64, "BOOL": np.bool_},  # and of published ones
}

# Per kind of drafter: its configuration, and a function that makes a tree of the right shapes.
KINDS: Mapping[str, tuple[type, Callable[[Any], Any]]] = {
    "block": (BlockConfig, lambda config: block.init(jax.random.key(0), config)),
    "eagle3": (EagleConfig, lambda config: eagle3.init(jax.random.key(0), config)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A drafter as it lies on disk."""

    config: Any  # of one of KINDS
    params: Any
    ids: np.ndarray | None  # [Vd] int32, the token of each column
    target: str  # fingerprint of the target it was trained for
    record: Mapping[str, Any]  # how it was trained; for people


def save(folder: Path, saved: Saved, dtype: Any = jnp.bfloat16) -> None:
    """Writes a drafter, each file whole or not at all.

    Args:
      dtype: of the linear weights; vectors stay float32.
    """
    kind = next(name for name, (cls, _) in KINDS.items() if isinstance(saved.config, cls))
    tensors = {}
    for name, leaf in _leaves(saved.params):
        tensors[name] = np.asarray(leaf, np.float32 if _exact(name, leaf) else np.dtype(dtype))
    if saved.ids is not None:
        tensors[IDS] = np.asarray(saved.ids, np.int32)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "target": saved.target,
        "config": dataclasses.asdict(saved.config),
        "record": dict(saved.record),
    }
    put(folder, {shards.SINGLE: to_bytes(tensors), CONFIG: (json.dumps(head, indent=1) + "\n").encode()})


def put(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes files into a folder, each whole or not at all, in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        partial = folder / (name + ".partial")
        partial.write_bytes(data)
        os.replace(partial, folder / name)


def is_own(folder: Path) -> bool:
    """Whether a folder's configuration says that it is in this format."""
    document = documents.read_if_there(folder / CONFIG)
    return document is not None and document.data.get("format") == FORMAT


def load(folder: Path) -> Saved:
    """Reads a drafter.

    Raises:
      JspecError: a file is missing or damaged, of a later version, or holds a tensor that is missing,
        unknown, of another shape or not finite.
    """
    document = documents.read(folder / CONFIG)
    if document.text("format", "") != FORMAT:
        document.refuse("is not a drafter of jspec", f"`format` {FORMAT}")
    if document.integer("version") != VERSION:
        document.refuse(f"is of version {document.data['version']}", f"version {VERSION}, or a newer jspec")
    kind = document.text("kind")
    if kind not in KINDS:
        document.refuse(f"holds a drafter of kind `{kind}`", ", ".join(KINDS))
    cls, make = KINDS[kind]
    inner = document.child("config")
    if inner is None:
        document.refuse("lacks the key `config`", "a file that gives it")
    config = _config(cls, inner)
    found = shards.read_header(folder / shards.SINGLE)
    shape = jax.eval_shape(lambda: make(config))
    wanted = dict(_leaves(shape))
    # `ids` is wanted where the vocabulary is pruned, and only there.
    vocab = getattr(config, "draft_vocab", None)
    if vocab is not None:
        wanted[IDS] = jax.ShapeDtypeStruct((vocab,), jnp.int32)
    _compare(folder / shards.SINGLE, wanted, found)
    arrays = {name: read_tensor(found[name]) for name in wanted}
    ids = arrays.pop(IDS, None)
    leaves = [jnp.asarray(arrays[name]) for name, _ in _leaves(shape)]
    params = jax.tree.unflatten(jax.tree.structure(shape), leaves)
    record = document.child("record")
    return Saved(
        config=config,
        params=params,
        ids=ids,
        target=document.text("target"),
        record={} if record is None else record.data,
    )


def check_target(saved: Saved, fingerprint: str, name: str) -> None:
    """Refuses weights that were trained for another target, whatever its shape."""
    if saved.target != fingerprint:
        raise JspecError(
            f"the drafter was trained for the target `{saved.target[:12]}`, and `{name}` is `{fingerprint[:12]}`.",
            "the very weights it was trained for: with others it would be right by luck only.",
            "load that target, or train a drafter for this one.",
        )


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in paths]


def _exact(name: str, leaf: Any) -> bool:
    """Whether a weight is kept in float32: vectors, and the mix of taps, a handful of numbers."""
    return len(leaf.shape) < 2 or name == "mix"


def _config(cls: type, document: Document) -> Any:
    """A configuration dataclass from its JSON; every field must be there, and nothing else."""
    made: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        document.mentions(field.name)
        if field.name not in document.data:
            document.refuse(f"lacks the key `{field.name}`", "a file that gives it")
        value = document.data[field.name]
        if field.name == "rope":
            child = document.child("rope")
            made[field.name] = _config(RopeConfig, child) if child is not None else None
        else:
            made[field.name] = tuple(value) if isinstance(value, list) else value
    if document.unread():
        document.refuse(f"holds the unknown key `{document.unread()[0]}`", "keys that this version writes")
    try:
        return cls(**made)
    except TypeError as error:
        document.refuse(f"holds a value of the wrong kind ({error})", "values as this version writes them")


def _compare(path: Path, wanted: Mapping[str, Any], found: Mapping[str, shards.Tensor]) -> None:
    for what, names in (
        ("lacks", sorted(set(wanted) - set(found))),
        ("has besides", sorted(set(found) - set(wanted))),
    ):
        if names:
            raise JspecError(
                f"`{path}` {what} the tensor `{names[0]}`" + (f" and {len(names) - 1} more." if names[1:] else "."),
                "exactly the tensors that the configuration asks for.",
                "get both files again, from one place.",
            )
    for name, leaf in wanted.items():
        kinds = ("I32",) if leaf.dtype == jnp.int32 else ("F32",) if _exact(name, leaf) else ("F32", "BF16")
        if found[name].shape != tuple(leaf.shape) or found[name].dtype not in kinds:
            raise JspecError(
                f"`{path}` has `{name}` as {found[name].dtype} of shape {found[name].shape}.",
                f"{' or '.join(kinds)} of shape {tuple(leaf.shape)}.",
                "get both files again, from one place.",
            )


def read_tensor(tensor: shards.Tensor) -> np.ndarray:
    """The values of one tensor, in its own dtype, one of `DTYPES`.

    Raises:
      JspecError: one of them is not finite.
    """
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.nbytes)
    array = np.frombuffer(data, DTYPES[tensor.dtype]).reshape(tensor.shape)
    if tensor.dtype in ("F32", "BF16", "F16") and not np.isfinite(array.astype(np.float32)).all():
        raise JspecError(
            f"`{tensor.file}` has a number in `{tensor.name}` that is not finite.",
            "finite weights.",
            "get the file again; it may be damaged.",
        )
    return array
