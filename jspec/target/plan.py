"""Which tensors of a Hugging Face checkpoint fill which weights of a target.

Every tensor of the files is either in the plan, on the family's list of extras, or a fault, and all
faults are told together before anything is converted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from jspec.errors import JspecError
from jspec.target import moe
from jspec.target.config import TargetConfig
from jspec.target.families import Family
from jspec.target.model import Layer, TargetParams
from jspec.target.shards import Shards

FLOATS = ("F32", "BF16", "F16")
EXTRA = "not part of the model"

# Where the language model's tensors begin and what its head is called: alone, or as part of a larger
# model in the spelling before and since transformers 4.52, or saved without its head.
SPELLINGS = (
    ("model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
    ("", "lm_head.weight"),
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of the files, whose rows follow those of the part before it in the same weight."""

    name: str
    shape: tuple[int, ...]
    plus: float = 0.0  # added to every value


# A weight's place in `TargetParams`: ("embed",), or (layer number, "qkv"), or (layer number, "experts.down").
Place = tuple[str] | tuple[int, str]


@dataclasses.dataclass(frozen=True)
class Weight:
    """One array of `TargetParams`: its shape and the tensors that fill it, from its first row to its last."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    exact: bool = False  # float32 whatever the dtype: vectors, and the router

    @classmethod
    def of(cls, *parts: Part) -> Weight:
        """Rows of all parts, one behind the other."""
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return cls(shape, parts, exact=len(shape) == 1)


Plan = dict[Place, Weight]


@dataclasses.dataclass(frozen=True)
class Left:
    """A tensor that is not read, and why."""

    name: str
    reason: str


def make(config: TargetConfig, family: Family, names: Collection[str]) -> Plan:
    """The plan for files that hold `names`."""
    c = config
    base, head = next((s for s in SPELLINGS if s[0] + "embed_tokens.weight" in names), SPELLINGS[0])

    def norm(name: str, width: int = c.width) -> Weight:
        return Weight.of(Part(name, (width,), family.norm_plus))

    plan: Plan = {
        ("embed",): Weight.of(Part(base + "embed_tokens.weight", (c.vocab_size, c.width))),
        ("final_norm",): norm(base + "norm.weight"),
    }
    if not c.tied_head:
        plan["head",] = Weight.of(Part(head, (c.vocab_size, c.width)))
    q, kv = c.heads * c.head_width, c.kv_heads * c.head_width
    for i in range(c.layers):
        block = f"{base}layers.{i}."
        attn = block + "self_attn."
        tripled = [(f"{attn}{letter}_proj", rows) for letter, rows in (("q", q), ("k", kv), ("v", kv))]
        plan[i, "attn_norm"] = norm(block + "input_layernorm.weight")
        plan[i, "qkv"] = Weight.of(*(Part(f"{name}.weight", (rows, c.width)) for name, rows in tripled))
        plan[i, "out"] = Weight.of(Part(attn + "o_proj.weight", (c.width, q)))
        if c.qkv_bias:
            plan[i, "qkv_bias"] = Weight.of(*(Part(f"{name}.bias", (rows,)) for name, rows in tripled))
        if c.out_bias:
            plan[i, "out_bias"] = Weight.of(Part(attn + "o_proj.bias", (c.width,)))
        if c.qk_norm:
            plan[i, "q_norm"] = norm(attn + "q_norm.weight", c.head_width)
            plan[i, "k_norm"] = norm(attn + "k_norm.weight", c.head_width)
        if c.post_norms:
            plan[i, "attn_out_norm"] = norm(block + "post_attention_layernorm.weight")
            plan[i, "ff_norm"] = norm(block + "pre_feedforward_layernorm.weight")
            plan[i, "ff_out_norm"] = norm(block + "post_feedforward_layernorm.weight")
        else:
            plan[i, "ff_norm"] = norm(block + "post_attention_layernorm.weight")
        if c.is_sparse(i):
            _add_experts(plan, i, block + "mlp.", c, names)
        else:
            _add_dense(plan, i, block + "mlp.", c)
    return plan


def _add_dense(plan: Plan, i: int, mlp: str, c: TargetConfig) -> None:
    pair = ("gate_proj", "up_proj")
    plan[i, "gate_up"] = Weight.of(*(Part(f"{mlp}{name}.weight", (c.ff_width, c.width)) for name in pair))
    plan[i, "down"] = Weight.of(Part(mlp + "down_proj.weight", (c.width, c.ff_width)))
    if c.ff_bias:
        plan[i, "gate_up_bias"] = Weight.of(*(Part(f"{mlp}{name}.bias", (c.ff_width,)) for name in pair))
        plan[i, "down_bias"] = Weight.of(Part(mlp + "down_proj.bias", (c.width,)))


def _add_experts(plan: Plan, i: int, mlp: str, c: TargetConfig, names: Collection[str]) -> None:
    assert c.moe is not None
    e, f, d = c.moe.experts, c.moe.width, c.width
    up_shape, down_shape = (e, 2 * f, d), (e, d, f)
    if mlp + "experts.gate_up_proj" in names:  # all experts in one tensor
        ups, downs = [Part(mlp + "experts.gate_up_proj", up_shape)], [Part(mlp + "experts.down_proj", down_shape)]
    else:
        each = [f"{mlp}experts.{n}." for n in range(e)]
        ups = [Part(f"{x}{name}.weight", (f, d)) for x in each for name in ("gate_proj", "up_proj")]
        downs = [Part(f"{x}down_proj.weight", (d, f)) for x in each]
    plan[i, "experts.router"] = Weight((e, d), (Part(mlp + "gate.weight", (e, d)),), exact=True)
    plan[i, "experts.gate_up"] = Weight(up_shape, tuple(ups))
    plan[i, "experts.down"] = Weight(down_shape, tuple(downs))


def check(plan: Plan, shards: Shards, family: Family, tied: bool) -> tuple[list[Left], str | None]:
    """Matches the plan with the files.

    Returns:
      what is left aside; and the name of a copy of the embedding stored as the head of a tied model,
      which the caller compares.

    Raises:
      JspecError: names every missing, misshapen, extra or unreadable tensor.
    """
    tensors = dict(shards.tensors)
    parts = [part for weight in plan.values() for part in weight.parts]
    found = [tensors[part.name] for part in parts if part.name in tensors]
    types = [f"`{tensor.name}` ({tensor.dtype})" for tensor in found if tensor.dtype not in FLOATS]
    faults = match(parts, tensors)
    left, copy, extra = [], None, []
    for name in tensors:
        reason = next((why for pattern, why in family.extras.items() if re.fullmatch(pattern, name)), None)
        if tied and name in {head for _, head in SPELLINGS}:
            copy, reason = name, "a copy of the embedding, which is the head"
        elif reason is None and name in shards.unindexed:
            reason = "not in the index, and not part of the model"
        if reason is None:
            extra.append(f"`{name}`")
        else:
            left.append(Left(name, reason))
    faults |= {f"of a type other than {', '.join(FLOATS)}": types, EXTRA: extra}
    if any(faults.values()):
        raise JspecError(
            f"the weight files do not hold the tensors that `config.json` asks for. {told(faults)}.",
            f"exactly {len(parts)} tensors, each of the shape that the configuration gives.",
            "get configuration and weights from one place, or convert the checkpoint anew.",
        )
    return left, copy


class Shaped(Protocol):
    """A tensor of a file, or a part of the plan for one."""

    @property
    def name(self) -> str:
        """As the file calls it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """From the slowest dimension to the fastest."""


