"""Fetches a data set's file from where it is published, or says how to do without.

`HF_ENDPOINT` names a mirror of the Hugging Face hub. `HF_HUB_OFFLINE=1` forbids the network: then
only files already in the hub's cache are used. Both are read at each call, so a program may set
them after import.
"""

from __future__ import annotations

import dataclasses
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from jspec.errors import JspecError
from jspec.measure.layouts import LAYOUTS
from jspec.measure.records import CONTAINERS

_DEFAULT_ENDPOINT = "https://huggingface.co"
_TIMEOUT_S = 30.0
_PROBE_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a data set repository on the Hugging Face hub."""

    repo: str
    file: str

    def __str__(self) -> str:
        return f"{self.repo}/{self.file}"


@dataclasses.dataclass(frozen=True, slots=True)
class WebFile:
    """One file at a fixed address, for data sets that the hub does not hold."""

    url: str

    def __str__(self) -> str:
        return self.url


def offline() -> bool:
    """Whether `HF_HUB_OFFLINE` forbids the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "ON", "YES", "TRUE")


def fetch(name: str, source: HubFile | WebFile) -> Path | bytes:
    """Returns the path of a hub file in the hub's cache, or the bytes of a web file.

    Args:
      name: the data set, for error messages.
      source: where it is published.
    """
    return _web(name, source) if isinstance(source, WebFile) else _hub(name, source)


def _hub(name: str, source: HubFile) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        remedy = "`pip install huggingface_hub`"
        raise _unreachable(name, source, "`huggingface_hub` is not installed", remedy) from error
    endpoint = os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT
    # A copy in the cache is taken as it is: no network, and the same prompts as last time.
    try:
        return Path(hf_hub_download(source.repo, source.file, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError as error:
        if offline():
            raise _unreachable(name, source, "`HF_HUB_OFFLINE` is set and the cache has no copy") from error
    _check_reachable(name, source, endpoint)
    try:
        return Path(hf_hub_download(source.repo, source.file, repo_type="dataset", endpoint=endpoint))
    # The hub's client raises its own errors, those of its HTTP library and those of the disk, and
    # the set changes between its versions; to the user they are one case: the file is not here.
    except Exception as error:
        raise _unreachable(name, source, f"{type(error).__name__}: {_first_line(error)}") from error


def _check_reachable(name: str, source: HubFile, endpoint: str) -> None:
    """Fails at once without a network, where the hub's client would try again for half a minute."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PROBE_S).close()
    except urllib.error.HTTPError as error:
        error.close()  # an answer, so there is a server
    except ValueError as error:
        raise _unreachable(name, source, f"`HF_ENDPOINT` is `{endpoint}`, not an address") from error
    except OSError as error:
        # Certificates may be set up for the hub's client alone, so they are left for it to judge.
        if not isinstance(getattr(error, "reason", error), ssl.SSLError):
            raise _unreachable(name, source, f"no connection to `{endpoint}` ({_first_line(error)})") from error


def _web(name: str, source: WebFile) -> bytes:
    if offline():
        raise _unreachable(name, source, "`HF_HUB_OFFLINE` is set")
    try:
        with urllib.request.urlopen(source.url, timeout=_TIMEOUT_S) as response:
            return bytes(response.read())
    except OSError as error:  # urllib's errors and timeouts derive from it
        raise _unreachable(name, source, f"{type(error).__name__}: {_first_line(error)}") from error


def _unreachable(name: str, source: HubFile | WebFile, reason: str, remedy: str = "") -> JspecError:
    return JspecError(
        f"the data set `{name}` could not be fetched from `{source}`: {reason}.",
        f"a local copy: a file ({CONTAINERS}) or a directory that holds `{name}.jsonl`, with records like {LAYOUTS}; "
        "or a built-in set: `builtin_math`, `builtin_code`, `builtin_chat`.",
        f"{remedy + ', ' if remedy else ''}pass --dataset-path, or go online (`HF_ENDPOINT` names a mirror).",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else "no further detail").rstrip(".")
