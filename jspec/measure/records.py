"""Reads the records of a prompt file, each with its place in the file for error messages.

Three containers: JSON lines, one JSON array, and Parquet. Which of the first two a file is shows in
its first character, whatever its name says. What a record means is the business of `layouts`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jspec.errors import JspecError

CONTAINERS = ".jsonl (one JSON object a line), .json (an array of objects) or .parquet"


def read_records(path: Path) -> list[tuple[str, Any]]:
    """Reads a file of records.

    Returns:
      (place, record) in file order; a place reads "line 3 of `gsm8k.jsonl`".
    """
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JspecError(
            f"`{path}` cannot be read: {error.strerror or error}.",
            f"a readable file, {CONTAINERS}.",
            "check the path and its permissions.",
        ) from error
    records = list(parse_records(data, str(path)))
    if not records:
        raise JspecError(f"`{path}` holds no records.", f"at least one record, {CONTAINERS}.", "check the download.")
    return records


def parse_records(data: bytes, name: str) -> Iterator[tuple[str, Any]]:
    """Yields (place, record) from JSON lines or from one JSON array; blank lines are skipped."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise JspecError(
            f"line {number} of `{name}` is not UTF-8 (byte {error.start} is `0x{data[error.start]:02x}`).",
            "text in UTF-8.",
            "convert the file, for instance with `iconv -t utf-8`; a compressed file has to be unpacked first.",
        ) from error
    if text.lstrip()[:1] == "[":
        for i, record in enumerate(_parse(text, name, first_line=1)):
            yield f"record {i + 1} of `{name}`", record
        return
    # Only "\n" ends a line: str.splitlines would also cut at U+2028, which JSON strings may hold raw.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"line {number} of `{name}`", _parse(line, name, first_line=number)


def _parse(text: str, name: str, *, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        reason = f"{error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting without end
        line, reason = first_line, str(error)
    raise JspecError(
        f"line {line} of `{name}` is not valid JSON: {reason}.",
        f"{CONTAINERS}.",
        "repair or delete the line; a file cut short has to be downloaded again.",
    )


def _parquet(path: Path) -> list[tuple[str, Any]]:
    try:
        from pyarrow import parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise JspecError(
            f"`{path.name}` is a Parquet file and `pyarrow` is not installed.",
            ".jsonl and .json files without further packages, .parquet files with `pyarrow`.",
            "`pip install pyarrow`, or convert the file and pass it with --dataset-path.",
        ) from error
    try:
        rows = parquet.read_table(str(path)).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise JspecError(
            f"`{path}` cannot be read as Parquet: {str(error).rstrip('.')}.",
            "an intact Parquet file.",
            "download the file again.",
        ) from error
    return [(f"row {i + 1} of `{path}`", row) for i, row in enumerate(rows)]
