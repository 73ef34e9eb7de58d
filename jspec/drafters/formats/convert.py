"""Published folders to drafters, and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save as to_bytes

from jspec.drafters import files
from jspec.drafters.block.config import BlockConfig
from jspec.drafters.files import Saved
from jspec.drafters.formats import copies, layout
from jspec.drafters.formats.recognise import FORMATS, Format, recognise
from jspec.drafters.formats.source import open_folder
from jspec.errors import JspecError
from jspec.target import dtypes, shards
from jspec.target.checkpoint import Checkpoint

OWN = "jspec"


@dataclasses.dataclass(frozen=True)
class Published:
    """A drafter that was read from a published format."""

    saved: Saved
    format: Format
    dtype_rule: str  # the dtype of its linear weights, and what decided it
    notes: tuple[str, ...]  # a line each


def read(folder: Path, target: Checkpoint, dtype: str | None = None) -> Published:
    """Reads a published drafter for a target.

    No format names its target for certain, so what can be compared is: shapes, depth, class, and copies of
    the target's weights. The result belongs to `target` alone.

    Args:
      dtype: of the linear weights, `bfloat16` or `float32`; left out or `auto`, the files decide (`dtypes.py`).

    Raises:
      JspecError: a folder that is damaged, of an unknown kind, or holds a drafter for another target.
    """
    source = open_folder(folder)
    found = recognise(source)
    reading = found.read(source, target)
    layout.check(source, reading)
    compared = copies.check(source, target, reading.ids, reading.rows)
    wanted = layout.shapes(reading.config, reading.rows)
    choice = dtypes.decide(dtype, source.config, (source.tensors[name] for name in wanted))
    saved = Saved(
        config=reading.config,
        params=layout.params(source, reading, choice.numpy),
        ids=reading.ids,
        target=target.fingerprint,
        record={"format": found.name, "configuration": source.config.data},
    )
    return Published(saved, found, choice.rule, (*reading.notes, *compared))


def load(folder: Path, target: Checkpoint) -> Saved:
    """A drafter from a folder in any format, ours included, for this target.

    Raises:
      JspecError: as `read`, or `files.load`.
    """
    if not files.is_own(folder):
        return read(folder, target).saved
    saved = files.load(folder)
    files.check_target(saved, target.fingerprint, target.name)
    return saved


@dataclasses.dataclass(frozen=True)
class Told:
    """How a drafter was understood: lines for people, facts for programs."""

    lines: list[str]
    facts: dict[str, Any]


def convert(source: Path, out: Path, target: Checkpoint, to: str = OWN, dtype: str | None = None) -> Told:
    """Rewrites a drafter in another format, without loss.

    Args:
      source: a folder in any format that can be read.
      out: a new or empty folder.
      to: `jspec`, or a name of `FORMATS`.

    Raises:
      JspecError: as `load`; an `out` that holds something; a format that has no place for a part of the drafter.
    """
    writers = [OWN, *(f.name for f in FORMATS.values() if f.write is not None)]
    if to not in writers:
        raise JspecError(f"the format to write is `{to}`.", f"{', '.join(writers)}.", "choose one of these.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise JspecError(f"`{out}` is there already.", "a new folder, or an empty one.", "choose another.")
    if files.is_own(source):
        saved, name = load(source, target), OWN
        held = str(saved.params.layers[0].q.dtype)
        if dtypes.asked(dtype) not in (None, held):
            raise JspecError(f"`dtype` is `{dtype}`.", f"`{held}`, which the drafter is in.", "leave `dtype` out.")
        lines = [f"read      jspec's own format, dtype {held}"]
    else:
        found = read(source, target, dtype)
        saved, name = found.saved, found.format.name
        lines = [f"read      {found.format.title}, dtype {found.dtype_rule}", *(f"          {n}" for n in found.notes)]
    c = saved.config
    if not isinstance(c, BlockConfig):
        raise JspecError(
            f"`{source}` holds a drafter of kind `{type(c).__name__}`.",
            "DFlash, DFlare or DSpark: other kinds have no published format here yet.",
            "use it as it is.",
        )
    rows = "every row predicts, the anchor's too" if c.from_anchor else "filled in, the anchor's row predicts nothing"
    columns = f"all {c.vocab_size} tokens" if saved.ids is None else f"{c.head_size} of {c.vocab_size} tokens"
    lines += [
        f"drafter   {c.family}, {c.layers} layers of width {c.width}, drafts {columns}",
        f"block     {c.block} rows, {rows}: up to {c.longest} drafts",
        f"taps      blocks {list(c.taps)} of {c.target_layers}, counted from 0; -1 is the embedding",
        f"mask      token {c.mask_id}",
        f"target    {target.name}, {target.fingerprint[:12]}, dtype {target.dtype_rule}",
    ]
    if to == OWN:
        files.save(out, saved, saved.params.layers[0].q.dtype)
    else:
        write = FORMATS[to].write
        assert write is not None
        config, tensors = write(saved, target)
        files.put(
            out, {shards.SINGLE: to_bytes(dict(tensors)), files.CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
        )
    facts = {
        "schema": 1,
        "from": name,
        "to": to,
        "out": str(out),
        "config": dataclasses.asdict(c),
        "dtype": str(saved.params.layers[0].q.dtype),
        "target": {"name": target.name, "fingerprint": target.fingerprint, "dtype": str(target.params.dtype)},
    }
    return Told([*lines, f"wrote     {out}, format {to}"], facts)
