"""Which published format a folder is in: told by what it holds, its class name last.

Class names are not enough: exports carry those of other formats, and one class name has been used for
three architectures (drafters.md 8.7). What cannot be read is named, so that nobody takes a refusal for
a damaged file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from jspec.drafters.files import FORMAT, Saved
from jspec.drafters.formats import angelslim, angelspec, deepspec, specforge, speculators, zlab
from jspec.drafters.formats.layout import Reading
from jspec.drafters.formats.source import Source
from jspec.errors import JspecError
from jspec.target.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class Format:
    """A published format."""

    name: str
    title: str
    read: Callable[[Source, Checkpoint], Reading]
    write: Callable[[Saved, Checkpoint], tuple[Mapping[str, Any], Mapping[str, np.ndarray]]] | None = None


FORMATS: Mapping[str, Format] = {
    f.name: f
    for f in (
        Format("zlab", "DFlash of z-lab", zlab.read, zlab.write),
        Format("deepspec", "DSpark or DFlash of DeepSpec", deepspec.read, deepspec.write),
        Format("speculators", "DFlash or DSpark of speculators", speculators.read, speculators.write),
        Format("specforge", "DSpark of SpecForge", specforge.read, specforge.write),
        Format("angelslim", "DFlare of AngelSlim", angelslim.read, angelslim.write),
        Format("angelspec", "DFlare, DFlash or DSpark of AngelSpec", angelspec.read),
    )
}

# Tensors that only drafters of other kinds have, and what those are called.
OTHERS: Mapping[str, str] = {
    r"candidate_selector\.|layers\.[0-9]+\.(attention|mlp)_conv\.": "DFlash2",
    r"midlayer\.": "EAGLE-3, in the layout of its authors",
    r"prefix_gru\.|logit_head\.prefix_gru\.": "Domino",
    r"hidden_correction\.": "DFly",
    r"layers\.[0-9]+\.self_attn\.(q_a|kv_a|kv_b)_proj": "a drafter with latent attention",
    r"layers\.[0-9]+\.mlp\.experts\.": "a drafter with mixtures of experts",
    r"mtp\.": "layers for several tokens of a target's own",
    r"aux_hidden_norms\.": "Laguna's DFlash, with a norm for each tap",
}
CLASSES: Mapping[str, str] = {
    r"DFlash2": "DFlash2",
    r"(?i)eagle3": "EAGLE-3",
    r"(?i)eagle": "EAGLE",
    r"Gemma4DSparkModel": "DSpark on a body of Gemma 4",
    r"Qwen35DSparkModel": "DSpark on a body of Qwen3.5",
}


def recognise(source: Source) -> Format:
    """The format of a folder.

    Raises:
      JspecError: it is a drafter of a kind that cannot be read, which is named; or none at all.
    """
    config = source.config
    if config.text("format", "") == FORMAT:
        raise JspecError(f"`{source.folder}` is in jspec's own format.", "a published one.", "use it as it is.")
    kind = config.text("speculators_model_type", None)
    for pattern, name in OTHERS.items():
        if any(re.match(pattern, tensor) for tensor in source.tensors):
            _unread(source, name)
    if kind in speculators.KINDS:  # its files carry class names of other formats
        return FORMATS["speculators"]
    if kind is not None:
        _unread(source, f"{CLASSES.get(kind, kind)}, in the format of speculators")
    for pattern, name in CLASSES.items():
        if re.search(pattern, source.architecture):
            _unread(source, name)
    q, norm = (source.tensors.get(name) for name in ("layers.0.self_attn.q_proj.weight", "norm.weight"))
    if q is not None and norm is not None and q.shape[1:] == tuple(2 * n for n in norm.shape):
        _unread(source, "EAGLE-3")
    inner = config.child("dflash_config")
    projector = None if inner is None else inner.text("projector_type", None)
    if projector not in (None, "dflash", "dspark"):
        _unread(source, f"a drafter with the projector `{projector}`")
    if config.text("model_type", "") in ("dflash", "dspark") or "target_num_hidden_layers" in config:
        return FORMATS["angelspec"]
    if "layer_fusion_weights" in source.tensors:
        return FORMATS["angelslim"]
    if source.architecture == "Qwen3DSparkModel":
        return FORMATS["deepspec"]
    if projector == "dspark" or source.architecture == "DSparkDraftModel":
        return FORMATS["specforge"]
    if any(name.startswith("markov_head.") for name in source.tensors):
        # Both conventions are in use under this name, and nothing in the file tells them apart.
        source.refuse(
            f"is of class `{source.architecture}` and has a Markov head",
            "a file that says whether its first row predicts a token: DeepSpec's class `Qwen3DSparkModel`, or "
            "`dflash_config` with `projector_type` dspark and `shift_label`",
        )
    if inner is not None or source.architecture in ("DFlashDraftModel", "QwenDFlashDraftModel"):
        return FORMATS["zlab"]
    raise JspecError(
        f"`{source.folder}` is of class `{source.architecture or 'unnamed'}`, which is no drafter that is known.",
        "; ".join(f"{f.title} ({f.name})" for f in FORMATS.values()) + "; or jspec's own.",
        "check the path, or convert the drafter to one of these formats.",
    )


def _unread(source: Source, name: str) -> NoReturn:
    raise JspecError(
        f"`{source.folder}` holds {name}, which cannot be read yet.",
        "; ".join(f.title for f in FORMATS.values()) + ".",
        "use a drafter of one of these kinds for the same target.",
    )
