"""DSpark and DFlash of DeepSpec (deepseek-ai/DeepSpec; drafters.md 8.2).

All keys stand side by side. Embedding and head are in the file, as copies of the target's.
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
    """Taps are blocks counted from 0, -1 the embedding; every row predicts, the anchor's included."""
    keys = Keys.of(source.config, source.config.child("dflash_config"))
    taps = keys.items("target_layer_ids", int)
    return body.read(
        source,
        target,
        keys,
        taps=None if taps is None else tuple(taps),
        key="target_layer_ids",
        from_anchor=True,
        block=keys.integer("block_size"),
        target_layers=keys.integer("num_target_layers"),
        causal=keys.flag("is_causal"),
        embedding=True,
        notes=source.notes,
    )


def write(saved: Saved, target: Checkpoint) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
    """Raises:
    JspecError: a drafter with parts that the format has no place for.
    """
    c = saved.config
    writing.check(
        "deepspec",
        c,
        {
            "fusion for each layer": c.layerwise,
            "rows that are filled in": not c.from_anchor,
            "a draft vocabulary": saved.ids is not None,
            "windows": bool(c.windowed or c.causal),
            "scales or a cap": writing.scaled(c),
            "a calibrated confidence head": writing.calibrated(saved.params),
        },
    )
    config = writing.qwen3("Qwen3DSparkModel", c, saved.params, target)
    config |= {
        "block_size": c.block,
        "mask_token_id": c.mask_id,
        "num_target_layers": c.target_layers,
        "target_layer_ids": list(c.taps),
        **writing.heads(c),
    }
    return config, layout.tensors(c, saved.params) | writing.copies(target, None)
