"""Drafters by the names that commands and reports use: `ngram_k7` is `ngram` with 7 proposals."""

from __future__ import annotations

import re
from collections.abc import Callable

from jspec.drafters.base import Drafter, Plain
from jspec.drafters.ngram import NGram
from jspec.errors import JspecError

MAKERS: dict[str, Callable[[int], Drafter]] = {
    "ngram": lambda proposals: NGram(proposals=proposals),
}


def drafter(name: str) -> Drafter:
    """The drafter called `name`: `baseline` for none, or `KIND_kK` with K proposals.

    Raises:
      JspecError: an unknown kind, or no K.
    """
    if name == "baseline":
        return Plain()
    match = re.fullmatch(r"([a-z0-9_]+)_k([0-9]{1,3})", name)
    if match is None or match[1] not in MAKERS:
        raise JspecError(
            f"`{name}` is no drafter.",
            "baseline, or " + ", ".join(f"{kind}_kK" for kind in MAKERS) + " with K proposals, for instance ngram_k7.",
            "choose one of these.",
        )
    return MAKERS[match[1]](int(match[2]))
