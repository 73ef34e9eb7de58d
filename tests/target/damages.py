"""Ways to damage a checkpoint: each makes a function that takes the path of a good one and spoils it."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable
from typing import Any

from tests.target import folders, gguf_file

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TOKENS, TOKENS_CONFIG = "tokenizer.json", "tokenizer_config.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(64)

Damage = Callable[[pathlib.Path], None]


def file(name: str, content: bytes | str) -> Damage:
    """Replaces a file of the folder."""
    return lambda folder: _put(folder / name, content)


def _put(path: pathlib.Path, content: bytes | str) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def cut(name: str, size: int) -> Damage:
    """Leaves the first bytes of a file; a negative size takes so many from its end."""

    def damage(folder: pathlib.Path) -> None:
        path = folder / name if folder.is_dir() else folder
        path.write_bytes(path.read_bytes()[:size])

    return damage


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def replaced(name: str, make: Callable[[pathlib.Path], object]) -> Damage:
    """Puts something that is no ordinary file in a file's place."""

    def damage(folder: pathlib.Path) -> None:
        path = folder / name if folder.is_dir() else folder
        path.unlink(missing_ok=True)
        make(path)

    return damage


def to_itself(path: pathlib.Path) -> None:
    path.symlink_to(path.name)


def endless(path: pathlib.Path) -> None:
    path.symlink_to("/dev/zero")


def edit(name: str, change: Callable[[Any], object]) -> Damage:
    """Changes a JSON file in place."""

    def damage(folder: pathlib.Path) -> None:
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return damage


def settings(name: str, **changes: Any) -> Damage:
    """Keys of a JSON file; `...` removes one."""

    def change(document: dict[str, Any]) -> None:
        for key, value in changes.items():
            if value is ...:
                del document[key]
            else:
                document[key] = value

    return edit(name, change)


def config(**changes: Any) -> Damage:
    return settings(CONFIG, **changes)


def raw_header(text: bytes) -> Damage:
    """Another header before the same bytes."""

    def damage(folder: pathlib.Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return damage


def tensor(name: str = NORM, **changes: Any) -> Damage:
    """Changes a tensor's entry in the header."""

    def damage(folder: pathlib.Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header[name] |= changes
        raw_header(json.dumps(header).encode())(folder)

    return damage


def length(value: int) -> Damage:
    def damage(folder: pathlib.Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", value) + data[8:])

    return damage


def shifted(name: str, by: int) -> Damage:
    """Moves a tensor's byte range."""

    def damage(folder: pathlib.Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        begin, end = json.loads(data[8 : 8 + size])[name]["data_offsets"]
        tensor(name, data_offsets=[begin + by, end + by])(folder)

    return damage


def huge_header(folder: pathlib.Path) -> None:
    """150 MB, most of which lies on no disk."""
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 150_000_000))
    os.truncate(folder / WEIGHTS, 200_000_000)


def large_config(folder: pathlib.Path) -> None:
    os.truncate(folder / CONFIG, 1 << 40)


def not_finite(folder: pathlib.Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))
    (folder / WEIGHTS).write_bytes(data)


def gguf_as_weights(folder: pathlib.Path) -> None:
    gguf_file.write(folder / WEIGHTS, gguf_file.weights())


def zipped(folder: pathlib.Path) -> None:
    with zipfile.ZipFile(folder / WEIGHTS, "w") as archive:
        archive.writestr("data.pkl", "x" * 100)


class Trap:
    """Run by whoever unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('code of a checkpoint was run')",))


def pickled(folder: pathlib.Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))


def renamed(old: str, new: str) -> Damage:
    return lambda folder: (folder / old).rename(folder / new) and None


def where(**changes: Any) -> Damage:
    """Files of the index by tensor, `norm` being the name of one that is needed."""
    return edit(INDEX, lambda d: d["weight_map"].update({NORM: changes["norm"]}))


def shard_twice(folder: pathlib.Path) -> None:
    """A tensor in both files, and in no index."""
    arrays = folders.tensors(folders.CONFIGS["llama"])
    for n, name in enumerate((FIRST, SECOND)):
        mine = {tensor: arrays[tensor] for tensor in list(arrays)[n::2]} | {NORM: arrays[NORM]}
        folders.save(folder / name, mine)
    edit(INDEX, lambda d: d["weight_map"].pop(NORM))(folder)


def model(**changes: Any) -> Damage:
    """The BPE model of tokenizer.json."""
    return edit(TOKENS, lambda d: d["model"].update(changes))


def added(**changes: Any) -> Damage:
    return edit(TOKENS, lambda d: d["added_tokens"][0].update(changes))


def template(source: Any) -> Damage:
    return settings(TOKENS_CONFIG, chat_template=source)


def text(**changes: Any) -> Damage:
    return edit(CONFIG, lambda d: d["text_config"].update(changes))


def meta(**changes: Any) -> Damage:
    """Metadata of the GGUF file, with `__` for a dot; None leaves a key out."""
    table = {key.replace("__", "."): value for key, value in changes.items()}

    def damage(path: pathlib.Path) -> None:
        gguf_file.write(path, gguf_file.weights(), table)

    return damage


def patch(after: bytes, by: int, value: bytes) -> Damage:
    """Overwrites bytes of the GGUF file, so many behind the first place where others stand."""

    def damage(path: pathlib.Path) -> None:
        data = bytearray(path.read_bytes())
        at = data.index(after) + len(after) + by
        data[at : at + len(value)] = value
        path.write_bytes(data)

    return damage


def whole(content: bytes) -> Damage:
    return lambda path: _put(path, content)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def gguf_start(tensors: int, fields: int, rest: bytes = b"") -> Damage:
    return whole(b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + rest)
