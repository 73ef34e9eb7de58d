"""Tensors of safetensors files to arrays on the device, one weight at a time.

At no time is more held than the weights made so far and the one in the making.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping

import jax
import ml_dtypes
import numpy as np
from jax import Array

from jspec.errors import JspecError
from jspec.target.plan import Part, Place, Plan, Weight
from jspec.target.shards import Tensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)

# Values read and converted at a time: they stay in the cache of one core.
CHUNK = 1 << 17
ALIGN = 64  # bytes; XLA's CPU backend takes over a NumPy array so aligned instead of copying it


def convert(plan: Plan, tensors: Mapping[str, Tensor], dtype: np.dtype) -> dict[Place, Array]:
    """Every weight of a plan, on the default device.

    Raises:
      JspecError: a weight is not a finite number in the dtype it is kept in, or a file cannot be read.
    """
    try:
        return {place: _weight(w, tensors, FLOAT32 if w.exact else dtype) for place, w in plan.items()}
    except OSError as error:
        raise JspecError(
            f"a weight file cannot be read any more ({error.strerror or error}).",
            "files that stay as they are while they are read.",
            "try again.",
        ) from None


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with open(a.file, "rb") as f, open(b.file, "rb") as g:
        f.seek(a.offset)
        g.seek(b.offset)
        left = a.nbytes
        while left:
            size = min(left, 1 << 20)
            if f.read(size) != g.read(size):
                return False
            left -= size
    return True


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array whose first byte lies on a multiple of `ALIGN`."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _weight(weight: Weight, tensors: Mapping[str, Tensor], dtype: np.dtype) -> Array:
    made = aligned(weight.shape, dtype)
    flat, at = made.reshape(-1), 0
    for part in weight.parts:
        count = math.prod(part.shape)
        _fill(flat[at : at + count], tensors[part.name], part)
        at += count
    # Waiting lets the NumPy copy go, where there is one, before the next weight is made.
    return jax.device_put(made).block_until_ready()


def _fill(out: np.ndarray, tensor: Tensor, part: Part) -> None:
    """Reads one tensor into `out`, flat, chunk by chunk."""
    stored = {"F32": FLOAT32, "BF16": BFLOAT16, "F16": np.dtype(np.float16)}[tensor.dtype]
    room = np.empty(min(CHUNK, out.size), stored)
    with open(tensor.file, "rb", buffering=0) as file:
        file.seek(tensor.offset)
        for start in range(0, out.size, CHUNK):
            rows = out[start : start + CHUNK]
            as_it_is = stored == out.dtype and not part.plus
            chunk = rows if as_it_is else room[: rows.size]
            _read_exactly(file, chunk, tensor)
            if not as_it_is:
                with np.errstate(over="ignore"):  # told below, by name
                    wide = chunk.astype(np.float32)
                    rows[...] = wide + np.float32(part.plus) if part.plus else wide
            if not _finite(rows):
                raise JspecError(
                    f"`{tensor.file.name}` has a weight in `{part.name}` that is not a finite `{out.dtype}`.",
                    "finite weights.",
                    "get the file again; it may be damaged.",
                )


def _read_exactly(file: io.FileIO, into: np.ndarray, tensor: Tensor) -> None:
    view = into.view(np.uint8).data
    while len(view):
        count = file.readinto(view)
        if not count:
            raise OSError(None, f"{tensor.file.name} ends inside {tensor.name}")
        view = view[count:]


def _finite(x: np.ndarray) -> bool:
    """Whether no value is infinite or not a number, judged by the exponent's bits, which is fast in any dtype."""
    if x.dtype == BFLOAT16:
        return bool(((x.view(np.uint16) & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(x).all())
