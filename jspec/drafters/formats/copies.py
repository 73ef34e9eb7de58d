"""Weights of the target that a drafter's file may hold once more.

A drafter here is lent the target's embedding and head, so a copy must be the same to the last bit. That
also is the strongest sign that the target at hand is the one it was trained for: a fine-tuned or quantised
one differs (drafters.md 12.15), and a head that was trained is not silently replaced (12.24).
"""

from __future__ import annotations

import numpy as np

from jspec.drafters import files
from jspec.drafters.formats.source import Source
from jspec.target.checkpoint import Checkpoint
from jspec.target.plan import FLOATS

COPIES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def check(source: Source, target: Checkpoint, ids: np.ndarray | None, rows: int) -> list[str]:
    """Refuses a copy that differs from the target's weights; names those that were compared.

    Args:
      ids: `[Vd]`, the tokens of the draft vocabulary, whose rows a head may be reduced to.
      rows: of a whole vocabulary in the file; what is beyond the target's is padding.
    """
    p, vocab, width = target.params, target.config.vocab_size, target.config.width
    head = p.embed if p.head is None else p.head
    compared = []
    for name in COPIES:
        if name not in source.tensors:
            continue
        tensor = source.tensors[name]
        shape: tuple[int, ...]
        if name == "verifier_norm.weight":
            # Families whose norms are stored less one have no drafters of this kind.
            wanted, shape = np.asarray(p.final_norm), (width,)
        else:
            whole = np.asarray(p.embed if name == "embed_tokens.weight" else head)
            reduced = ids is not None and name != "embed_tokens.weight" and tensor.shape[:1] == (len(ids),)
            wanted = whole[ids] if reduced else whole
            shape = (len(wanted) if reduced else rows, width)
        if tensor.shape != shape or tensor.dtype not in FLOATS:
            source.refuse(
                f"has `{tensor.name}` as {tensor.dtype} of shape {tensor.shape}",
                f"{', '.join(FLOATS)} of shape {shape}, a copy of the target's",
            )
        held = files.read_tensor(tensor)[: len(wanted)].astype(wanted.dtype)
        if not np.array_equal(held, wanted):
            far = float(np.max(np.abs(held.astype(np.float32) - wanted.astype(np.float32))))
            count = int((held != wanted).any(axis=-1).sum()) if held.ndim == 2 else int((held != wanted).sum())
            source.refuse(
                f"has `{tensor.name}` that is not the one of `{target.name}`: {count} of {len(wanted)} rows differ, by "
                f"up to {far:g}",
                f"a copy of the target's weights, all {vocab} tokens: the drafter was trained with these. Another "
                "target, a quantised or fine-tuned one, or a head of the drafter's own, would be drafted for badly",
            )
        compared.append(tensor.name)
    return [f"{', '.join(compared)}: as in the target"] if compared else []
