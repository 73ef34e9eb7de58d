"""The draft vocabulary: `Vd` of the target's `V` tokens, by the token of each column (`ids`)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.errors import JspecError


def check(ids: np.ndarray | None, draft_vocab: int | None, vocab_size: int) -> None:
    """Refuses a map that is missing, or names a token twice or one that is not there (LD-3, LD-4)."""
    if ids is None:
        if draft_vocab is not None and draft_vocab != vocab_size:
            raise JspecError(
                f"the draft vocabulary has `{draft_vocab}` of `{vocab_size}` tokens, and no map says which.",
                "a map from draft ids to target ids (`d2t`).",
                "get the drafter's files again; the map is part of them.",
            )
        return
    size = vocab_size if draft_vocab is None else draft_vocab
    if ids.shape != (size,):
        raise JspecError(
            f"the vocabulary map has shape `{ids.shape}`.",
            f"one entry for each of {size} draft tokens.",
            "get the drafter's files again.",
        )
    outside = [int(t) for t in ids if not 0 <= t < vocab_size]
    if outside or len(np.unique(ids)) != len(ids):
        fault = f"names `{outside[0]}`" if outside else "names a token twice"
        raise JspecError(
            f"the vocabulary map {fault}.",
            f"different target ids from 0 to {vocab_size - 1}; files hold offsets, `id - draft id`.",
            "get the drafter's files again.",
        )


def columns(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """The column of each token, `[V]` int32; `Vd` where there is none."""
    out = np.full((vocab_size,), len(ids), np.int32)
    out[ids] = np.arange(len(ids), dtype=np.int32)
    return out


def whole(law: Array | None, columns: Array | None) -> Array | None:
    """A law over the draft vocabulary, `[..., Vd]`, as one over the target's, `[..., V]`: nothing elsewhere.

    Args:
      columns: `[V]` int32 as above; None: the vocabulary is the target's.
    """
    if law is None or columns is None:
        return law
    padded = jnp.pad(law, [(0, 0)] * (law.ndim - 1) + [(0, 1)], constant_values=-jnp.inf)
    return jnp.take(padded, columns, axis=-1)
