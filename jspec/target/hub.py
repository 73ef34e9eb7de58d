"""Fetches a checkpoint from the Hugging Face hub into the hub's own cache, and nothing else from there.

`HF_ENDPOINT` names a mirror. `HF_HUB_OFFLINE=1` forbids the network: then only what is in the cache is
used. Both are read at each call. Only the files that the readers need are fetched: configuration
first, so that a model that is not supported or does not fit is refused before its weights travel. A
connection that breaks is taken up where it broke, and a file that has arrived is not fetched again.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from jspec.errors import JspecError
from jspec.target import documents, dtypes, families, hf, memory, shards

SMALL = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "README.md", shards.INDEX),
)
TIMEOUT = 10.0  # seconds, for the list of a repository's files

_ENDPOINT = "https://huggingface.co"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_repo(name: str) -> bool:
    """Whether a name has the form of a hub id, `owner/model`."""
    return _REPO.fullmatch(name) is not None and ".." not in name


def offline() -> bool:
    """Whether `HF_HUB_OFFLINE` forbids the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "ON", "YES", "TRUE")


def fetch(repo: str, *, revision: str | None = None, dtype: str | None = None) -> tuple[pathlib.Path, list[str]]:
    """The folder of a checkpoint in the hub's cache, and notes on how it got there.

    Args:
      repo: `owner/model`.
      revision: branch, tag or commit; `main` if left out.
      dtype: that the caller wants, for the estimate of memory.

    Raises:
      JspecError: it is not there, holds no weights that can be read, does not fit, or cannot be reached.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise _unreachable(repo, "`huggingface_hub` is not installed", "`pip install huggingface_hub`, or ") from None

    endpoint = os.environ.get("HF_ENDPOINT") or _ENDPOINT

    def get(file: str, local: bool = False) -> pathlib.Path:
        return pathlib.Path(
            hub.hf_hub_download(repo, file, revision=revision, endpoint=endpoint, local_files_only=local)
        )

    if offline():
        folder = _cached(get)
        if folder is None:
            raise _unreachable(repo, "`HF_HUB_OFFLINE` is set and the cache has no copy")
        return folder, ["`HF_HUB_OFFLINE` is set: the copy in the hub's cache is used"]
    # The hub's client raises its own errors, those of its HTTP library and those of the disk, and the
    # set changes between its versions.
    try:
        info = hub.HfApi(endpoint=endpoint).model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise _unreachable(repo, f"{type(error).__name__}: {_first_line(error)}") from None
    except Exception as error:
        folder = _cached(get)
        if folder is None:
            raise _unreachable(repo, f"{type(error).__name__}: {_first_line(error)}") from None
        return folder, [f"`{endpoint}` cannot be reached: the copy in the hub's cache is used"]
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or []}
    small = [name for name in SMALL if name in sizes]
    folder = _fetch(repo, get, small)
    names = _weights(repo, sizes, folder)
    if hf.CONFIG in small:
        family, text = families.find(documents.read(folder / hf.CONFIG))
        choice = dtypes.decide(dtype, text, ())
        memory.check(repo, memory.of_config(family.config(text), choice.numpy), choice.name, memory.available())
    missing = [name for name in names if not (folder / name).exists()]
    _check_disk(repo, folder, sum(sizes.get(name, 0) for name in missing))
    if _fetch(repo, get, names) != folder:
        raise _unreachable(repo, "it was changed while it was fetched", "try again, or ")
    return folder, [f"fetched from {endpoint}/{repo}, commit {folder.name}"]


def _cached(get: Callable[[str, bool], pathlib.Path]) -> pathlib.Path | None:
    try:
        return get(hf.CONFIG, True).parent
    except Exception:  # whatever it is: there is no usable copy
        return None


def _fetch(repo: str, get: Callable[[str], pathlib.Path], names: Sequence[str]) -> pathlib.Path:
    """Downloads files; they lie in one folder if they are of one commit."""
    folders: list[pathlib.Path] = []
    for name in names:
        try:
            folders.append(get(name).parent)
        except Exception as error:
            raise _unreachable(repo, f"`{name}`: {type(error).__name__}: {_first_line(error)}") from None
    if len(set(folders)) != 1:
        raise _unreachable(repo, "it was changed while it was fetched", "try again, or ")
    return folders[0]


def _weights(repo: str, sizes: dict[str, Any], folder: pathlib.Path) -> list[str]:
    """The weight files to fetch: those of the index, or the single one."""
    if shards.INDEX in sizes:
        return sorted(set(shards.weight_map(folder / shards.INDEX).values()))
    if shards.SINGLE in sizes:
        return [shards.SINGLE]
    held = sorted(name for name in sizes if name.endswith((*shards.PICKLED, ".safetensors", ".gguf")))
    found = ", ".join(f"`{name}`" for name in held) or "no weights"
    raise JspecError(
        f"the repository `{repo}` holds {found}.",
        f"`{shards.SINGLE}`, or `{shards.INDEX}` and the files it names.",
        "use a repository with safetensors, or fetch a GGUF file and give its path.",
    )


def _check_disk(repo: str, folder: pathlib.Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise JspecError(
            f"the weights of `{repo}` take {need / memory.GIB:.2f} GiB; `{folder}` has {free / memory.GIB:.2f} free.",
            "enough room in the hub's cache.",
            "free some, or set `HF_HOME` to a folder on another disk.",
        )


def _unreachable(repo: str, reason: str, remedy: str = "") -> JspecError:
    return JspecError(
        f"the checkpoint `{repo}` could not be fetched: {reason}.",
        "the id of a public model on the hub, or a local folder or GGUF file.",
        f"{remedy}check the id, go online, or name a mirror in `HF_ENDPOINT`; gated models need `hf auth login`.",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else "no further detail").rstrip(".")
