"""The GPU kernel (Mosaic GPU, Hopper): one warpgroup for 64 rows of a slot and key/value head.

    grid (R, G, row tiles); in each, key blocks from the slot's first in use to its last, in order

Rows of all query heads of a group are folded together and padded to the 64 that a warpgroup's product
has. Key blocks arrive by TMA in two buffers, the next one while this one is computed. The additions have
the order of the columns, whatever `start` is.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.tree_attention.api import Rows
from pallas_kernels.tree_attention.shapes import Shape, round_up

MASKED = -1e30  # finite, as in the TPU kernel
TILE = 64  # rows of a warpgroup's product
SHARED = 227 << 10  # bytes of shared memory that a block may have
BUFFERS = 2


def refuses(shape: Shape) -> str | None:
    """The reason why this kernel cannot compute a shape, or None."""
    try:
        import jax.experimental.pallas.mosaic_gpu  # noqa: F401
    except ImportError as e:
        return f"Mosaic GPU cannot be imported ({e}): install absl-py"
    if shape.dtype != "bfloat16":
        return f"a cache of {shape.dtype}, and the matrix unit reads bfloat16 (float32 would be TF32)"
    if shape.rows > 128:
        return f"{shape.rows} rows, and the kernel's most is 128"
    if shape.width % 16 or shape.width > 256:
        return f"heads of {shape.width}, and the kernel reads multiples of 16 up to 256"
    if shape.key_block not in (64, 128):
        return f"key blocks of {shape.key_block}, and the kernel reads 64 or 128"
    need = shared_bytes(shape)
    if need > SHARED:
        return f"{need >> 10} KiB of shared memory, and a block has {SHARED >> 10}: halve the key block"
    return None


def shared_bytes(shape: Shape) -> int:
    """Shared memory of a block: queries, two buffers of keys and values, the result."""
    return TILE * shape.width * (2 + 4) + BUFFERS * 2 * shape.key_block * shape.width * 2 + 1024


def attend(
    q: Array,
    keys: Array,
    values: Array,
    rows: Rows,
    *,
    key_block: int,
    scale: float,
    cap: float | None,
    interpret: Any = None,
) -> Array:
    """See `api.attend`. Columns that no row reads must hold numbers, as a cache's do."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    slots, count, heads, width = q.shape
    groups, capacity = keys.shape[1:3]
    heads_each = heads // groups
    fold = heads_each * count
    held = round_up(fold, TILE)
    q = (q * jnp.float32(scale)).reshape(slots, count, groups, heads_each, width)
    q = q.transpose(0, 2, 3, 1, 4).reshape(slots, groups, fold, width).astype(keys.dtype)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, held - fold), (0, 0)))

    def folded(x: Array) -> Array:  # [R, n, N] per row to [R, n, held] per folded row
        return jnp.pad(jnp.tile(x, (1, 1, heads_each)), ((0, 0), (0, 0), (0, held - fold)))

    words = rows.ancestors.shape[2]
    per_row = [folded(lax.bitcast_convert_type(rows.ancestors, jnp.int32).transpose(0, 2, 1))]
    per_column = []
    first = jnp.zeros_like(rows.start)
    windowed = rows.window is not None and rows.positions is not None
    if windowed:
        first = jnp.maximum(jnp.min(rows.positions, axis=1) - (rows.window - 1), 0)
        column = jnp.arange(capacity, dtype=jnp.int32)
        per_column.append(jax.vmap(lambda p, s: lax.dynamic_update_slice(column, p, (s,)))(rows.positions, rows.start))
        per_row.append(folded(rows.positions[:, None] - rows.window))
    last = (rows.start + (count - 1)) // key_block
    slot = jnp.broadcast_to(rows.slot, (slots,)) + jnp.arange(slots, dtype=jnp.int32)
    span = jnp.stack([slot, first // key_block, last + 1, rows.start], axis=1)

    swizzle = plgpu.find_swizzle(width * 16)
    tiled = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    run = plgpu.kernel(
        functools.partial(
            _kernel,
            plgpu=plgpu,
            shape=(width, key_block, words, count),
            cap=cap,
            windowed=windowed,
            interpreted=interpret is not None,
        ),
        out_type=jax.ShapeDtypeStruct((slots, groups, held, width), jnp.float32),
        scratch_types=[
            plgpu.SMEM((TILE, width), keys.dtype, transforms=tiled),
            plgpu.SMEM((BUFFERS, key_block, width), keys.dtype, transforms=tiled),
            plgpu.SMEM((BUFFERS, key_block, width), keys.dtype, transforms=tiled),
            plgpu.SMEM((TILE, width), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=BUFFERS),
            plgpu.Barrier(num_barriers=BUFFERS),
        ],
        grid=(slots, groups, held // TILE),
        grid_names=("slot", "group", "tile"),
        compiler_params=plgpu.CompilerParams(approx_math=False),
        interpret=interpret,
    )
    out = run(span, q, keys, values, *per_row, *per_column)
    out = out[:, :, :fold].reshape(slots, groups, heads_each, count, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(slots, count, heads * width)


def _kernel(span, q, keys, values, *refs, plgpu, shape, cap, windowed, interpreted):  # type: ignore[no-untyped-def]
    """One tile of rows of a slot and key/value head."""
    width, block, words, count = shape
    bits, lowest, at = refs[:3] if windowed else (refs[0], None, None)
    out, q_held, k_held, v_held, out_held, q_came, k_came, v_came = refs[-8:]
    r, g, tile = (lax.axis_index(name) for name in ("slot", "group", "tile"))
    slot, begin, end, start = (span[r, i] for i in range(4))
    row_layout, column_layout = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    here = pl.ds(tile * TILE, TILE)

    def fetch(j):  # type: ignore[no-untyped-def]
        buffer, part = lax.rem(j, jnp.int32(BUFFERS)), pl.ds(j * block, block)
        plgpu.copy_gmem_to_smem(keys.at[slot, g, part], k_held.at[buffer], k_came.at[buffer])
        plgpu.copy_gmem_to_smem(values.at[slot, g, part], v_held.at[buffer], v_came.at[buffer])

    def laid(x, layout):  # type: ignore[no-untyped-def]
        # The interpreter of JAX 0.10 knows neither layouts nor `load`.
        return x if interpreted else plgpu.layout_cast(x, layout)

    columns = laid(lax.broadcasted_iota(jnp.int32, (TILE, block), 1), plgpu.Layout.WGMMA)

    def spread(ref, layout, axis):  # type: ignore[no-untyped-def]
        x = ref[...] if interpreted else plgpu.load(ref, (), layout=layout, optimized=False)
        return lax.broadcast_in_dim(x, (TILE, block), [axis])

    def rowwise(ref, i):  # type: ignore[no-untyped-def]
        return spread(ref.at[r, i, here], row_layout, 0)

    def product(left, held, buffer, sums, *, transposed=False):  # type: ignore[no-untyped-def]
        # The interpreter's `wgmma` reads no transposed operand: there, a product of what is in shared memory.
        if interpreted:
            axes = (((1,), (1 if transposed else 0,)), ((), ()))
            return sums + lax.dot_general(left[...], held[buffer], axes, preferred_element_type=jnp.float32)
        right = plgpu.transpose_ref(held.at[buffer], (1, 0)) if transposed else held.at[buffer]
        return pl.run_state(lambda into: plgpu.wgmma(into, left, right))(plgpu.ACC.init(sums))

    def zeros(wide):  # type: ignore[no-untyped-def]
        return laid(jnp.full((TILE, wide), 0, jnp.float32), plgpu.Layout.WGMMA)

    plgpu.copy_gmem_to_smem(q.at[r, g, here], q_held, q_came)
    fetch(begin)
    plgpu.barrier_wait(q_came)
    own = [rowwise(bits, w) for w in range(words)]
    low = rowwise(lowest, 0) if windowed else None

    def step(j, carry):  # type: ignore[no-untyped-def]
        top, total, added = carry
        buffer = lax.rem(j, jnp.int32(BUFFERS))

        @pl.when(j + 1 < end)
        def _next():  # type: ignore[no-untyped-def]
            fetch(j + 1)

        plgpu.barrier_wait(k_came.at[buffer])

        scores = product(q_held, k_held, buffer, zeros(block), transposed=True)
        if cap is not None:
            scores = jnp.tanh(scores / jnp.float32(cap)) * jnp.float32(cap)
        offset = columns + (j * block - start)
        word = own[0]
        for w in range(1, words):
            word = jnp.where(offset >= 32 * w, own[w], word)
        mine = (lax.shift_right_logical(word, offset & 31) & 1) == 1
        seen = (offset < 0) | ((offset < count) & mine)
        if windowed:
            seen = seen & (spread(at.at[r, pl.ds(j * block, block)], column_layout, 1) > low)
        scores = jnp.where(seen, scores, jnp.float32(MASKED))
        new = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp(top - new)
        weight = jnp.exp(scores - lax.broadcast_in_dim(new, scores.shape, [0]))
        weight = jnp.where(seen, weight, jnp.float32(0))
        total = total * shrink + weight.sum(axis=1)
        added = added * lax.broadcast_in_dim(shrink, added.shape, [0])
        half = weight.astype(q_held.dtype)
        plgpu.barrier_wait(v_came.at[buffer])

        return new, total, product(half, v_held, buffer, added)

    carry = (
        laid(jnp.full((TILE,), MASKED, jnp.float32), row_layout),
        laid(jnp.full((TILE,), 0, jnp.float32), row_layout),
        zeros(width),
    )
    _, total, added = lax.fori_loop(begin, end, step, carry)
    # Rows of padding in an empty slot have seen nothing.
    total = jnp.where(total == 0, jnp.float32(1), total)
    out_held[...] = added / lax.broadcast_in_dim(total, added.shape, [0])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_held, out.at[r, g, here])
    plgpu.wait_smem_to_gmem(0)
