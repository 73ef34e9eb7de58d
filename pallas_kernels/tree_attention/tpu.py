"""The TPU kernel (Mosaic): one pass over the key blocks of a slot and key/value head.

    grid (R, G, key blocks up to the longest slot), the last axis in order

A step holds one key block of keys and values and the rows of all query heads of the group. Index maps
clamp to the slot's first and last block in use: a block outside is neither copied nor computed. The
order of the additions is that of the columns, whatever `start` is; the online softmax is that of
Milakov and Gimelshein (2018), with the rule that a fully masked block changes no bit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention.api import Rows
from pallas_kernels.tree_attention.shapes import Shape, round_up

MASKED = -1e30  # finite: exp(MASKED - MASKED) is 1 and is masked again, where infinities would give NaN
LANES = 128
SUBLANES = {"float32": 8, "bfloat16": 16}  # rows of one tile
VMEM = 12 << 20  # bytes a step may hold, of the 16 MiB that the smallest chip grants a kernel


def refuses(shape: Shape) -> str | None:
    """The reason why this kernel cannot compute a shape, or None."""
    if shape.dtype not in SUBLANES:
        return f"a cache of {shape.dtype}, and the kernel reads float32 and bfloat16"
    if shape.rows > 128:
        return f"{shape.rows} rows, and the kernel's most is 128"
    if shape.key_block % SUBLANES[shape.dtype]:
        return f"key blocks of {shape.key_block}, and {shape.dtype} needs a multiple of {SUBLANES[shape.dtype]}"
    need = step_bytes(shape)
    if need > VMEM:
        return f"a step of {need / 2**20:.1f} MiB, and {VMEM >> 20} MiB are safe: fewer rows or a smaller key block"
    return None


def step_bytes(shape: Shape) -> int:
    """An estimate of the VMEM one step needs: what is copied twice (the next step's comes in), sums and scores."""
    size = 4 if shape.dtype == "float32" else 2
    fold = round_up(shape.fold, SUBLANES[shape.dtype])
    width, block = round_up(shape.width, LANES), round_up(shape.key_block, LANES)
    copied = 2 * shape.key_block * width * size + fold * width * (size + 4) + 2 * fold * LANES * 4
    return 2 * copied + fold * (width + 2 * LANES) * 4 + 2 * fold * block * 4


def attend(
    q: Array,
    keys: Array,
    values: Array,
    rows: Rows,
    *,
    key_block: int,
    scale: float,
    cap: float | None,
    interpret: Any = False,
) -> Array:
    """See `api.attend`. Columns that no row reads may hold anything.

    Args:
      interpret: False on a TPU; True or `pltpu.InterpretParams` elsewhere.
    """
    slots, count, heads, width = q.shape
    groups, capacity = keys.shape[1:3]
    heads_each = heads // groups
    fold = heads_each * count
    held = round_up(fold, SUBLANES[str(keys.dtype)])
    q = (q * jnp.float32(scale)).reshape(slots, count, groups, heads_each, width)
    q = q.transpose(0, 2, 3, 1, 4).reshape(slots, groups, fold, width).astype(keys.dtype)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, held - fold), (0, 0)))

    def folded(x: Array) -> Array:  # [R, N, n] per row to [R, held, n] per folded row
        return jnp.pad(jnp.tile(x, (1, heads_each, 1)), ((0, 0), (0, held - fold), (0, 0)))

    bits = folded(lax.bitcast_convert_type(rows.ancestors, jnp.int32))
    end = rows.start + count
    first = jnp.zeros_like(rows.start)
    windowed = rows.window is not None and rows.positions is not None
    row_block = (None, held, bits.shape[2])
    operands = [q, bits]
    specs = [
        pl.BlockSpec((None, None, held, width), lambda r, g, j, *_: (r, g, 0, 0)),
        pl.BlockSpec(row_block, lambda r, g, j, *_: (r, 0, 0)),
    ]

    def block_of(r: Array, j: Array, start: Array, first: Array) -> Array:
        return jnp.clip(j, first[r] // key_block, (start[r] + (count - 1)) // key_block)

    if windowed:
        # A token never stands in a column before its position.
        first = jnp.maximum(jnp.min(rows.positions, axis=1) - (rows.window - 1), 0)
        column = jnp.arange(capacity, dtype=jnp.int32)
        at = jax.vmap(lambda p, s: lax.dynamic_update_slice(column, p, (s,)))(rows.positions, rows.start)
        operands += [folded(rows.positions[:, :, None]), at.reshape(slots, capacity // key_block, 1, key_block)]
        specs += [
            pl.BlockSpec((None, held, 1), lambda r, g, j, *_: (r, 0, 0)),
            pl.BlockSpec(
                (None, None, 1, key_block), lambda r, g, j, slot, start, first: (r, block_of(r, j, start, first), 0, 0)
            ),
        ]
    cached = pl.BlockSpec(
        (None, None, key_block, width),
        lambda r, g, j, slot, start, first: (slot[0] + r, g, block_of(r, j, start, first), 0),
    )
    call = pl.pallas_call(
        functools.partial(_kernel, key_block=key_block, count=count, cap=cap, window=rows.window if windowed else None),
        out_shape=jax.ShapeDtypeStruct((slots, groups, held, width), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            # The longest slot decides how far the grid goes: the rest of the cache costs not even empty steps.
            grid=(slots, groups, (jnp.max(end) + (key_block - 1)) // key_block),
            in_specs=[*specs, cached, cached],
            out_specs=pl.BlockSpec((None, None, held, width), lambda r, g, j, *_: (r, g, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((held, LANES), jnp.float32),
                pltpu.VMEM((held, LANES), jnp.float32),
                pltpu.VMEM((held, width), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * slots * heads * count * width * capacity,
            bytes_accessed=2 * slots * groups * capacity * width * keys.dtype.itemsize,
            transcendentals=slots * heads * count * capacity,
        ),
        name="tree_attention",
        interpret=interpret,
    )
    out = call(rows.slot.reshape(1), rows.start, first, *operands, keys, values)
    out = out[:, :, :fold].reshape(slots, groups, heads_each, count, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(slots, count, heads * width)


def _kernel(slot, start, first, q, bits, *refs, key_block, count, cap, window):  # type: ignore[no-untyped-def]
    """One step: key block j of a slot and key/value head, against all rows of the group."""
    positions, at = refs[:2] if window is not None else (None, None)
    keys, values, out, top, total, added = refs[-6:]
    r, j = pl.program_id(0), pl.program_id(2)
    begin, low = start[r], first[r]
    end = begin + count
    last = (end - 1) // key_block

    @pl.when(j == 0)
    def _clear() -> None:
        top[...] = jnp.full(top.shape, MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        added[...] = jnp.zeros(added.shape, jnp.float32)

    @pl.when((j >= low // key_block) & (j <= last))
    def _add() -> None:
        precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
        scores = lax.dot_general(
            q[...], keys[...], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        if cap is not None:
            scores = jnp.float32(cap) * jnp.tanh(scores / jnp.float32(cap))
        offset = j * key_block + lax.broadcasted_iota(jnp.int32, scores.shape, 1) - begin
        word = jnp.zeros(scores.shape, jnp.int32)
        for w in range(bits.shape[1]):
            word = jnp.where((offset >> 5) == w, bits[:, w : w + 1], word)
        own = (lax.shift_right_logical(word, offset & 31) & 1) == 1
        seen = (offset < 0) | ((offset < count) & own)
        if window is not None:
            seen = seen & (at[...] > positions[...] - window)
        scores = jnp.where(seen, scores, jnp.float32(MASKED))
        old = top[:, :1]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        shrink = jnp.exp(old - new)
        weight = jnp.where(seen, jnp.exp(scores - new), jnp.float32(0))
        # A weight of 0 does not silence a NaN: columns behind the block are read as 0.
        column = j * key_block + lax.broadcasted_iota(jnp.int32, (key_block, 1), 0)
        v = jnp.where(column < end, values[...].astype(jnp.float32), jnp.float32(0)).astype(values.dtype)
        product = lax.dot_general(
            weight.astype(v.dtype),
            v,
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        top[...] = jnp.broadcast_to(new, top.shape)
        total[...] = total[...] * shrink + jnp.sum(weight, axis=1, keepdims=True)
        added[...] = added[...] * shrink + product

    @pl.when(j == last)
    def _finish() -> None:
        # Rows of padding in an empty slot have seen nothing.
        sums = total[:, :1]
        out[...] = added[...] / jnp.where(sums == 0, jnp.float32(1), sums)