def match(parts: Iterable[Shaped], tensors: dict[str, Any]) -> dict[str, list[str]]:
    """Takes out of `tensors`, by name, what `parts` ask for; returns the faults, by kind."""
    missing, misshapen = [], []
    for part in parts:
        tensor: Shaped | None = tensors.pop(part.name, None)
        if tensor is None:
            missing.append(f"`{part.name}` {_by(part.shape)}")
        elif tensor.shape != part.shape:
            misshapen.append(f"`{part.name}` is {_by(tensor.shape)}, not {_by(part.shape)}")
    return {"missing": missing, "of another shape": misshapen}


def told(faults: Mapping[str, list[str]]) -> str:
    """Faults in one sentence."""
    return "; ".join(f"{what}: {_list(names)}" for what, names in faults.items() if names)


def assemble(arrays: Mapping[Place, Any], config: TargetConfig) -> TargetParams:
    """Arrays by place to the tree that the forward pass takes."""
    blocks: list[dict[str, Any]] = [{} for _ in range(config.layers)]
    for place, array in arrays.items():
        if len(place) == 2:
            blocks[place[0]][place[1]] = array
    layers = []
    for mine in blocks:
        experts = {name.removeprefix("experts."): mine.pop(name) for name in list(mine) if name.startswith("experts.")}
        if experts:
            mine |= {"gate_up": None, "down": None, "experts": moe.Experts(**experts)}
        layers.append(Layer(**mine))
    return TargetParams(
        embed=arrays["embed",],
        layers=tuple(layers),
        final_norm=arrays["final_norm",],
        head=arrays.get(("head",)),
        logit_cap=config.logit_cap,
    )


def _by(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _list(items: list[str], most: int = 100) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
