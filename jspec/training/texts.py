"""Prompts and the texts made of them, and how texts are kept on disk.

A file of texts is a compressed `.npz`: all token ids in one array, so that a million answer tokens take
about 1.5 MB, with the spans that the target wrote itself. It says which target wrote it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jspec.errors import JspecError

KINDS = ("math", "code", "chat")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a user says: one turn, or several that wait for an answer each."""

    id: str
    kind: str  # one of KINDS
    turns: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """A conversation as the target reads it; `answers` are what it wrote itself.

    Only those spans are ever labels (drafters.md 9.1): the end token that the target chose is part
    of them, what the chat template puts behind it is not.
    """

    id: str
    kind: str
    tokens: np.ndarray  # [n] int32
    answers: tuple[tuple[int, int], ...]  # spans [start, end), ascending, apart

    @property
    def loss_mask(self) -> np.ndarray:
        """`[n]` bool, True where the token was written by the target."""
        mask = np.zeros(len(self.tokens), bool)
        for start, end in self.answers:
            mask[start:end] = True
        return mask


def count(texts: Iterable[Text]) -> int:
    """Tokens that the target wrote."""
    return sum(end - start for text in texts for start, end in text.answers)


def save(path: Path, texts: Sequence[Text], about: Mapping[str, Any]) -> None:
    """Writes a file of texts, all of it or nothing: a run may be killed at any moment.

    Args:
      about: facts kept beside the texts, as JSON: the target's fingerprint, the settings.
    """
    lengths = [len(text.tokens) for text in texts]
    tokens = np.concatenate([text.tokens for text in texts]) if texts else np.zeros(0, np.int32)
    small = np.uint16 if tokens.size == 0 or tokens.max() < 1 << 16 else np.uint32
    spans = [(i, *span) for i, text in enumerate(texts) for span in text.answers]
    names = json.dumps([[text.id, text.kind] for text in texts])
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(partial, "wb") as file:
        np.savez_compressed(
            file,
            tokens=tokens.astype(small),
            lengths=np.asarray(lengths, np.uint32),
            spans=np.asarray(spans, np.uint32).reshape(-1, 3),
            names=np.frombuffer(names.encode(), np.uint8),
            about=np.frombuffer(json.dumps(dict(about), sort_keys=True).encode(), np.uint8),
        )
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(path: Path) -> tuple[list[Text], dict[str, Any]]:
    """Reads what `save` wrote: the texts, and what is known about them.

    Raises:
      JspecError: the file is missing, damaged or something else.
    """
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            tokens, lengths, spans = (file[name].astype(np.int64) for name in ("tokens", "lengths", "spans"))
            names = json.loads(file["names"].tobytes())
            about = json.loads(file["about"].tobytes())
        if lengths.sum() != len(tokens) or len(names) != len(lengths) or not isinstance(about, dict):
            raise ValueError("lengths do not add up")
        ends = np.cumsum(lengths)
        answers: list[list[tuple[int, int]]] = [[] for _ in names]
        for i, start, end in spans:
            if not 0 <= start < end <= lengths[i]:
                raise ValueError("a span lies outside its text")
            answers[i].append((int(start), int(end)))
        texts = [
            Text(id=name, kind=kind, tokens=tokens[end - n : end].astype(np.int32), answers=tuple(spans))
            for (name, kind), n, end, spans in zip(names, lengths, ends, answers, strict=True)
        ]
    except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise JspecError(
            f"`{path}` cannot be read as texts ({error}).",
            "a file that `jspec train` wrote for its texts.",
            "check the path; remove a damaged file and let it be written again.",
        ) from None
    return texts, about


def load_all(folder: Path) -> Iterator[Text]:
    """The texts of every file in a folder, in the order of the files' names.

    Raises:
      JspecError: there is none, one is damaged, or they come from different targets.
    """
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise JspecError(f"`{folder}` holds no texts.", "a folder of `.npz` files.", "make them, or check the path.")
    writer = None
    for path in files:
        texts, about = load(path)
        if writer is not None and about.get("target") != writer:
            raise JspecError(
                f"`{path}` was written by the target `{about.get('target')}`, the files before it by `{writer}`.",
                "texts of one target: a drafter learns what its own target says.",
                "keep the texts of each target in a folder of their own.",
            )
        writer = about.get("target")
        yield from texts
