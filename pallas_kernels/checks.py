"""Static checks on lowered and compiled programs: what a CPU-only machine gets wrong silently on TPU and GPU.

Each takes a program's text and returns what it found, as lines; an empty list is a pass. They read
StableHLO (`lowered.as_text()`) or optimised HLO (`compiled.as_text()`).
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
    """Scatters into arrays of as many elements as a layer's cache: its update is no longer that of a slice."""
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


def check(
    lowered: Any, compiled: Any, *, cache_bytes: int, layer_elements: int, vocabulary: int
) -> dict[str, list[str]]:
    """All of them on one program; copies are those of arguments, weights and cache among them."""
    hlo = compiled.as_text()
    arguments = {math.prod(x.shape) for x in jax.tree.leaves(compiled.in_avals)}
    return {
        "inexact_dots": inexact_dots(lowered.as_text()),
        "large_copies": large_copies(hlo, arguments),
        "scatters": scatters(hlo, layer_elements),
        "sorts": sorts(hlo, vocabulary),
        "missing_donation": missing_donation(compiled, cache_bytes),
    }
