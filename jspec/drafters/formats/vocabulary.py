"""The draft vocabulary of a published file: `d2t` and `t2d`, to the token of each column.

`d2t [Vd]` holds offsets: column i is the token `i + d2t[i]`. `t2d [V]` marks the tokens that have a
column. Some files hold the tokens themselves in `d2t`; `t2d` tells which it is, and without it the
format's own rule holds.
"""

from __future__ import annotations

import numpy as np

from jspec.drafters import files
from jspec.drafters.formats.source import Source

MAPS = ("d2t", "t2d")


def read(source: Source, size: int | None, rows: int, vocab: int) -> tuple[np.ndarray | None, list[str]]:
    """The tokens of the columns, `[Vd]` int32; None for the whole vocabulary. Also a note, if one is due.

    Args:
      size: Vd as the configuration gives it, None if it does not.
      rows: V as the file has it, padding included.
      vocab: V, of the target.
    """
    if size is not None and not 1 <= size <= rows:
        source.refuse(f"gives `draft_vocab_size` as `{size}` and `vocab_size` as `{rows}`", f"1 to {rows}")
    if "d2t" not in source.tensors:
        if size is not None and size < min(rows, vocab):
            # Known-failures LD-3: the first ids would be taken for them, and nothing would say so.
            source.refuse(
                f"drafts `{size}` of the target's `{vocab}` tokens, and has no tensor `d2t` that says which",
                "a map beside a draft vocabulary that is smaller than the target's",
            )
        if "t2d" in source.tensors:
            source.refuse("has the tensor `t2d` without `d2t`", "both, or neither")
        return None, []
    columns = _map(source, "d2t", ("I64", "I32"), None)
    if size is not None and len(columns) != size:
        source.refuse(f"has `{len(columns)}` entries in `d2t`, and `draft_vocab_size` is `{size}`", "as many")
    ids = np.arange(len(columns), dtype=np.int64) + columns
    note: list[str] = []
    if "t2d" in source.tensors:
        marked = np.flatnonzero(_map(source, "t2d", ("BOOL",), rows))
        if not np.array_equal(np.sort(ids), marked):
            if not np.array_equal(np.sort(columns), marked):
                source.refuse(
                    "has maps that contradict each other: the tokens of `d2t` are not those that `t2d` marks",
                    "`d2t` of offsets, `token - column`, or of tokens, in agreement with `t2d`",
                )
            ids = columns
            note = ["`d2t` holds tokens, not offsets: so `t2d` says"]
    wrong = [i for i, token in enumerate(ids) if not 0 <= token < vocab]
    if wrong:  # known-failures LD-4
        source.refuse(
            f"maps column `{wrong[0]}` to the token `{ids[wrong[0]]}`",
            f"tokens from 0 to {vocab - 1}; `d2t` holds offsets, `token - column`",
        )
    first: dict[int, int] = {}
    for i, token in enumerate(ids):
        if token in first:
            source.refuse(f"maps the columns `{first[token]}` and `{i}` to one token, `{token}`", "different tokens")
        first[token] = i
    if len(ids) == vocab and np.array_equal(ids, np.arange(vocab)):
        return None, note
    return ids.astype(np.int32), note


def written(ids: np.ndarray | None, vocab: int) -> dict[str, np.ndarray]:
    """The two tensors of a draft vocabulary; none for the whole one."""
    if ids is None:
        return {}
    marked = np.zeros(vocab, np.bool_)
    marked[ids] = True
    return {"d2t": ids.astype(np.int64) - np.arange(len(ids)), "t2d": marked}


def _map(source: Source, name: str, kinds: tuple[str, ...], length: int | None) -> np.ndarray:
    tensor = source.tensors[name]
    if tensor.dtype not in kinds or len(tensor.shape) != 1 or length not in (None, tensor.shape[0]):
        wanted = "one axis" if length is None else f"shape ({length},)"
        source.refuse(f"has `{name}` as {tensor.dtype} of shape {tensor.shape}", f"{' or '.join(kinds)} of {wanted}")
    return files.read_tensor(tensor)
