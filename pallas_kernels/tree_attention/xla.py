"""The path of every platform: `jspec.target.attention.read`, which the compiler makes a program of."""

from __future__ import annotations

from jax import Array

from jspec.target import attention
from jspec.target.cache import pack, storage_dtype
from pallas_kernels.tree_attention.api import Rows
from pallas_kernels.tree_attention.shapes import Shape


def refuses(shape: Shape) -> str | None:
    """Computes every shape."""
    return None


def attend(
    q: Array, keys: Array, values: Array, rows: Rows, *, key_block: int, scale: float, cap: float | None
) -> Array:
    """See `api.attend`. Columns that no row reads must hold numbers, as a cache's do."""
    columns = attention.columns(rows.slot, rows.start, rows.ancestors, keys.shape[2], key_block)
    if rows.window is not None and rows.positions is not None:
        columns = attention.windowed(columns, rows.positions, rows.window)
    held = storage_dtype(keys.dtype)
    return attention.read(q, pack(keys, held), pack(values, held), columns, scale=scale, cap=cap)
