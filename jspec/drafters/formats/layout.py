"""Names and shapes of the tensors of a block drafter, as most formats have them (drafters.md 8)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.drafters import files
from jspec.drafters.block.config import BlockConfig
from jspec.drafters.block.weights import BlockLayer, BlockParams, Confidence, Markov
from jspec.drafters.formats import vocabulary
from jspec.drafters.formats.copies import COPIES
from jspec.drafters.formats.source import Source
from jspec.target.plan import FLOATS

BUFFERS = ("rotary_emb.inv_freq",)  # computed from the configuration, and left aside


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What a format says of a drafter, in our terms."""

    config: BlockConfig
    order: tuple[int, ...]  # place, in the file, of each tap of `config.taps`
    rows: int  # of a whole vocabulary in the file, at least V
    ids: np.ndarray | None  # [Vd] int32
    temperature: tuple[float, ...] | None  # [K], of the confidence head
    notes: tuple[str, ...]


def shapes(config: BlockConfig, rows: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter and its shape.

    Args:
      rows: of a whole vocabulary.
    """
    c = config
    columns = rows if c.draft_vocab is None else c.draft_vocab
    q, kv = c.heads * c.head_width, c.kv_heads * c.head_width
    out: dict[str, tuple[int, ...]] = {"hidden_norm.weight": (c.width,), "norm.weight": (c.width,)}
    if c.layerwise:
        out["layer_fusion_weights"] = (c.layers, len(c.taps))
    else:
        out["fc.weight"] = (c.width, len(c.taps) * c.width)
    for i in range(c.layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (c.width,),
            "post_attention_layernorm.weight": (c.width,),
            "self_attn.q_proj.weight": (q, c.width),
            "self_attn.k_proj.weight": (kv, c.width),
            "self_attn.v_proj.weight": (kv, c.width),
            "self_attn.o_proj.weight": (c.width, q),
            "self_attn.q_norm.weight": (c.head_width,),
            "self_attn.k_norm.weight": (c.head_width,),
            "mlp.gate_proj.weight": (c.ff_width, c.width),
            "mlp.up_proj.weight": (c.ff_width, c.width),
            "mlp.down_proj.weight": (c.width, c.ff_width),
        }
        if c.layerwise:
            layer |= {f"self_attn.{part}_proj_target.weight": (kv, c.width) for part in "kv"}
        out |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if c.markov is not None:
        out["markov_head.markov_w1.weight"] = (rows, c.rank)
        out["markov_head.markov_w2.weight"] = (columns, c.rank)
        mixed = {"vanilla": None, "gated": (1, c.width + c.rank), "rnn": (3, 2 * c.rank + c.width)}[c.markov]
        if mixed is not None:
            part = "gate_proj" if c.markov == "gated" else "joint_proj"
            out[f"markov_head.{part}.weight"] = (mixed[0] * c.rank, mixed[1])
            out[f"markov_head.{part}.bias"] = (mixed[0] * c.rank,)
    if c.confidence is not None:
        out["confidence_head.proj.weight"] = (1, c.width + (c.rank if c.confidence == "markov" else 0))
        out["confidence_head.proj.bias"] = (1,)
    return out


def check(source: Source, reading: Reading) -> None:
    """Refuses tensors that are missing, unknown, of another shape or no floats; by name."""
    wanted = shapes(reading.config, reading.rows)
    missing = sorted(set(wanted) - set(source.tensors))
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        source.refuse(f"lacks the tensor `{missing[0]}`{more}", f"all {len(wanted)} that its configuration asks for")
    besides = sorted(set(source.tensors) - set(wanted) - set(COPIES) - set(vocabulary.MAPS) - set(BUFFERS))
    if besides:
        more = f" and {len(besides) - 1} more" if besides[1:] else ""
        source.refuse(
            f"holds the tensor `{source.tensors[besides[0]].name}`{more}, which its configuration does not explain",
            "tensors that are all used: what is left out could be what makes it draft well",
        )
    for name, shape in wanted.items():
        found = source.tensors[name]
        if found.shape != shape or found.dtype not in FLOATS:
            source.refuse(
                f"has `{found.name}` as {found.dtype} of shape {found.shape}",
                f"{', '.join(FLOATS)} of shape {shape}, as its configuration asks for",
            )


def params(source: Source, reading: Reading, dtype: Any) -> BlockParams:
    """The weights: linear ones in `dtype`, vectors in float32."""
    c, vocab = reading.config, reading.config.vocab_size

    def read(name: str, exact: bool) -> np.ndarray:
        return files.read_tensor(source.tensors[name]).astype(np.float32 if exact else dtype)

    def vector(name: str) -> Array:
        return jnp.asarray(read(name, True))

    def linear(*names: str) -> Array:
        return jnp.asarray(np.concatenate([read(name, False) for name in names]))

    def layer(i: int) -> BlockLayer:
        at = f"layers.{i}."
        own, given = (tuple(f"{at}self_attn.{part}_proj{end}.weight" for part in "kv") for end in ("", "_target"))
        return BlockLayer(
            attn_norm=vector(at + "input_layernorm.weight"),
            q=linear(at + "self_attn.q_proj.weight"),
            kv=linear(*own),
            kv_context=linear(*given) if c.layerwise else None,
            q_norm=vector(at + "self_attn.q_norm.weight"),
            k_norm=vector(at + "self_attn.k_norm.weight"),
            out=linear(at + "self_attn.o_proj.weight"),
            ff_norm=vector(at + "post_attention_layernorm.weight"),
            gate_up=linear(at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight"),
            down=linear(at + "mlp.down_proj.weight"),
        )

    order = list(reading.order)
    fuse = mix = None
    if c.layerwise:
        mix = jnp.asarray(read("layer_fusion_weights", True)[:, order])
    else:
        blocks = read("fc.weight", False).reshape(c.width, len(order), c.width)
        fuse = jnp.asarray(blocks[:, order].reshape(c.width, -1))
    markov = None
    if c.markov is not None:
        part = {"vanilla": None, "gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}[c.markov]
        markov = Markov(
            previous=linear("markov_head.markov_w1.weight")[:vocab],
            following=linear("markov_head.markov_w2.weight")[: c.head_size],
            mix=None if part is None else linear(f"{part}.weight"),
            mix_bias=None if part is None else vector(f"{part}.bias"),
        )
    confidence = None
    if c.confidence is not None:
        temperature = (1.0,) * c.longest if reading.temperature is None else reading.temperature
        confidence = Confidence(
            weight=vector("confidence_head.proj.weight")[0],
            bias=vector("confidence_head.proj.bias")[0],
            temperature=jnp.asarray(temperature, jnp.float32),
        )
    return BlockParams(
        fuse=fuse,
        mix=mix,
        context_norm=vector("hidden_norm.weight"),
        layers=tuple(layer(i) for i in range(c.layers)),
        final_norm=vector("norm.weight"),
        markov=markov,
        confidence=confidence,
    )


def tensors(config: BlockConfig, given: BlockParams) -> dict[str, np.ndarray]:
    """The way back: every tensor by its published name."""
    c = config
    out: dict[str, Any] = {"hidden_norm.weight": given.context_norm, "norm.weight": given.final_norm}
    out["layer_fusion_weights" if c.layerwise else "fc.weight"] = given.mix if c.layerwise else given.fuse
    for i, layer in enumerate(given.layers):
        pairs = {"": layer.kv} | ({"_target": layer.kv_context} if layer.kv_context is not None else {})
        parts: dict[str, Any] = {
            "input_layernorm": layer.attn_norm,
            "post_attention_layernorm": layer.ff_norm,
            "self_attn.q_proj": layer.q,
            "self_attn.o_proj": layer.out,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
            "mlp.down_proj": layer.down,
        }
        parts["mlp.gate_proj"], parts["mlp.up_proj"] = np.split(np.asarray(layer.gate_up), 2)
        for end, both in pairs.items():
            keys, values = np.split(np.asarray(both), 2)
            parts |= {f"self_attn.k_proj{end}": keys, f"self_attn.v_proj{end}": values}
        out |= {f"layers.{i}.{name}.weight": part for name, part in parts.items()}
    if given.markov is not None:
        out["markov_head.markov_w1.weight"] = given.markov.previous
        out["markov_head.markov_w2.weight"] = given.markov.following
        if given.markov.mix is not None:
            part = "gate_proj" if c.markov == "gated" else "joint_proj"
            out[f"markov_head.{part}.weight"] = given.markov.mix
            out[f"markov_head.{part}.bias"] = given.markov.mix_bias
    if given.confidence is not None:
        out["confidence_head.proj.weight"] = np.asarray(given.confidence.weight)[None]
        out["confidence_head.proj.bias"] = np.asarray(given.confidence.bias)[None]
    return {name: _narrow(np.asarray(array), given.layers[0].q.dtype) for name, array in out.items()}


def _narrow(array: np.ndarray, dtype: Any) -> np.ndarray:
    """In the dtype of the linear weights where that holds every value, as vectors of published files mostly are."""
    narrow = array.astype(dtype)
    return narrow if np.array_equal(narrow.astype(array.dtype), array) else array
