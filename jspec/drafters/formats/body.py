"""The body of a published block drafter: Qwen3's layers, told by tensors and configuration together.

Sizes come from the tensors; what the configuration says of them must agree. It is asked for what no
tensor shows: rotary embedding, windows, who sees whom inside a block, scales.
"""

from __future__ import annotations

import re
from typing import Any

from jspec.drafters.block.config import BlockConfig, spread
from jspec.drafters.formats import vocabulary
from jspec.drafters.formats.keys import Keys
from jspec.drafters.formats.layout import Reading
from jspec.drafters.formats.source import Source
from jspec.target import families
from jspec.target.checkpoint import Checkpoint

MOST_PADDING = 1024  # rows that a vocabulary may have beyond the target's: engines pad by less
MASK_TOKEN = "<|MASK|>"  # what a tokenizer calls it where the configuration does not

# Switches of other drafters, or of variations that this body lacks: refused when on (known-failures DR-7).
SWITCHES = ("attention_bias", "mlp_bias", "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")


def read(
    source: Source,
    target: Checkpoint,
    keys: Keys,
    *,
    taps: tuple[int, ...] | None,
    key: str,
    from_anchor: bool,
    block: int | None,
    target_layers: int | None,
    causal: bool | None = None,
    embedding: bool = False,
    scales: bool = False,
    notes: tuple[str, ...] = (),
) -> Reading:
    """What a format's own keys mean, put together with the body that all formats share.

    Args:
      keys: where settings stand.
      taps: the target's blocks in the file's order, 0-based, -1 for the embedding; None if the file names none.
      key: the setting they came from.
      block: rows of the block; None if the file does not say.
      target_layers: L of the target it was made for; None if the file does not say.
      causal: whether rows do not see later rows of the block; None: so in windowed layers only.
      embedding: whether the format can name the embedding.
      scales: whether the format has keys for scales of embeddings and logits.

    Raises:
      JspecError: a setting that is missing, contradicts the tensors, or asks for what is not built here;
        a drafter for a target of another shape.
    """
    _check_switches(keys)
    layers, width, head_width = _sizes(source, keys)
    t = target.config
    if target_layers is not None and target_layers != t.layers:
        _other(source, target, "layers", target_layers, t.layers)
    if width != t.width:
        _other(source, target, "width", width, t.width)
    layerwise = any(name == "layer_fusion_weights" or "k_proj_target" in name for name in source.tensors)
    fused = source.shape("layer_fusion_weights" if layerwise else "fc.weight", 2)[1] // (1 if layerwise else width)
    if taps is None:  # known-failures LD-12
        source.refuse(
            f"does not say which of the target's blocks it taps (`{key}`)",
            f"a list of {fused} blocks; the usual rule would give {list(spread(t.layers, fused))}, but many drafters "
            "do not follow it",
        )
    rows, padding = _vocabulary(source, target, keys)
    ids, note = vocabulary.read(source, keys.integer("draft_vocab_size"), rows, t.vocab_size)
    if block is None:
        source.refuse(
            "does not say how many rows its block has (`block_size`)",
            "the number it was trained with: rows beyond are noise. If its trainer's log tells, add the key",
        )
    window, windowed = _windows(keys, layers)
    if not scales and (t.embed_scale != 1.0 or t.logit_cap is not None):
        source.refuse(
            f"is for a target that scales embeddings by `{t.embed_scale:g}` and caps logits at `{t.logit_cap}`, and "
            "does not say whether the drafter was trained so",
            "a target without either, or a format with keys for them (zlab)",
        )
    if windowed and causal is False and window < block:
        source.refuse(
            f"has a window of `{window}` tokens and a block of `{block}` rows that see later rows",
            "a window that holds the whole block",
        )
    markov = _heads(source, keys, width)
    cap = keys.number("final_logit_softcapping") if scales else None
    q, kv = (source.shape(f"layers.0.self_attn.{part}_proj.weight", 2)[0] for part in "qk")
    config = BlockConfig(
        family="dspark" if markov["markov"] or markov["confidence"] else "dflare" if layerwise else "dflash",
        block=block,
        from_anchor=from_anchor,
        mask_id=_mask(source, target, keys),
        taps=_taps(source, taps, key, embedding),
        target_layers=t.layers,
        vocab_size=t.vocab_size,
        width=width,
        layers=layers,
        heads=max(1, q // head_width),
        kv_heads=max(1, kv // head_width),
        head_width=head_width,
        ff_width=source.shape("layers.0.mlp.gate_proj.weight", 2)[0],
        norm_eps=_positive(keys, "rms_norm_eps", 1e-6),
        rope=_rope(source, keys),
        draft_vocab=None if ids is None else len(ids),
        layerwise=layerwise,
        window=window,
        windowed=windowed,
        causal=windowed if causal is None else tuple(range(layers)) if causal else (),
        embed_scale=_positive(keys, "input_embedding_scale", 1.0) if scales else 1.0,
        logit_scale=_positive(keys, "output_multiplier", 1.0) if scales else 1.0,
        logit_cap=cap if cap is not None and cap > 0 else None,
        **markov,
    )
    order = tuple(taps.index(tap) for tap in config.taps)
    unread = sorted(keys.unread() - families.HARMLESS - _OF_TRAINING)
    more = [f"settings of its configuration that are not read: {', '.join(unread)}"] if unread else []
    temperature = keys.items("confidence_temperatures", float)
    if temperature is not None and len(temperature) != config.longest:
        source.refuse(
            f"has `{len(temperature)}` entries in `confidence_temperatures`", f"one for each of {config.longest} drafts"
        )
    return Reading(
        config=config,
        order=order,
        rows=rows,
        ids=ids,
        temperature=None if temperature is None else tuple(temperature),
        notes=(*notes, *padding, *note, *more),
    )


def _other(source: Source, target: Checkpoint, what: str, given: int, found: int) -> None:
    source.refuse(
        f"was made for a target whose `{what}` is `{given}`, and `{what}` of `{target.name}` is `{found}`",
        "the target that the drafter was trained for",
    )


def _sizes(source: Source, keys: Keys) -> tuple[int, int, int]:
    """Layers, width and head width."""
    found = {int(m[1]) for name in source.tensors if (m := re.match(r"layers\.([0-9]{1,6})\.", name))}
    if not found or found != set(range(len(found))):
        source.refuse(f"holds tensors of the layers `{sorted(found)}`", "all layers from 0 on")
    count = keys.integer("num_hidden_layers", len(found))
    if count != len(found):
        keys.place("num_hidden_layers").refuse(
            f"gives `num_hidden_layers` as `{count}`, and there are tensors of {len(found)} layers", "one depth"
        )
    width, head_width = source.shape("norm.weight", 1)[0], source.shape("layers.0.self_attn.q_norm.weight", 1)[0]
    for key, name, unit in (
        ("hidden_size", "norm.weight", 1),
        ("target_hidden_size", "norm.weight", 1),
        ("head_dim", "layers.0.self_attn.q_norm.weight", 1),
        ("num_attention_heads", "layers.0.self_attn.q_proj.weight", head_width),
        ("num_key_value_heads", "layers.0.self_attn.k_proj.weight", head_width),
        ("intermediate_size", "layers.0.mlp.gate_proj.weight", 1),
    ):
        given, shape = keys.integer(key), source.shape(name, 1 if "norm" in name else 2)
        if given is not None and given * unit != shape[0]:
            keys.place(key).refuse(
                f"gives `{key}` as `{given}`, and the tensor `{source.tensors[name].name}` has shape {shape}",
                "one size",
            )
    return len(found), width, head_width


def _vocabulary(source: Source, target: Checkpoint, keys: Keys) -> tuple[int, list[str]]:
    """Rows of a whole vocabulary in the file, and a note where they are more than the target's."""
    vocab = target.config.vocab_size
    rows: int = keys.integer("vocab_size", vocab)
    if not vocab <= rows <= vocab + MOST_PADDING:
        _other(source, target, "vocab_size", rows, vocab)
    # Known-failures LD-2: what the target does not know is left away, so it is never drafted.
    return rows, [f"its vocabulary is padded to {rows}; the rows beyond {vocab} are left away"] if rows > vocab else []


def _check_switches(keys: Keys) -> None:
    for key in SWITCHES:
        if keys.flag(key, False):
            keys.place(key).refuse(f"sets `{key}`", "a body without it: Qwen3's, as DFlash and DSpark have it")
    if not keys.flag("rope_is_neox_style", True):
        keys.place("rope_is_neox_style").refuse("pairs neighbours in its rotary embedding", "halves of the head")
    for key, known in (
        ("hidden_act", ("silu",)),
        ("attention_mode", ("gqa", "mha")),
        ("fusion_type", ("concat_fc",)),
    ):
        given = keys.text(key, known[0])
        if given not in known:
            keys.place(key).refuse(f"gives `{key}` as `{given}`", " or ".join(f"`{name}`" for name in known))
    modes = keys.items("attention_modes", str, [])
    if set(modes) - {"gqa", "mha"}:
        keys.place("attention_modes").refuse(f"gives `attention_modes` as `{modes}`", "`gqa` or `mha`")
    for place in keys.places:
        if place.child("quantization_config") is not None:
            place.refuse("is of quantised weights", "weights in float32, bfloat16 or float16")


def _taps(source: Source, taps: tuple[int, ...], key: str, embedding: bool) -> tuple[int, ...]:
    """Ascending. The upper bound and the last block are `BlockConfig`'s to check (known-failures LD-13)."""
    if -1 in taps and not embedding:
        source.refuse(f"taps the block `-1` (`{key}`)", "blocks from 0 on: this format has no name for the embedding")
    if len(set(taps)) != len(taps):
        source.refuse(f"taps one block twice: `{key}` means the blocks `{list(taps)}`", "different blocks")
    return tuple(sorted(taps))


def _mask(source: Source, target: Checkpoint, keys: Keys) -> int:
    """Known-failures DR-8: never a default, which would be a token of texts."""
    given: int | None = keys.integer("mask_token_id")
    if given is None:
        given = target.tokenizer.special.get(MASK_TOKEN)
    if given is None:
        source.refuse(
            f"does not say which token is the mask (`mask_token_id`), and the target has no `{MASK_TOKEN}`",
            "the token it was trained with",
        )
    return given


def _rope(source: Source, keys: Keys) -> Any:
    """Its base must be told somewhere: a wrong one reads well and drafts badly (drafters.md 12.16)."""
    doc = next((d for d in keys.places if {"rope_parameters", "rope_scaling", "rope_theta"} & set(d.data)), keys.main)
    settings = families.rope_settings(doc)
    theta = doc.number("rope_theta", None)
    if theta is None and (settings is None or settings.get("rope_theta") is None):
        source.refuse("does not give the base of its rotary embedding (`rope_theta`)", "a base, in either place")
    positions = keys.integer("max_position_embeddings", 0)
    return families.read_rope(doc, settings, theta, 0.0, positions)


def _windows(keys: Keys, layers: int) -> tuple[int, tuple[int, ...]]:
    """The window in tokens, and the layers that have it."""
    used, first = keys.flag("use_sliding_window"), keys.integer("max_window_layers", 28)
    kinds = keys.items("layer_types", str)
    if kinds is None:  # Qwen's rule
        windowed = tuple(i for i in range(layers) if used and i >= first)
    else:
        if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            keys.place("layer_types").refuse(
                f"gives {len(kinds)} entries of {', '.join(sorted(set(kinds)))} in `layer_types`, for {layers} layers",
                "`full_attention` or `sliding_attention` for each layer",
            )
        windowed = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    window = keys.integer("sliding_window")
    if not windowed:
        return 0, ()
    if used is False or window is None:
        keys.main.refuse(
            f"has windowed layers, `use_sliding_window` as `{used}` and `sliding_window` as `{window}`",
            "a window that is used, or no windowed layers",
        )
    if not 1 <= window < 1 << 30:
        keys.place("sliding_window").refuse(f"gives `sliding_window` as `{window}`", "a whole number of at least 1")
    return window, windowed


def _positive(keys: Keys, key: str, default: float) -> float:
    value: float = keys.number(key, default)
    if not 0 < value <= 1e6:
        keys.place(key).refuse(f"gives `{key}` as `{value:g}`", "a number above 0, up to 1e6")
    return value


def _heads(source: Source, keys: Keys, width: int) -> dict[str, Any]:
    """Markov and confidence head; settings must agree with what the tensors show (known-failures DR-9)."""
    held = "markov_head.markov_w1.weight" in source.tensors
    rank = keys.integer("markov_rank", source.shape("markov_head.markov_w1.weight", 2)[1] if held else 0)
    kind = "vanilla"
    for name, part in (("gated", "gate_proj"), ("rnn", "joint_proj")):
        if f"markov_head.{part}.weight" in source.tensors:
            kind = name
    kind = keys.text("markov_head_type", kind).lower()
    if rank == 0 and held:
        keys.place("markov_rank").refuse("gives `markov_rank` as `0`, and there is a Markov head", "its rank")
    sure = "confidence_head.proj.weight" in source.tensors
    enabled = keys.flag("enable_confidence_head", sure)
    if sure and not enabled:
        keys.place("enable_confidence_head").refuse("turns off the confidence head that is there", "no head, or a head")
    wide = source.shape("confidence_head.proj.weight", 2)[1] > width if sure else rank > 0
    reads = keys.flag("confidence_head_with_markov", wide)
    return {
        "markov": kind if rank else None,
        "rank": rank,
        "confidence": None if not enabled else "markov" if reads else "hidden",
    }


# Settings of training, and those that repeat others: they change nothing here.
_OF_TRAINING = frozenset(
    """
    algorithm attention_backend auf auto_map ce_loss_alpha confidence_head_alpha
    draft_num_hidden_layers l1_loss_alpha lambda_base_decay_ratio lambda_base_start loss_decay_gamma max_anchors
    model_arch model_type num_anchors num_target_layers speculators_version target_model_name_or_path
    tie_word_embeddings torch_dtype dtype transformers_version ttt_length use_aux_hidden_state
    """.split()  # noqa: SIM905 (a list would be a page)
)
