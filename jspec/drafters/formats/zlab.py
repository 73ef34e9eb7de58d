"""DFlash as its authors publish it (z-lab/dflash), and as SpecForge and AngelSlim train it (drafters.md 8.1).

The drafter's keys stand in `dflash_config` or, in older files, beside those of the body. Embedding and
head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.drafters.files import Saved
from jspec.drafters.formats import body, layout, writing
from jspec.drafters.formats.keys import Keys
from jspec.drafters.formats.layout import Reading
from jspec.drafters.formats.source import Source
from jspec.target.checkpoint import Checkpoint


def read(source: Source, target: Checkpoint) -> Reading:
    """Taps are blocks counted from 0; the block is filled in, its first row predicts nothing."""
    keys = Keys.of(source.config.child("dflash_config"), source.config)
    taps = keys.items("target_layer_ids", int)
    causal = keys.flag("is_causal", keys.flag("causal"))
    return body.read(
        source,
        target,
        keys,
        taps=None if taps is None else tuple(taps),
        key="target_layer_ids",
        from_anchor=keys.flag("shift_label", False),
        block=keys.integer("block_size"),
        target_layers=keys.integer("num_target_layers"),
        causal=causal,
        scales=True,
        notes=source.notes,
    )


def write(saved: Saved, target: Checkpoint) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
    """Raises:
    JspecError: a drafter with parts that the format has no place for.
    """
    c = saved.config
    writing.check(
        "zlab",
        c,
        {
            "heads of DSpark": c.markov is not None or c.confidence is not None,
            "fusion for each layer": c.layerwise,
            "rows from the anchor": c.from_anchor,
            "a draft vocabulary": saved.ids is not None,
            "the embedding among its taps": -1 in c.taps,
        },
    )
    inner: dict[str, Any] = {"block_size": c.block, "mask_token_id": c.mask_id, "target_layer_ids": list(c.taps)}
    if c.logit_cap is not None:
        inner["final_logit_softcapping"] = c.logit_cap
    if c.embed_scale != 1.0:
        inner["input_embedding_scale"] = c.embed_scale
    if c.logit_scale != 1.0:
        inner["output_multiplier"] = c.logit_scale
    config = writing.qwen3("DFlashDraftModel", c, saved.params, target)
    config |= {**writing.causal(c), "num_target_layers": c.target_layers, "dflash_config": inner}
    return config, layout.tensors(c, saved.params)
