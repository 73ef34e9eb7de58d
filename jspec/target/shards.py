"""The safetensors files of a checkpoint: their headers and index, checked before a weight is read.

A file is 8 bytes of header length, the header (JSON: name to dtype, shape and byte range), and the
tensors' bytes, without a gap. Headers come from strangers, so every number in one is checked against
the file, as the format's own library does; pickled files (`.bin`, `.pt`) can run code when they are
read and are refused.

Bytes are read into the arrays that keep them rather than mapped: pages of a mapped file count as
this process's memory until the whole file is let go, and the peak would be twice the weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import pathlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jspec.errors import JspecError
from jspec.target import documents

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")

LONGEST_HEADER = 100_000_000  # bytes, the format's own limit

# Bytes of one value; tensors of types that are not here are known by their byte range alone.
WIDTHS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file."""

    name: str
    dtype: str  # as the format spells it: F32, BF16, ...
    shape: tuple[int, ...]
    file: pathlib.Path
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Shards:
    """Everything that a folder's weight files hold, by name.

    `tensors` are those of the checkpoint: what the index names, and `unindexed` ones, which stand in a
    file that it names but not in the index itself. `stray` files are beside the checkpoint's and are
    not read.
    """

    files: tuple[pathlib.Path, ...]
    tensors: dict[str, Tensor]
    unindexed: tuple[str, ...]
    stray: tuple[str, ...]

    def fingerprint(self, more: Iterable[bytes] = ()) -> str:
        """SHA-256 over the files' sizes and headers, the first and last 4 KiB of each tensor, and `more`."""
        digest = hashlib.sha256()
        for path in self.files:
            with open(path, "rb") as f:
                (length,) = struct.unpack("<Q", f.read(8))
                digest.update(f"{os.fstat(f.fileno()).st_size} {length}".encode())
                digest.update(f.read(length))
                for tensor in self.tensors.values():
                    if tensor.file == path:
                        f.seek(tensor.offset)
                        digest.update(f.read(min(4096, tensor.nbytes)))
                        f.seek(tensor.offset + max(0, tensor.nbytes - 4096))
                        digest.update(f.read(min(4096, tensor.nbytes)))
        for part in more:
            digest.update(part)
        return digest.hexdigest()


