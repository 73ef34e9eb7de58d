"""Drafters by the names that commands and reports use: `ngram_k7` is `ngram` with 7 proposals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jspec.drafters.base import Drafter, Plain
from jspec.drafters.block import weights as block
from jspec.drafters.block.drafter import BlockDrafter
from jspec.drafters.eagle3 import weights as eagle3
from jspec.drafters.eagle3.config import EagleConfig
from jspec.drafters.eagle3.drafter import EagleDrafter
from jspec.drafters.formats import convert
from jspec.drafters.modes import mode_for
from jspec.drafters.ngram import NGram
from jspec.errors import JspecError
from jspec.target.checkpoint import Checkpoint


def drafter(name: str, target: Checkpoint, accept: str = "choice") -> tuple[Drafter, Any]:
    """A drafter and its weights: `baseline` for none, `ngram_kK`, or `FOLDER_kK` with a drafter's folder.

    Args:
      name: with K, the number of proposals; `out/dflash_k7` drafts 7 tokens with what lies in `out/dflash`.
      target: what it drafts for.
      accept: the rule of acceptance, which decides how a trained drafter picks its tokens.

    Raises:
      JspecError: an unknown name, no K, or a folder that is no drafter for this target.
    """
    if name == "baseline":
        return Plain(), ()
    match = re.fullmatch(r"(.+)_k([0-9]{1,3})", name)
    if match is not None:
        kind, proposals = match[1], int(match[2])
        if kind == "ngram":
            return NGram(proposals=proposals), ()
        if Path(kind).is_dir():
            return load(Path(kind), target, proposals=proposals, mode=mode_for(accept))
    raise JspecError(
        f"`{name}` is no drafter.",
        "baseline, ngram_kK with K proposals, for instance ngram_k7, or FOLDER_kK with the folder of a drafter.",
        "choose one of these; a drafter that was trained here is named by its folder.",
    )


def load(
    folder: Path, target: Checkpoint, *, proposals: int, mode: str = "coupled", **options: Any
) -> tuple[Drafter, Any]:
    """A trained drafter from its folder, in our format or a published one.

    Args:
      proposals: K, tokens drafted a round.
      mode: `greedy`, `coupled` or `sampled` (`drafters/modes.py`).
      options: further settings of the drafter, such as `heat`.

    Returns:
      the drafter and its weights, as `drafter=` of `jspec.generate` takes them.

    Raises:
      JspecError: a folder that is damaged, or holds a drafter for another target.
    """
    saved = convert.load(folder, target)
    if isinstance(saved.config, EagleConfig):
        chain = EagleDrafter(config=saved.config, proposals=proposals, mode=mode, **options)
        return chain, eagle3.lend(saved.config, saved.params, saved.ids, target.params, target.config)
    made = BlockDrafter(config=saved.config, proposals=proposals, mode=mode, **options)
    return made, block.lend(saved.config, saved.params, saved.ids, target.params, target.config)
