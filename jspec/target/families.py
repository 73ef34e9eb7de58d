"""Hugging Face's `config.json` to a `TargetConfig`: one function a family, defaults as in transformers.

Old files spell some things another way than new ones (`torch_dtype` and `dtype`, `rope_scaling` and
`rope_parameters`); both are read, and a file that says two different things is refused. Keys that no
one asks for are left to the caller to print: they are mostly settings of training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from jspec.errors import JspecError
from jspec.target.config import ROPES, MoeConfig, RopeConfig, TargetConfig
from jspec.target.documents import Document

MOST_LAYERS = MOST_EXPERTS = 10_000  # a damaged number must not become a plan of a billion tensors

# Of the keys that change nothing here: training, generation, bookkeeping. The rest is printed.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention architectures
    attention_dropout boi_token_index bos_token_id cache_implementation chunk_size_feed_forward eoi_token_index
    eos_token_id hidden_dropout id2label image_token_index initializer_range is_decoder is_encoder_decoder
    is_llama_config label2id max_window_layers mm_tokens_per_image mm_vision_config output_attentions
    output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type return_dict
    rope_interleaved router_aux_loss_coef sliding_window_pattern _sliding_window_pattern task_specific_params
    tokenizer_class transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache
    vision_config
    """.split()  # noqa: SIM905 (a list would be a page)
)