def open_folder(folder: pathlib.Path) -> Shards:
    """Finds the weight files of a folder and reads their headers.

    The index decides where there is one: only the files it names are read (known-failures LD-10), all
    of them must be there (LD-9), and what it says of them must be true (LD-11).
    """
    there = sorted(path.name for path in folder.iterdir())
    weights = [name for name in there if name.endswith(".safetensors")]
    if INDEX not in there:
        if SINGLE not in there:
            raise _no_weights(folder, there, weights)
        tensors = read_header(folder / SINGLE)
        stray = tuple(name for name in weights if name != SINGLE)
        return Shards((folder / SINGLE,), tensors, (), stray)

    where = weight_map(folder / INDEX)
    names = sorted(set(where.values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise JspecError(
            f"`{INDEX}` names files that are not there: {_names(missing)}.",
            f"all {len(names)} files that it names, beside it.",
            "get the missing files; a download may have been broken off.",
        )
    headers = {name: read_header(folder / name) for name in names}
    if absent := [f"`{tensor}` (`{name}`)" for tensor, name in where.items() if tensor not in headers[name]]:
        raise JspecError(
            f"`{INDEX}` names tensors that their files do not hold: {_list(absent)}.",
            "each tensor in the file that the index gives for it.",
            "get index and files again, from one place.",
        )
    tensors = {tensor: headers[name][tensor] for tensor, name in where.items()}
    unindexed = []
    for name in names:
        for tensor in headers[name].values():
            if tensor.name not in where:
                unindexed.append(tensor.name)
                if tensor.name in tensors:
                    raise JspecError(
                        f"`{tensor.name}` is in `{tensors[tensor.name].file.name}` and in `{name}`, and `{INDEX}` "
                        "does not say which counts.",
                        "tensors that stand once, or in the index.",
                        "get index and files again, from one place.",
                    )
                tensors[tensor.name] = tensor
    stray = tuple(name for name in weights if name not in names)
    return Shards(tuple(folder / name for name in names), tensors, tuple(unindexed), stray)


def read_header(path: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of one file, in the order of their bytes.

    Raises:
      JspecError: it is not a safetensors file, or a number in its header does not fit the file.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for it
            raise _broken(path, "is not an ordinary file")
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            start = f.read(8)
            if len(start) < 8:
                raise _broken(path, f"has {size} bytes, less than the shortest safetensors file")
            (length,) = struct.unpack("<Q", start)
            if not 2 <= length <= min(size - 8, LONGEST_HEADER):
                raise _broken(path, f"begins with a header length of {length:,}, in a file of {size:,} bytes")
            header = documents.parse(f.read(length), f"{path.name} (header)")
    except OSError as error:
        raise _broken(path, f"cannot be read ({error.strerror or error})") from None
    header.pop("__metadata__", None)
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    end, last = 8 + length, "the header"
    for tensor in tensors:
        if tensor.offset != end:
            what = "a gap" if tensor.offset > end else "an overlap"
            raise _broken(path, f"has {what} between {last} and `{tensor.name}`")
        end, last = tensor.offset + tensor.nbytes, f"`{tensor.name}`"
    if end > size:
        raise _broken(path, f"ends at byte {size:,}, before {last} ends at {end:,}")
    if end < size:
        raise _broken(path, f"goes on for {size - end:,} bytes behind {last}, its last tensor")
    return {tensor.name: tensor for tensor in tensors}


def _tensor(path: pathlib.Path, name: str, entry: Any, base: int) -> Tensor:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and _whole_numbers(shape) and _whole_numbers(offsets) and len(offsets) == 2):
        raise _broken(path, f"does not give dtype, shape and byte range of `{name}`")
    begin, end = offsets
    if begin > end:
        raise _broken(path, f"gives `{name}` a byte range that ends before it begins")
    width = WIDTHS.get(dtype)
    if width is not None and math.prod(shape) * width != end - begin:
        by = "x".join(map(str, shape)) or "scalar"
        raise _broken(path, f"gives `{name}` ({dtype}, {by}) a range of {end - begin:,} bytes")
    return Tensor(name, dtype, tuple(shape), path, base + begin, end - begin)


def weight_map(path: pathlib.Path) -> dict[str, str]:
    """Tensor to file, from an index; files are plain names beside it."""
    table = documents.read(path, 64 * documents.MIB).child("weight_map")
    where = table.data if table is not None else {}
    if not where:
        raise JspecError(
            f"`{INDEX}` has no `weight_map`.",
            "an object from tensor names to file names.",
            "get the file again.",
        )
    for tensor, name in where.items():
        plain = isinstance(name, str) and name.endswith(".safetensors") and pathlib.PurePath(name).name == name
        if not plain or "\\" in name or "\0" in name:
            raise JspecError(
                f"`{INDEX}` gives `{tensor}` the file `{str(name)[:80]}`.",
                "the plain name of a `.safetensors` file in the same folder.",
                "get the index again, or convert the checkpoint to safetensors.",
            )
    return where


def _no_weights(folder: pathlib.Path, there: Sequence[str], weights: Sequence[str]) -> JspecError:
    pickled = [name for name in there if name.endswith(PICKLED)]
    if weights:
        found, action = f"has {_names(weights)}, but neither `{SINGLE}` nor `{INDEX}`", "get the index as well."
    elif pickled:
        found = f"holds its weights in {_names(pickled)}, a kind of file that can run code when it is read"
        action = "convert it with transformers: `save_pretrained` writes safetensors."
    else:
        found, action = "holds no weights", "check the path; a download may have been broken off."
    return JspecError(f"the folder `{folder}` {found}.", f"`{SINGLE}`, or `{INDEX}` and the files it names.", action)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63 for n in value
    )


def _broken(path: pathlib.Path, what: str) -> JspecError:
    return JspecError(
        f"`{path.name}` {what}.",
        "a whole, undamaged safetensors file.",
        "check that this is the file you meant, or get it again.",
    )


def _names(names: Sequence[str]) -> str:
    return _list([f"`{name}`" for name in names])


def _list(items: Sequence[str], most: int = 20) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
