"""Static checks on lowered and compiled programs: what a CPU-only machine gets wrong silently on TPU and GPU.

Each takes a program's text and returns what it found, as lines; an empty list is a pass. They read
StableHLO (`lowered.as_text()`), the HLO made of it (`lowered.as_text("hlo")`), or optimised HLO
(`compiled.as_text()`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

import jax

MIB = 1 << 20
_SIZES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_MADE = re.compile(r"^\s*(?:ROOT )?(%?[\w.-]+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")
_DOT = re.compile(r"stablehlo\.dot_general .*?: \(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\)")
_VALUE = re.compile(r"^\s*(%\w+)(?::\d+)? = \"?(?:stablehlo\.|chlo\.|func\.)?(\w+)")
_NARROWED = re.compile(r"stablehlo\.convert .*: \(tensor<[\dx]*f32>\) -> tensor<[\dx]*(?:bf16|f16)>")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)>")
_KERNEL = re.compile(r"custom_call @(tpu_custom_call|mosaic_gpu_v2)\(")

# Operations that hand a rounded number on as it is, and those that must have it in its narrow type.
_MOVES = {
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "slice",
    "dynamic_slice",
    "concatenate",
    "pad",
    "select",
    "gather",
}
_KEEP = {"dot_general", "custom_call", "dynamic_update_slice", "scatter", "bitcast_convert"}

SUBLANES = 8  # rows of a TPU's tile of 32-bit numbers, and of the least tile of a GPU's matrix unit
# Rows that the kernels' own products want, by dtype of an operand.
_KERNEL_ROWS = {"tpu_custom_call": {"f32": 8, "bf16": 16}, "mosaic_gpu_v2": {"f32": 64, "bf16": 64}}
# What XLA's GPU compiler chooses by timing: library calls, and the tiles of its own products.
_TIMED = re.compile(r'custom_call_target="__cu(?:blas|dnn)[^"]*"|"kind":"__triton_(?:nested_)?gemm[^"]*"')


def _made(hlo: str) -> list[tuple[str, str, list[int], int, str]]:
    """Name, operation, sizes, bytes and line of every array that an instruction makes."""
    found = []
    for line in hlo.splitlines():
        match = _MADE.match(line)
        if match:
            name, dtype, dims, operation = match.groups()
            sizes = [int(d) for d in dims.split(",") if d]
            found.append((name, operation, sizes, math.prod(sizes) * _SIZES.get(dtype, 1), line.strip()))
    return found


def inexact_dots(stablehlo: str) -> list[str]:
    """Products of float32 operands without HIGHEST: a TPU runs them in one bfloat16 pass, a GPU in TF32."""
    lines = [line.strip() for line in stablehlo.splitlines() if "stablehlo.dot_general" in line]
    return [
        line
        for line in lines
        if (m := _DOT.search(line)) and m.groups() == ("f32", "f32") and "[HIGHEST, HIGHEST]" not in line
    ]


def large_copies(hlo: str, of: Collection[int] = (), most: int = MIB) -> list[str]:
    """Copies and transposes of more than `most` bytes: of weights or of the cache, every round.

    Args:
      of: numbers of elements, those of the arrays that must not be copied; empty for any array.
    """
    copies = ("copy", "transpose", "copy-start")
    return [
        f"{size / MIB:.1f} MiB: {line[:160]}"
        for _, op, sizes, size, line in _made(hlo)
        if op in copies and size > most and (not of or math.prod(sizes) in of)
    ]


def scatters(hlo: str, elements: int) -> list[str]:
    """Scatters into arrays of as many elements as a layer's cache: its update is no longer that of a slice.

    Before a compiler makes a loop of them, as that of a TPU does, which then still updates the cache in place.
    """
    return [line[:160] for _, op, sizes, _, line in _made(hlo) if op == "scatter" and math.prod(sizes) == elements]


def sorts(hlo: str, vocabulary: int) -> list[str]:
    """Sorts over an axis as long as the vocabulary."""
    lines = [line.strip() for line in hlo.splitlines() if re.search(r" sort\(", line)]
    return [
        line[:160]
        for line in lines
        if any(int(d) >= vocabulary for d in re.findall(r"\d+", " ".join(re.findall(r"\[([\d,]*)\]", line))))
    ]


def missing_donation(compiled: Any, cache_bytes: int) -> list[str]:
    """Whether fewer bytes are updated in place than the cache has."""
    aliased = compiled.memory_analysis().alias_size_in_bytes
    return [] if aliased >= cache_bytes else [f"{aliased:,} bytes in place, and the cache has {cache_bytes:,}"]


def droppable_roundings(stablehlo: str) -> list[str]:
    """Readings of a float32 that was rounded to a narrow type, by an operation that computes with it.

    XLA may leave such a rounding out (`xla_allow_excess_precision`, on by default), and does so on a GPU:
    what is meant as a rounding must be written as one, `lax.reduce_precision`. Products, stores and kernels
    take their operands in the narrow type, so nothing can be left out before them.
    """
    bodies = [part.splitlines() for part in stablehlo.split("func.func ")[1:]]
    taken: set[tuple[str, int]] = set()  # arguments of functions that are handed a rounded number
    returned: set[str] = set()  # functions that return one
    while True:
        known = len(taken) + len(returned)
        found = [line for body in bodies for line in _read_again(body, taken, returned)]
        if len(taken) + len(returned) == known:
            return found


def _read_again(body: list[str], taken: set[tuple[str, int]], returned: set[str]) -> list[str]:
    """Those of one function; adds to what is known of the functions that it calls, and of itself."""
    found: list[str] = []
    me = re.search(r"@(\w+)", body[0])
    narrowed = {f"%arg{i}" for name, i in taken if me and name == me[1]}
    for line in body[1:]:
        match = _VALUE.match(line)
        if match is None:
            if me and re.match(r"    return ", line) and narrowed & set(re.findall(r"%\w+", line)):
                returned.add(me[1])
            continue
        name, operation = match.groups()
        rest = line[match.end() :]
        if operation == "while":  # what it carries has another name inside
            for inner, outer in re.findall(r"(%\w+) = (%\w+)", rest):
                (narrowed.add if outer in narrowed else narrowed.discard)(inner)
            continue
        narrowed.discard(name)  # names of inner regions come again
        operands = re.findall(r"%\w+", rest)
        if _NARROWED.search(line):
            narrowed.add(name)
        elif operation == "call":
            callee = re.findall(r"@(\w+)", rest)[0]
            taken |= {(callee, i) for i, operand in enumerate(operands) if operand in narrowed}
            narrowed |= {name} if callee in returned else set()
        elif narrowed.isdisjoint(operands) or operation in _KEEP:
            pass
        elif operation in _MOVES:
            narrowed.add(name)
        else:
            found.append(line.strip()[:160])
    return found


def unpadded_rows(stablehlo: str) -> list[str]:
    """Products whose rows are not what the matrix unit wants: of weights, and of the kernels.

    The rows of a product with a weight are the shorter axis of its result; the kernels' are the last but one
    of the arrays that are shaped as their result.
    """
    found = []
    for line in stablehlo.splitlines():
        types = [([int(d) for d in sizes.split("x")[:-1]], dtype) for sizes, dtype in _TENSOR.findall(line)]
        kernel = _KERNEL.search(line)
        if kernel:
            shape, wanted = types[-1][0], _KERNEL_ROWS[kernel[1]]
            like = [(sizes, dtype) for sizes, dtype in types if len(sizes) == 4 and sizes == shape]
            if any(sizes[-2] % wanted.get(dtype, 1) for sizes, dtype in like):
                found.append(f"{kernel[1]} of {shape[-2]} rows")
        elif "stablehlo.dot_general" in line and len(types[-1][0]) == 2 and min(types[-1][0]) % SUBLANES:
            found.append(f"{min(types[-1][0])} rows: {line.strip()[:160]}")
    return found


def unkept_tuning(hlo: str, kept: bool) -> list[str]:
    """Programs that a GPU's compiler chose by timing, where the next process would choose anew.

    Args:
      kept: whether the choices go to disk (`jspec.engine.tuning.store`).
    """
    return [] if kept else [match[0] for match in map(_TIMED.search, hlo.splitlines()) if match]


def check(
    lowered: Any, compiled: Any, *, cache_bytes: int, layer_elements: int, vocabulary: int, kept: bool
) -> dict[str, list[str]]:
    """All of them on one program; copies are those of arguments, weights and cache among them."""
    source, before, hlo = lowered.as_text(), lowered.as_text("hlo"), compiled.as_text()
    arguments = {math.prod(x.shape) for x in jax.tree.leaves(compiled.in_avals)}
    return {
        "inexact_dots": inexact_dots(source),
        "droppable_roundings": droppable_roundings(source),
        "unpadded_rows": unpadded_rows(source),
        "large_copies": large_copies(hlo, arguments),
        "scatters": scatters(before, layer_elements),
        "sorts": sorts(before, vocabulary) + sorts(hlo, vocabulary),
        "missing_donation": missing_donation(compiled, cache_bytes),
        "unkept_tuning": unkept_tuning(hlo, kept),
    }
