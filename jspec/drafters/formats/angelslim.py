"""DFlare of AngelSlim (Tencent/AngelSlim; drafters.md 8.5): keys as z-lab's, a mix of taps for each layer."""

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
    """Taps are blocks counted from 0; the block is filled in."""
    keys = Keys.of(source.config.child("dflash_config"), source.config)
    taps = keys.items("target_layer_ids", int)
    return body.read(
        source,
        target,
        keys,
        taps=None if taps is None else tuple(taps),
        key="target_layer_ids",
        from_anchor=False,
        block=keys.integer("block_size"),
        target_layers=keys.integer("num_target_layers"),
        causal=keys.flag("is_causal"),
        notes=source.notes,
    )


def write(saved: Saved, target: Checkpoint) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
    """Raises:
    JspecError: a drafter with parts that the format has no place for.
    """
    c = saved.config
    writing.check(
        "angelslim",
        c,
        {
            "heads of DSpark": c.markov is not None or c.confidence is not None,
            "one fusion for all layers": not c.layerwise,
            "rows from the anchor": c.from_anchor,
            "a draft vocabulary": saved.ids is not None,
            "scales or a cap": writing.scaled(c),
            "windows": bool(c.windowed or c.causal),
            "the embedding among its taps": -1 in c.taps,
        },
    )
    config = writing.qwen3("QwenDFlareDraftModel", c, saved.params, target)
    config |= {
        "block_size": c.block,
        "num_target_layers": c.target_layers,
        "dflash_config": {"mask_token_id": c.mask_id, "target_layer_ids": list(c.taps)},
    }
    return config, layout.tensors(c, saved.params)
