"""Which number type a target runs in: one written rule, and the sentence that says how it decided.

    1. the caller's `dtype`, if it is not "auto"
    2. `dtype` of the configuration, then its older name `torch_dtype`, if not "auto"
    3. the type of the tensors themselves, by bytes

float16 is run as bfloat16: it has the range that float16 lacks, and is what accelerators and CPUs
multiply fast. Vectors (norms, biases) and routers are float32 always.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import ml_dtypes
import numpy as np

from jspec.errors import JspecError
from jspec.target.documents import Document
from jspec.target.shards import Tensor

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}

_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SAID = ("float32", "bfloat16", "float16", "auto")


@dataclasses.dataclass(frozen=True)
class Choice:
    """The dtype of the linear weights, and why."""

    name: str
    rule: str

    @property
    def numpy(self) -> np.dtype:
        return DTYPES[self.name]


def asked(dtype: str | None) -> str | None:
    """The caller's wish: a dtype, or None where the checkpoint decides."""
    if dtype is None or dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise JspecError(f"`dtype` is `{dtype}`.", "`bfloat16`, `float32` or `auto`.", "pass one of these.")
    return dtype


def said(doc: Document) -> tuple[str, str] | None:
    """Key and value of the dtype that a configuration gives, None if it gives none.

    Raises:
      JspecError: the two spellings contradict each other, or name an unknown type.
    """
    found = {}
    for key in ("dtype", "torch_dtype"):
        value = doc.text(key, "auto")
        if value not in _SAID:
            doc.refuse(
                f"gives `{key}` as `{value}`", f"{', '.join(f'`{name}`' for name in _SAID)}, or an explicit dtype"
            )
        if value != "auto":
            found[key] = value
    if len(set(found.values())) > 1:
        both = " and ".join(f"`{key}` as `{value}`" for key, value in found.items())
        doc.refuse(f"gives {both}", "one type, or an explicit dtype that decides")
    return next(iter(found.items()), None)


def decide(wish: str | None, doc: Document, tensors: Iterable[Tensor]) -> Choice:
    """The rule above. `tensors` are those that the model reads."""
    wish = asked(wish)
    if wish is not None:
        return Choice(wish, f"{wish}: asked for by the caller")
    given = said(doc)
    if given is not None:
        return _run(given[1], f"`{given[0]}` of {doc.file}")
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    most = max(sizes, key=lambda name: (sizes[name], name)) if sizes else "F32"
    return _run(_STORED[most], "the tensors' own type: the configuration gives none")


def _run(stored: str, why: str) -> Choice:
    if stored == "float16":
        return Choice("bfloat16", f"bfloat16 for float16: {why}")
    return Choice(stored, f"{stored}: {why}")
