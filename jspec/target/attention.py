"""Grouped-query attention over the cache, on an absolute grid of key blocks.

The rule that makes speculation change no bit (docs/exactness.md): the rows of a block are written
into the cache first, and keys are then read from the cache only, in key blocks of fixed size at
absolute columns, summed in ascending order. "Cached" and "in flight" keys are never two sums: the
split between them depends on how many tokens earlier rounds accepted, and with it the order of the
additions.

    columns      0 ........ start-1 | start .. start+N-1 | rest
    a row reads  all                | its ancestors      | none

A row of a windowed layer reads, of these, the tokens at its last `window` positions (`windowed`).
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import Array, lax

from jspec.target.cache import pack, unpack
from jspec.target.primitives import capped
from pallas_kernels.tree_attention import api as kernels

MASKED = -1e30  # finite: a row whose block is fully masked must not produce exp(nan)


class Columns(flax.struct.PyTreeNode):
    """Where `R` slots of `N` rows are written, and what each row may read."""

    slot: Array  # [] int32: row block r belongs to slot `slot + r`
    start: Array  # [R] int32: column of row 0
    visible: Array  # [R, N, S] bool
    used: Array  # [] int32: no row sees a column at or beyond this one
    key_block: int = flax.struct.field(pytree_node=False)  # divides S
    first: Array | None = None  # [] int32: no row sees a column before this one; None is 0
    # The same facts as a kernel takes them, and the implementation that reads; `xla` is the one below.
    rows: kernels.Rows | None = None
    kernel: str = flax.struct.field(pytree_node=False, default="xla")


def columns(slot: Array, start: Array, ancestors: Array, capacity: int, key_block: int, kernel: str = "xla") -> Columns:
    """Builds `Columns` from packed ancestor bits.

    Args:
      slot: `[]` int32, the first slot.
      start: `[R]` int32.
      ancestors: `[R, N, W]` uint32, bit u of row j set iff row j reads row u (`decoding/tree.py`).
      capacity: S.
      key_block: columns per key block; divides S.
      kernel: the implementation that reads (`pallas_kernels.tree_attention.api`).
    """
    rows = ancestors.shape[1]
    offset = lax.broadcasted_iota(jnp.int32, (1, 1, capacity), 2) - start[:, None, None]  # [R, 1, S]
    bits = jnp.zeros((*ancestors.shape[:2], capacity), jnp.uint32)
    for word in range(ancestors.shape[2]):
        bits = jnp.where((offset >> 5) == word, ancestors[:, :, word, None], bits)
    in_block = (bits >> (offset & 31).astype(jnp.uint32)) & jnp.uint32(1)
    visible = (offset < 0) | ((offset < rows) & (in_block == 1))
    return Columns(
        slot=slot,
        start=start,
        visible=visible,
        used=jnp.max(start) + rows,
        key_block=key_block,
        rows=kernels.Rows(slot=slot, start=start, ancestors=ancestors),
        kernel=kernel,
    )


def windowed(columns: Columns, positions: Array, window: int) -> Columns:
    """The same rows, each seeing only the tokens at its last `window` positions, its own included.

    Distance is counted in positions of the text, not in columns: the token in column c before the
    block has position c, one in the block has the position of its row, which siblings of a tree
    share. For window 3 and a tree 0-(1, 2-(3)) written at columns 8 .. 11:

        column         5 6 7 | 8 9 10 11
        position       5 6 7 | 8 9  9 10
        row 3 reads    . . . | 1 .  1  1     positions 8, 9, 10 of its own path

    Args:
      columns: from `columns`.
      positions: `[R, N]` int32, of the rows.
    """
    rows, capacity = columns.visible.shape[1:]
    column = lax.broadcasted_iota(jnp.int32, (1, capacity), 1)
    offset = column - columns.start[:, None]  # [R, S]
    in_block = jnp.take_along_axis(positions, jnp.clip(offset, 0, rows - 1), axis=1)
    at = jnp.where((offset >= 0) & (offset < rows), in_block, column)
    near = at[:, None, :] > positions[:, :, None] - window
    # A token never stands in a column before its position.
    first = jnp.maximum(jnp.min(positions) - (window - 1), 0)
    seen = None if columns.rows is None else columns.rows.replace(positions=positions, window=window)
    return columns.replace(visible=columns.visible & near, first=first, rows=seen)


def write(cache: Array, rows: Array, columns: Columns) -> Array:
    """Writes `rows [R, N, G, hd]` into `cache [B, G, S, hd]` at each slot's `start`.

    One `dynamic_update_slice` a slot, which stays in place; a batched scatter would not. The caller
    keeps `start + N <= S`: the update clamps its start silently and would shift the block.
    """
    update = pack(rows.transpose(0, 2, 1, 3), cache.dtype)
    zero = jnp.int32(0)

    def put(r: Array | int, cache: Array) -> Array:
        row = lax.dynamic_slice_in_dim(update, r, 1, axis=0)
        return lax.dynamic_update_slice(cache, row, (columns.slot + r, zero, columns.start[r], zero))

    def unrolled(cache: Array) -> Array:
        for r in range(rows.shape[0]):
            cache = put(r, cache)
        return cache

    if rows.shape[0] == 1:
        return put(jnp.int32(0), cache)
    # A loop rather than unrolled updates: the same speed, and a fifth of the compile time at 32 slots.
    # Not on a TPU, whose compiler (libtpu 0.0.42) takes the loop for one that rewrites the whole cache
    # and stops with an internal error.
    return lax.platform_dependent(
        cache,
        tpu=unrolled,
        default=lambda cache: lax.fori_loop(jnp.int32(0), rows.shape[0], put, cache),
    )


def read(
    q: Array, keys: Array, values: Array, columns: Columns, *, scale: float | None = None, cap: float | None = None
) -> Array:
    """Attends from `q [R, N, H, hd]` float32 to the cache; returns `[R, N, H * hd]` float32.

    Online softmax over the key blocks from the first to the last that any row of the call uses. A
    block in which a row sees nothing leaves that row's sums bit for bit as they were (factor exp(0) = 1,
    addend 0; before its first key all are zero and stay so), so the trip count, which depends on the
    batch, changes no bit.

    Args:
      scale: of the scores, `hd ** -0.5` if left out.
      cap: scores are bent into -cap .. cap.
    """
    if columns.kernel != "xla" and columns.rows is not None:
        keys, values = unpack(keys), unpack(values)
        return kernels.attend(
            columns.kernel, q, keys, values, columns.rows, key_block=columns.key_block, scale=scale, cap=cap
        )
    slots, rows, heads, width = q.shape
    groups, held = keys.shape[1], keys.shape[3]  # `held`: hd, or words
    fold = heads // groups * rows
    dtype = jnp.bfloat16 if keys.dtype == jnp.uint32 else keys.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    # Query heads of one key/value head become rows: [R, G, (H/G) N, hd].
    q = (q * jnp.float32(width**-0.5 if scale is None else scale)).reshape(slots, rows, groups, heads // groups, width)
    q = q.transpose(0, 2, 3, 1, 4).reshape(slots, groups, fold, width).astype(dtype)
    batched = (((3,), (3,)), ((0, 1), (0, 1)))
    block = columns.key_block
    zero = jnp.int32(0)

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        corner = (columns.slot, zero, i * block, zero)
        k = unpack(lax.dynamic_slice(keys, corner, (slots, groups, block, held)))
        v = unpack(lax.dynamic_slice(values, corner, (slots, groups, block, held)))
        seen = lax.dynamic_slice(columns.visible, (zero, zero, i * block), (slots, rows, block))
        seen = jnp.tile(seen[:, None], (1, 1, heads // groups, 1))  # [R, 1, fold, block]
        scores = lax.dot_general(q, k, batched, precision=precision, preferred_element_type=jnp.float32)
        scores = capped(scores, cap)
        scores = jnp.where(seen, scores, jnp.float32(MASKED))
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        shrink = jnp.exp(top - new_top)
        weight = jnp.where(seen, jnp.exp(scores - new_top), jnp.float32(0))
        total = total * shrink + jnp.sum(weight, axis=-1, keepdims=True)
        added = lax.dot_general(
            weight.astype(dtype),
            v,
            (((3,), (2,)), ((0, 1), (0, 1))),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return new_top, total, out * shrink + added

    edge = (slots, groups, fold, 1)
    carry = (
        jnp.full(edge, MASKED, jnp.float32),
        jnp.zeros(edge, jnp.float32),
        jnp.zeros((slots, groups, fold, width), jnp.float32),
    )
    first = zero if columns.first is None else columns.first // block
    blocks = (columns.used + (block - 1)) // block
    _, total, out = lax.fori_loop(first, blocks, step, carry)
    out = out / total
    out = out.reshape(slots, groups, heads // groups, rows, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(slots, rows, heads * width)
