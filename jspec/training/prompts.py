"""Prompts to train with: from files, from the target itself, and in one balanced order."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from jspec.target.checkpoint import Checkpoint
from jspec.training import synthesise
from jspec.training.texts import KINDS, Prompt

SEEDS = Path(__file__).parent / "seeds.jsonl"


def read(path: Path, kind: str | None = None) -> list[Prompt]:
    """Reads a file of prompts, one JSON object a line.

    A line holds `turns` (a list of what the user says), or `question`, or `instruction`, with `instances[0].input` put
    behind it, as public sets of instructions have it.

    Args:
      kind: what the prompts are filed under, where a line has no `kind` of its own.

    Raises:
      JspecError: the file cannot be read, or a line holds no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise JspecError(
            f"`{path}` cannot be read ({error}).", "a file of prompts, one JSON object a line.", "check the path."
        ) from None
    out: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        turns: tuple[str, ...] = ()
        name, mine = f"{path.stem}-{number}", kind
        try:
            row = json.loads(line)
            name, mine, turns = str(row.get("id", name)), row.get("kind", kind), _turns(row)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            pass  # told below
        if not turns or mine not in KINDS or not all(isinstance(t, str) and t for t in turns):
            raise JspecError(
                f"line {number} of `{path}` holds no prompt.",
                f"`turns`, `question` or `instruction`, and a kind: {', '.join(KINDS)}.",
                "correct the line, or name a kind for the whole file.",
            )
        out.append(Prompt(id=name, kind=mine, turns=turns))
    return out


def _turns(row: dict[str, Any]) -> tuple[str, ...]:
    if "turns" in row:
        return tuple(row["turns"])
    if "question" in row:
        return (row["question"],)
    given = row["instances"][0]["input"] if row.get("instances") else ""
    return (f"{row['instruction']}\n\n{given}" if given else row["instruction"],)


def write(path: Path, prompts: Iterable[Prompt]) -> None:
    """Writes prompts as `read` takes them, all of them or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(dataclasses.asdict(prompt)) + "\n" for prompt in prompts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def invented(
    target: Checkpoint,
    config: EngineConfig,
    folder: Path,
    *,
    kind: str,
    system: str | None,
    settings: synthesise.Settings,
    shard: int = 128,
) -> Iterator[Prompt]:
    """User turns that the target writes itself, without end; what is in `folder` already is read from there."""
    for number in itertools.count():
        path = folder / f"{kind}-{settings.seed}-{number:05d}.jsonl"
        if not path.exists():
            first = number * shard
            made = synthesise.invent(
                target, config, first=first, count=shard, kind=kind, system=system, settings=settings
            )
            write(path, made)
        yield from read(path)


def balanced(sources: Sequence[Iterable[Prompt]]) -> Iterator[Prompt]:
    """One prompt of each source in turn, without those said before, until a source has no more.

    Any beginning of it is as balanced as the whole.
    """
    seen: set[str] = set()
    streams = [_fresh(source, seen) for source in sources]
    while True:
        for stream in streams:
            prompt = next(stream, None)
            if prompt is None:
                return
            yield prompt


def _fresh(source: Iterable[Prompt], seen: set[str]) -> Iterator[Prompt]:
    for prompt in source:
        said = " ".join("\n".join(prompt.turns).lower().split())
        if said not in seen:
            seen.add(said)
            yield prompt
