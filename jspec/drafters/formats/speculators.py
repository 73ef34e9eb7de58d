"""DFlash and DSpark of speculators (vllm-project/speculators; drafters.md 8.3).

The body's keys stand in `transformer_layer_config`. The draft vocabulary may be a part of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jspec.drafters.files import Saved
from jspec.drafters.formats import body, layout, vocabulary, writing
from jspec.drafters.formats.keys import Keys
from jspec.drafters.formats.layout import Reading
from jspec.drafters.formats.source import Source
from jspec.errors import JspecError
from jspec.target.checkpoint import Checkpoint

KINDS = ("dflash", "dspark")

# Class of a target, by what its checkpoints call its family.
CLASSES: Mapping[str, str] = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
}


def read(source: Source, target: Checkpoint) -> Reading:
    """Taps are hidden states: 0 is the embedding, i + 1 what block i gives."""
    doc = source.config
    layer = doc.child("transformer_layer_config")
    if layer is None:
        doc.refuse("lacks the key `transformer_layer_config`", "a file that gives the drafter's body")
    keys = Keys.of(layer, doc)
    block = keys.integer("block_size")
    outer = doc.child("speculators_config")
    counts = _counts(outer)
    from_anchor, note = _from_anchor(source, keys.flag("sample_from_anchor"), block, counts)
    verifier = None if outer is None else outer.child("verifier")
    made_for = (
        []
        if verifier is None
        else _named(target, verifier.text("name_or_path", ""), verifier.items("architectures", str, []))
    )
    aux = keys.items("aux_hidden_state_layer_ids", int)
    doc.mentions("speculators_model_type")
    return body.read(
        source,
        target,
        keys,
        taps=None if aux is None else tuple(i - 1 for i in aux),
        key="aux_hidden_state_layer_ids",
        from_anchor=from_anchor,
        block=block,
        target_layers=None,
        causal=False if keys.flag("sliding_window_non_causal", False) else None,
        embedding=True,
        notes=(*source.notes, *made_for, *note),
    )


def write(saved: Saved, target: Checkpoint) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
    """Raises:
    JspecError: a drafter with parts that the format has no place for.
    """
    c = saved.config
    writing.check(
        "speculators",
        c,
        {
            "fusion for each layer": c.layerwise,
            "a Markov table with a shared row": c.shared_row,
            "scales or a cap": writing.scaled(c),
            "a calibrated confidence head": writing.calibrated(saved.params),
            "layers besides the windowed ones whose rows do not see later rows": c.causal not in ((), c.windowed),
        },
    )
    kind = "dspark" if c.family == "dspark" else "dflash"
    body_keys = writing.qwen3("", c, saved.params, target)
    del body_keys["architectures"]
    config = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.longest}],
            "verifier": {
                "name_or_path": target.name,
                "architectures": [f"{CLASSES[target.config.family]}ForCausalLM"],
            },
        },
        "transformer_layer_config": body_keys,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in c.taps],
        "block_size": c.block,
        "draft_vocab_size": c.head_size,
        "mask_token_id": c.mask_id,
        "sample_from_anchor": c.from_anchor,
        "sliding_window_non_causal": bool(c.windowed) and not c.causal,
        "target_hidden_size": c.width,
        "dtype": body_keys["dtype"],
        **(writing.heads(c) if kind == "dspark" else {}),
    }
    made = layout.tensors(c, saved.params) | vocabulary.written(saved.ids, c.vocab_size)
    if saved.ids is not None:
        made |= {name: x for name, x in writing.copies(target, saved.ids).items() if name == "lm_head.weight"}
    return config, made


def _counts(outer: Any) -> list[int]:
    """Drafted tokens that each proposal method asks for."""
    methods: Sequence[Any] = [] if outer is None else outer.items("proposal_methods", dict, [])
    found = [method.get("speculative_tokens") for method in methods]
    return [n for n in found if isinstance(n, int) and not isinstance(n, bool)]


def _from_anchor(source: Source, given: bool | None, block: int | None, counts: list[int]) -> tuple[bool, list[str]]:
    """The slot convention, and a note where the file contradicts itself harmlessly.

    Without the key DFlash fills in. DSpark was written both ways: the library's own default is from the
    anchor, and files from before the key keep the anchor's row. How many tokens the file proposes tells
    them apart, and nothing else does.
    """
    dspark = source.config.text("speculators_model_type") == "dspark"
    note: list[str] = []
    if given is None and dspark:
        if block is None or not counts or counts[0] not in (block - 1, block):
            source.refuse(
                f"does not say whether the anchor's row predicts a token: no `sample_from_anchor`, `{block}` "
                f"rows a block and `speculative_tokens` of `{counts}`",
                "`sample_from_anchor`: true where the block has as many rows as tokens are drafted, false where it has "
                "one more. With the wrong one nearly nothing is accepted",
            )
        given = counts[0] == block
        note = [
            f"no `sample_from_anchor`: it drafts {counts[0]} tokens with {block} rows, so it is {str(given).lower()}"
        ]
    given = bool(given)
    most = None if block is None else block if given else block - 1
    if counts and most is not None and counts[0] > most:  # drafters.md 12.3
        note.append(f"it asks for {counts[0]} drafts, and its block gives at most {most}")
    return given, note


def _named(target: Checkpoint, name: str, classes: list[str]) -> list[str]:
    """Refuses a target of another class than the file names; a note if only the name is another."""
    mine = CLASSES.get(target.config.family, "")
    if classes and not set(classes) & {f"{mine}ForCausalLM", f"{mine}ForConditionalGeneration"}:
        raise JspecError(
            f"the drafter was made for a target of class `{classes[0]}`, `{name or 'unnamed'}`, and `{target.name}` is "
            f"of the family `{target.config.family}`.",
            "the target that the drafter was trained for.",
            "load that target, or a drafter for this one.",
        )
    same = name.rsplit("/", 1)[-1].lower() == target.name.lower()
    return [] if same or not name else [f"made for `{name}`; the target here is called `{target.name}`"]
