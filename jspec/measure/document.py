"""Rows for programs: the JSON document on the last line, and result files."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jspec.errors import JspecError

SCHEMA = 1  # rises when a key changes its meaning; new keys do not raise it


def document(
    *,
    device: Any,
    versions: Mapping[str, Any],
    engine: Mapping[str, Any],
    probe: Mapping[str, Any],
    runs: Iterable[Mapping[str, Any]],
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Builds the one-line JSON document that ends a benchmark's output.

    Args:
      device, versions: from `jspec.measure.hardware`.
      engine: what fixes the engine: slots, block rows, capacity, chunk, dtype, kernel choices.
      probe: the booleans of the probe with their reasons.
      runs: rows of `metrics.summarise` with all that was added to them.
      extra: further keys at the top, such as the command line; they cannot replace those above.

    Returns:
      strict JSON without a line break: NaN and infinities become null, numpy values become plain.
    """
    body = {
        **(extra or {}),
        "schema": SCHEMA,
        "device": device,
        "versions": versions,
        "engine": engine,
        "probe": probe,
        "runs": list(runs),
    }
    # The schema first, so that a reader can decide on the first bytes.
    return json.dumps(plain({"schema": SCHEMA, **body}), allow_nan=False)


def save_result(
    directory: str | Path,
    text: str,
    results: Sequence[Mapping[str, Any]] = (),
    *,
    now: datetime.datetime | None = None,
) -> list[Path]:
    """Writes the document, and each run's result in vLLM's keys, to a directory that is made if need be.

    Args:
      directory: where; `--result-dir`.
      text: what `document` returned.
      results: what `vllm_result` returned, one a run.
      now: time stamp of the file names, for all of them the same.

    Returns:
      the files: `jspec-DATE.json`, then `LABEL-infqps[-concurrencyC]-MODEL-DATE.json` as vLLM names
      its own. An existing file is never overwritten; the name gets a number.
    """
    stamp = (now or datetime.datetime.now()).strftime("%Y%m%d-%H%M%S")
    contents = {f"jspec-{stamp}": text}
    for i, result in enumerate(results):
        limit = result.get("max_concurrency")
        model = str(result.get("model_id")).rstrip("/").split("/")[-1]
        parts = (f"{result.get('label')}-infqps", f"concurrency{limit}" if limit else "", model, stamp)
        name = re.sub(r"[^\w.+-]", "_", "-".join(part for part in parts if part))
        contents[name if name not in contents else f"{name}-{i}"] = json.dumps(plain(result), allow_nan=False)
    folder = prepare(directory)
    with _refusing(folder):
        return [_write_new(folder, name, body) for name, body in contents.items()]


def prepare(directory: str | Path) -> Path:
    """Makes the directory of results and proves that it can be written; returns it.

    Raises:
      JspecError: it cannot be made or written.
    """
    folder = Path(directory).expanduser()
    with _refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return folder


@contextlib.contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JspecError(
            f"results could not be written to `{folder}`: {error.strerror or error}.",
            "a directory that can be written, on a disk with space.",
            "choose another --result-dir.",
        ) from error


def plain(value: Any) -> Any:
    """Turns a value into strict JSON's types: numpy values to Python's, NaN and infinities to None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)  # a path, a dtype


def _write_new(folder: Path, name: str, body: str) -> Path:
    number = 0
    while True:
        path = folder / (f"{name}.json" if number == 0 else f"{name}.{number}.json")
        try:
            # "x" fails where the file exists, so that two benchmarks at once never share a file.
            with open(os.fspath(path), "x", encoding="utf-8") as file:
                file.write(body + "\n")
            return path
        except FileExistsError:
            number += 1
