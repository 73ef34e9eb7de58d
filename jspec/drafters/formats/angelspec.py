"""DFlare, DFlash and DSpark of AngelSpec (Tencent/AngelSpec; drafters.md 8.5).

`num_target_layers` is the number of taps here, and the target's depth is `target_num_hidden_layers`
(drafters.md 12.28). Read as trained or as extracted for engines (`source.SPELLINGS`); not written.
"""

from __future__ import annotations

from jspec.drafters.formats import body
from jspec.drafters.formats.keys import Keys
from jspec.drafters.formats.layout import Reading
from jspec.drafters.formats.source import Source
from jspec.target.checkpoint import Checkpoint


def read(source: Source, target: Checkpoint) -> Reading:
    """Taps are blocks counted from 0; filled in, but for DSpark, whose rows all predict."""
    doc = source.config
    keys = Keys.of(doc, doc.child("dflash_config"), doc.child("dflare_config"))
    taps = keys.items("target_layer_ids", int)
    count = keys.integer("num_target_layers")
    if taps is not None and count is not None and len(taps) != count:
        doc.refuse(f"gives `num_target_layers` as `{count}` and {len(taps)} `target_layer_ids`", "as many")
    if keys.flag("markov_pos_adaptive", False) or keys.flag("enable_hidden_correction", False):
        doc.refuse("asks for corrections by position or of hidden states", "DSpark, DFlash or DFlare without them")
    return body.read(
        source,
        target,
        keys,
        taps=None if taps is None else tuple(taps),
        key="target_layer_ids",
        from_anchor=doc.text("model_type", "") == "dspark",
        block=keys.integer("block_size"),
        target_layers=keys.integer("target_num_hidden_layers"),
        notes=source.notes,
    )