# What a family's checkpoints may hold beside the model, with the reason why it is left aside.
COMMON_EXTRAS: Mapping[str, str] = {
    r"(.*\.)?rotary_emb\.inv_freq": "frequencies, computed from the configuration",
    r"(model\.)?(mtp|mtp_layers)\..*": "layers that predict several tokens, a drafter of the checkpoint's own",
}
VISION_EXTRAS: Mapping[str, str] = {
    r"(model\.)?vision_tower\..*": "the part for images",
    r"(model\.)?multi_modal_projector\..*": "the part for images",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` becomes a target."""

    config: Callable[[Document], TargetConfig]
    norm_plus: float = 0.0  # added to stored norm weights: Gemma stores what is multiplied less one
    extras: Mapping[str, str] = dataclasses.field(default_factory=lambda: COMMON_EXTRAS)


def text_part(whole: Document) -> Document:
    """The part of a configuration that describes the language model: the whole, or `text_config`."""
    inner = whole.child("text_config")
    if inner is None:
        return whole
    # Settings of the whole hold for the part that does not say otherwise.
    for key in ("tie_word_embeddings", "torch_dtype", "dtype"):
        if key in whole and key not in inner:
            inner.data[key] = whole.data[key]
    inner.data.setdefault("model_type", f"{whole.data.get('model_type')}_text")
    return inner


def find(whole: Document) -> tuple[Family, Document]:
    """The family of a configuration, and its text part.

    Raises:
      JspecError: an architecture, a head or a kind of weights that is not supported.
    """
    text = text_part(whole)
    name = text.text("model_type")
    family = FAMILIES.get(name)
    if family is None:
        raise JspecError(
            f"`{whole.file}` describes a model of type `{name}`.",
            f"{_names(FAMILIES)}.",
            "use a checkpoint of one of these families. Code that comes with a checkpoint is never run.",
        )
    classes = whole.items("architectures", str, [])
    if classes and not any(c.endswith(("ForCausalLM", "ForConditionalGeneration")) for c in classes):
        whole.refuse(f"is of a model of class {_names(classes)}", "a language model, `...ForCausalLM`")
    for doc in (whole, text):
        quantised = doc.child("quantization_config")
        if quantised is not None:
            kind = quantised.data.get("quant_method", "unknown")
            whole.refuse(f"is of weights quantised by `{kind}`", "weights in float32, bfloat16 or float16")
    return family, text


def with_context(config: TargetConfig, context: int | None) -> TargetConfig:
    """The same target for texts of up to `context` tokens, where its rope needs to know (`dynamic`)."""
    if context is None:
        return config
    if config.rope.kind != "dynamic":
        raise JspecError(
            f"`context` is `{context}`, and the target's rope type is `{config.rope.kind}`.",
            "a `context` for the rope type `dynamic` alone, whose frequencies depend on it.",
            f"leave `context` out: the target takes texts of up to {config.max_positions} tokens.",
        )
    if not isinstance(context, int) or isinstance(context, bool) or not 1 <= context <= 1 << 24:
        raise JspecError(f"`context` is `{context!r}`.", "a whole number of tokens, up to 2**24.", "correct it.")
    rope = dataclasses.replace(config.rope, length=context)
    return dataclasses.replace(config, rope=rope, max_positions=max(context, config.rope.original))


# --- Families ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Defaults:
    """What transformers' configuration class of a family assumes where the file says nothing."""

    vocab: int = 151_936
    width: int = 4096
    ff: int = 22_016
    layers: int = 32
    heads: int = 32
    kv_heads: int | None = 32
    head_width: int | None = None  # None: width / heads
    positions: int = 32_768
    activation_key: str = "hidden_act"
    activation: str = "silu"
    tied: bool = False
    theta: float = 10_000.0


def _dense(doc: Document, d: _Defaults, rope: RopeConfig | None = None) -> TargetConfig:
    """What all families have in common."""
    layers = doc.integer("num_hidden_layers", d.layers)
    if not 1 <= layers <= MOST_LAYERS:
        doc.refuse(f"gives `num_hidden_layers` as `{layers}`", f"1 to {MOST_LAYERS} layers")
    width, heads = doc.integer("hidden_size", d.width), doc.integer("num_attention_heads", d.heads)
    head_width = doc.integer("head_dim", d.head_width)
    if head_width is None:
        if heads < 1 or width % heads:
            doc.refuse(
                f"has width `{width}` and `{heads}` query heads, and no `head_dim`", "heads that divide the width"
            )
        head_width = width // heads
    positions = doc.integer("max_position_embeddings", d.positions)
    activation = doc.text(d.activation_key, d.activation)
    if activation not in ("silu", "gelu_pytorch_tanh"):
        doc.refuse(f"gives `{d.activation_key}` as `{activation}`", "`silu` or `gelu_pytorch_tanh`")
    if rope is None:
        rope = read_rope(doc, rope_settings(doc), doc.number("rope_theta", None), d.theta, positions)
    return TargetConfig(
        family=doc.text("model_type"),
        vocab_size=doc.integer("vocab_size", d.vocab),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=doc.integer(
            "num_key_value_heads", heads if "num_key_value_heads" in doc.data else d.kv_heads or heads
        ),
        head_width=head_width,
        ff_width=doc.integer("intermediate_size", d.ff),
        max_positions=_longest(rope, positions),
        norm_eps=_positive(doc, "rms_norm_eps", 1e-6),
        rope=rope,
        tied_head=doc.flag("tie_word_embeddings", d.tied),
        activation="silu" if activation == "silu" else "gelu_tanh",
    )


def _llama(doc: Document) -> TargetConfig:
    base = _dense(doc, _Defaults(vocab=32_000, ff=11_008, kv_heads=None, positions=2048))
    biased = doc.flag("attention_bias", False)
    return dataclasses.replace(base, qkv_bias=biased, out_bias=biased, ff_bias=doc.flag("mlp_bias", False))


def _qwen2(doc: Document) -> TargetConfig:
    return _with_late_window(doc, dataclasses.replace(_dense(doc, _Defaults()), qkv_bias=True))


def _qwen3(doc: Document) -> TargetConfig:
    base = _dense(doc, _Defaults(head_width=128))
    biased = doc.flag("attention_bias", False)
    return _with_late_window(doc, dataclasses.replace(base, qkv_bias=biased, out_bias=biased, qk_norm=True))


def _qwen3_moe(doc: Document) -> TargetConfig:
    base = _dense(doc, _Defaults(width=2048, ff=6144, layers=24, kv_heads=4))
    biased = doc.flag("attention_bias", False)
    step = doc.integer("decoder_sparse_step", 1)
    if step < 1:
        doc.refuse(f"gives `decoder_sparse_step` as `{step}`", "a whole number of at least 1")
    dense = doc.items("mlp_only_layers", int, [])
    experts = doc.integer("num_experts", doc.integer("num_local_experts", 128))
    if experts > MOST_EXPERTS:
        doc.refuse(f"asks for `{experts}` experts", f"at most {MOST_EXPERTS}")
    sparse = tuple(i for i in range(base.layers) if i not in dense and (i + 1) % step == 0) if experts else ()
    moe = None
    if sparse:
        moe = MoeConfig(
            experts=experts,
            per_token=doc.integer("num_experts_per_tok", 8),
            width=doc.integer("moe_intermediate_size", 768),
            normalize=doc.flag("norm_topk_prob", False),
            layers=sparse,
        )
    window = doc.integer("sliding_window", 4096) if doc.flag("use_sliding_window", False) else 0
    return dataclasses.replace(
        base,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=True,
        moe=moe,
        window=window,
        windowed=tuple(range(base.layers)) if window else (),
    )


def _gemma2(doc: Document) -> TargetConfig:
    base = _dense(doc, dataclasses.replace(_GEMMA, positions=8192, vocab=256_000))
    kinds = _layer_kinds(doc, base.layers, lambda i: i % 2 == 0)
    return _gemma(doc, base, kinds, caps=(50.0, 30.0))


def _gemma3(doc: Document) -> TargetConfig:
    settings = rope_settings(doc) or {}
    nested = [key for key in ("full_attention", "sliding_attention") if key in settings]
    if nested and len(nested) != len(settings):
        doc.refuse("gives rope settings both for layer kinds and for all layers", "one or the other")
    positions = doc.integer("max_position_embeddings", 131_072)
    both = Document(settings, f"{doc.file}: rope settings")
    full, local = (both.child(f"{kind}_attention") if nested else None for kind in ("full", "sliding"))
    # Settings for all layers are those of the full ones: the windowed ones see too little to need any.
    rope = read_rope(doc, full.data if full else settings, doc.number("rope_theta", None), 1_000_000.0, positions)
    local_theta = doc.number("rope_local_base_freq", None)
    local_rope = read_rope(doc, local.data if local else None, local_theta, 10_000.0, positions)
    base = _dense(doc, _GEMMA, rope)
    period = doc.integer("sliding_window_pattern", doc.integer("_sliding_window_pattern", 6))
    if period < 1:
        doc.refuse(f"gives `sliding_window_pattern` as `{period}`", "a whole number of at least 1")
    kinds = _layer_kinds(doc, base.layers, lambda i: (i + 1) % period != 0)
    made = _gemma(doc, base, kinds, caps=(None, None))
    # Its `max_position_embeddings` are counted with the scaling.
    return dataclasses.replace(
        made, qk_norm=True, window_rope=local_rope if made.windowed else None, max_positions=positions
    )


def _gemma(
    doc: Document, base: TargetConfig, windowed: tuple[int, ...], caps: tuple[float | None, float | None]
) -> TargetConfig:
    if doc.flag("use_bidirectional_attention", False):
        doc.refuse("sets `use_bidirectional_attention`", "a model that reads from left to right")
    score, logit = (
        None if doc.mentions(key) and key not in doc else doc.number(key, default)
        for key, default in (("attn_logit_softcapping", caps[0]), ("final_logit_softcapping", caps[1]))
    )
    biased = doc.flag("attention_bias", False)
    return dataclasses.replace(
        base,
        qkv_bias=biased,
        out_bias=biased,
        post_norms=True,
        embed_scale=math.sqrt(base.width),
        query_scale=_positive(doc, "query_pre_attn_scalar", 256.0) ** -0.5,
        score_cap=score,
        logit_cap=logit,
        window=_window(doc) if windowed else 0,
        windowed=windowed,
    )


# --- Windows -------------------------------------------------------------------------------------


def _with_late_window(doc: Document, base: TargetConfig) -> TargetConfig:
    """Qwen's rule: with `use_sliding_window` the layers from `max_window_layers` on are windowed."""
    used = doc.flag("use_sliding_window", False)
    first = doc.integer("max_window_layers", 28)
    windowed = _layer_kinds(doc, base.layers, lambda i: used and i >= first)
    if windowed and not used:
        doc.refuse("names windowed layers and does not set `use_sliding_window`", "both, or neither")
    return dataclasses.replace(base, window=_window(doc) if windowed else 0, windowed=windowed)


def _layer_kinds(doc: Document, layers: int, rule: Callable[[int], bool]) -> tuple[int, ...]:
    """The windowed layers: those that `layer_types` names, or by the family's rule."""
    kinds = doc.items("layer_types", str, None)
    if kinds is None:
        return tuple(i for i in range(layers) if rule(i))
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        doc.refuse(
            f"gives `{len(kinds)}` entries of {_names(sorted(set(kinds)))} in `layer_types`, for `{layers}` layers",
            "`full_attention` or `sliding_attention` for each layer",
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def _window(doc: Document) -> int:
    if doc.mentions("sliding_window") and "sliding_window" not in doc:
        doc.refuse("has windowed layers and `sliding_window` null", "the size of the window, in tokens")
    window = doc.integer("sliding_window", 4096)
    if window < 1:
        doc.refuse(f"gives `sliding_window` as `{window}`", "a whole number of at least 1")
    return window


# --- Rotary embedding ----------------------------------------------------------------------------

# What each kind reads besides its name and `rope_theta`, and what of that may be left out.
_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def rope_settings(doc: Document) -> dict[str, object] | None:
    """`rope_scaling` or `rope_parameters`, whichever is there."""
    old, new = doc.child("rope_scaling"), doc.child("rope_parameters")
    if old is not None and new is not None and old.data != new.data:
        doc.refuse("gives `rope_scaling` and `rope_parameters`, and they differ", "one of them")
    found = old or new
    return None if found is None else found.data


def read_rope(
    doc: Document, settings: Mapping[str, object] | None, theta: float | None, default: float, positions: int
) -> RopeConfig:
    """One rope configuration.

    Args:
      doc: where it comes from, for errors.
      settings: the object of `rope_scaling` or `rope_parameters`, or of one layer kind in it.
      theta: the base that stands beside that object, if any.
      default: the base where neither has one.
      positions: `max_position_embeddings`.
    """
    sub = Document(settings or {}, f"{doc.file}: rope settings")
    kind, old = sub.text("rope_type", None), sub.text("type", None)
    if kind is not None and old is not None and kind != old:
        sub.refuse(f"give `rope_type` as `{kind}` and `type` as `{old}`", "one type")
    kind = kind or old or "default"
    if kind not in ROPES:
        sub.refuse(f"ask for the rope type `{kind}`", f"{_names(ROPES)}")
    inner = sub.number("rope_theta", None)
    if inner is not None and theta is not None and inner != theta:
        doc.refuse(f"gives `rope_theta` as `{theta:g}` and, in its rope settings, as `{inner:g}`", "one base")
    base = next(value for value in (inner, theta, default) if value is not None)
    for where in (sub, doc):
        turned = where.number("partial_rotary_factor", 1.0)
        if turned != 1.0:
            where.refuse(f"turn only `{turned}` of each head", "rotary over the whole head")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROPE_KEYS[kind]}
    if unknown := [key for key in sub.data if key not in known and sub.data[key] is not None]:
        sub.refuse(f"of type `{kind}` have {_names(unknown)}, which it does not read", f"{_names(sorted(known))}")
    if kind == "default":
        return RopeConfig(theta=base)
    factor = sub.number("factor")
    if factor < 1:
        sub.refuse(f"give `factor` as `{factor}`", "a number of at least 1")
    if kind == "linear":
        return RopeConfig(theta=base, kind=kind, factor=factor)
    if kind == "dynamic":
        return RopeConfig(theta=base, kind=kind, factor=factor, original=positions, length=positions)
    inner_original, outer_original = (d.integer("original_max_position_embeddings", None) for d in (sub, doc))
    if None not in (inner_original, outer_original) and inner_original != outer_original:
        doc.refuse("gives two different `original_max_position_embeddings`", "one of them")
    original = inner_original or outer_original or positions
    if kind == "llama3":
        low, high = sub.number("low_freq_factor"), sub.number("high_freq_factor")
        return RopeConfig(theta=base, kind=kind, factor=factor, original=original, low=low, high=high)
    return RopeConfig(
        theta=base,
        kind=kind,
        factor=factor,
        original=original,
        beta_fast=sub.number("beta_fast", 0.0) or 32.0,
        beta_slow=sub.number("beta_slow", 0.0) or 1.0,
        truncate=sub.flag("truncate", True),
        scale=_yarn_scale(sub, factor),
    )


def _yarn_scale(sub: Document, factor: float) -> float:
    """What cosine and sine are multiplied by (Peng et al., 2023, section 3.4)."""
    given = sub.number("attention_factor", None)
    top, bottom = sub.number("mscale", 0.0), sub.number("mscale_all_dim", 0.0)

    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if given is not None:
        return float(given)
    return grown(top) / grown(bottom) if top and bottom else grown(1.0)


def _longest(rope: RopeConfig, positions: int) -> int:
    """Tokens of the longest text: what scaling stretches, unless the file has counted it already."""
    if rope.kind == "linear":
        return min(int(positions * rope.factor), 1 << 30)
    if rope.kind == "yarn":
        return max(positions, min(int(rope.original * rope.factor), 1 << 30))
    return positions


def _positive(doc: Document, key: str, default: float) -> float:
    value = float(doc.number(key, default))
    if value <= 0:
        doc.refuse(f"gives `{key}` as `{value}`", "a number above 0")
    return value


def _names(names: Mapping[str, object] | tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_GEMMA = _Defaults(
    vocab=262_208,
    width=2304,
    ff=9216,
    layers=26,
    heads=8,
    kv_heads=4,
    head_width=256,
    positions=131_072,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    tied=True,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_llama),
    "qwen2": Family(_qwen2),
    "qwen3": Family(_qwen3),
    "qwen3_moe": Family(_qwen3_moe),
    "gemma2": Family(_gemma2, norm_plus=1.0),
    "gemma3_text": Family(_gemma3, norm_plus=1.0, extras={**COMMON_EXTRAS, **VISION_EXTRAS}),
}
