"""`Source`: the folder of a published drafter, before anybody knows what it means."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from jspec.drafters.files import CONFIG
from jspec.errors import JspecError
from jspec.target import documents, shards
from jspec.target.documents import Document
from jspec.target.shards import Tensor

# What trainers call the tensors that serving engines know by other names.
SPELLINGS: Mapping[str, str] = {
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
    "logit_head.markov_head.": "markov_head.",
    "logit_head.confidence_head.": "confidence_head.",
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Configuration and headers. `tensors` are by the name that most formats use (`SPELLINGS`)."""

    folder: Path
    config: Document
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...]  # what was left aside on the way, a line each

    @property
    def architecture(self) -> str:
        """The first class that the configuration names; empty if it names none."""
        return next(iter(self.config.items("architectures", str, [])), "")

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """The shape of a tensor that must be there and have so many axes, none of them empty."""
        if name not in self.tensors:
            self.refuse(f"lacks the tensor `{name}`", "all tensors of the format that its configuration asks for")
        found = self.tensors[name]
        if len(found.shape) != axes or not all(found.shape):
            self.refuse(f"has `{found.name}` of shape {found.shape}", f"{axes} axes, none of them empty")
        return found.shape

    def refuse(self, given: str, allowed: str) -> NoReturn:
        raise JspecError(f"`{self.folder}` {given}.", f"{allowed}.", "get the drafter's files again, or another one.")


def open_folder(folder: Path) -> Source:
    """Reads the configuration and the headers of the weights.

    Raises:
      JspecError: a file is missing or damaged, or holds a tensor under two names.
    """
    if not folder.is_dir():
        raise JspecError(f"`{folder}` is no folder.", "the folder of a drafter.", "check the path.")
    config = documents.read(folder / CONFIG)
    files = shards.open_folder(folder)
    notes = [f"weight files beside the drafter's, not read: {', '.join(files.stray)}"] if files.stray else []
    if files.unindexed:
        notes.append(f"tensors in its files that the index does not name: {', '.join(files.unindexed)}")
    tensors: dict[str, Tensor] = {}
    for name, tensor in files.tensors.items():
        start = next((old for old in SPELLINGS if name.startswith(old)), None)
        common = name if start is None else SPELLINGS[start] + name.removeprefix(start)
        if common in tensors:
            raise JspecError(
                f"`{folder}` holds `{tensors[common].name}` and `{name}`, which are one tensor.",
                "one of them.",
                "get the drafter's files again.",
            )
        tensors[common] = tensor
    return Source(folder, config, tensors, tuple(notes))
