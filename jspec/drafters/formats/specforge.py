"""DSpark of SpecForge (sgl-project/SpecForge; drafters.md 8.4); its DFlash is that of z-lab.

The drafter's keys stand in `dflash_config`, in older files beside the body's. Embedding and head are the
target's; the draft vocabulary may be a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.drafters.files import Saved
from jspec.drafters.formats import body, layout, vocabulary, writing
from jspec.drafters.formats.keys import Keys
from jspec.drafters.formats.layout import Reading
from jspec.drafters.formats.source import Source
from jspec.target.checkpoint import Checkpoint


def read(source: Source, target: Checkpoint) -> Reading:
    """Taps are blocks counted from 0. Every row predicts, unless `shift_label` says that none is shifted."""
    keys = Keys.of(source.config.child("dflash_config"), source.config)
    taps = keys.items("target_layer_ids", int)
    keys.text("projector_type")
    return body.read(
        source,
        target,
        keys,
        taps=None if taps is None else tuple(taps),
        key="target_layer_ids",
        from_anchor=keys.flag("shift_label", True),
        block=keys.integer("block_size"),
        target_layers=keys.integer("num_target_layers"),
        causal=keys.flag("is_causal", keys.flag("causal")),
        notes=source.notes,
    )


def write(saved: Saved, target: Checkpoint) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
    """Raises:
    JspecError: a drafter with parts that the format has no place for.
    """
    c = saved.config
    writing.check(
        "specforge",
        c,
        {
            "no head of DSpark": c.family != "dspark",
            "fusion for each layer": c.layerwise,
            "a Markov table with a shared row": c.shared_row,
            "scales or a cap": writing.scaled(c),
            "the embedding among its taps": -1 in c.taps,
            "a calibrated confidence head": writing.calibrated(saved.params),
        },
    )
    config = writing.qwen3("DSparkDraftModel", c, saved.params, target)
    config |= {
        "block_size": c.block,
        **writing.causal(c),
        "num_target_layers": c.target_layers,
        "dflash_config": {
            "projector_type": "dspark",
            "shift_label": c.from_anchor,
            "mask_token_id": c.mask_id,
            "target_layer_ids": list(c.taps),
            **writing.heads(c),
        },
    }
    if saved.ids is not None:
        config["draft_vocab_size"] = c.head_size
    return config, layout.tensors(c, saved.params) | vocabulary.written(saved.ids, c.vocab_size)
