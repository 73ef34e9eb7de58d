"""Attention of other libraries, for `bench/kernels.py`: which of our shapes each computes, and why not the rest.

None reads ancestors as packed bits, and none promises bits: they say what speed is to be had. Each is given
its arguments in its own layout, made before the clock starts. Those that take no mask are given a chain, as
the bench's block is one. Left out, since they compute none of the shapes (JAX 0.10 to 0.12, `jax.experimental.
pallas.ops`): `tpu.paged_attention`, `gpu.paged_attention` and `gpu.decode_attention` read one query a
sequence; `gpu.attention_mgpu` has no mask but a causal one that begins at row 0; `tpu.splash_attention` has
one mask for every slot and query blocks of 128.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.tree_attention import reference
from pallas_kernels.tree_attention.api import Rows
from pallas_kernels.tree_attention.shapes import Shape


@dataclasses.dataclass(frozen=True)
class Peer:
    """One implementation.

    Args:
      platform: the only one that it runs on, None for any.
      refuses: the reason why it cannot compute a shape, or None. What it says itself comes on top.
      prepare: `(shape, q, k, v, rows)` to its own arguments; `q [R, N, H, hd]`, cache `[B, G, S, hd]` twice.
      run: those arguments to numbers in the order `[R, N, H, hd]`.
    """

    platform: str | None
    refuses: Callable[[Shape], str | None]
    prepare: Callable[[Shape, Array, Array, Array, Rows], tuple[Array, ...]]
    run: Callable[..., Array]


def _masked(shape: Shape, q: Array, k: Array, v: Array, rows: Rows) -> tuple[Array, ...]:
    """Sequences before heads, and the mask written out."""
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    return q.astype(k.dtype), k, v, reference.mask(rows, shape.capacity)[:, None]


def _paged(shape: Shape, q: Array, k: Array, v: Array, rows: Rows) -> tuple[Array, ...]:
    """Pages of one key block, keys and values of a head side by side, the queries of all slots in a row."""
    s, each = shape, shape.capacity // shape.key_block
    pages = jnp.stack([k, v], axis=2).transpose(0, 3, 1, 2, 4)  # [B, S, G, 2, hd]
    pages = pages.reshape(s.slots * each, s.key_block, 2 * s.groups, s.width)
    table = jnp.arange(s.slots * each, dtype=jnp.int32).reshape(s.slots, each)
    edges = jnp.arange(s.slots + 1, dtype=jnp.int32) * s.rows
    q = q.reshape(s.slots * s.rows, s.heads, s.width).astype(k.dtype)
    return q, pages, rows.start + s.rows, table, edges, jnp.full((1,), s.slots, jnp.int32)


def _biased(shape: Shape, q: Array, k: Array, v: Array, rows: Rows) -> tuple[Array, ...]:
    """Heads before sequences, and the mask as something that is added."""
    seen = reference.mask(rows, shape.capacity)[:, None]
    bias = jnp.where(seen, jnp.float32(0), jnp.float32(-1e30))
    wide = (shape.slots, shape.heads, shape.rows, shape.capacity)
    return q.transpose(0, 2, 1, 3).astype(k.dtype), k, v, jnp.broadcast_to(bias, wide)


def _jax(implementation: str | None) -> Callable[[Shape], Callable[..., Array]]:
    def of(shape: Shape) -> Callable[..., Array]:
        return lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    return of


def _ragged(shape: Shape) -> Callable[..., Array]:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    # Its tuned blocks do not fit the 16 MiB of VMEM that a kernel has unasked.
    how = {"sm_scale": shape.width**-0.5, "sliding_window": shape.window, "soft_cap": shape.cap}
    return lambda *call: ragged_paged_attention(*call, **how, vmem_limit_bytes=64 << 20)


def _flash(shape: Shape) -> Callable[..., Array]:
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    # Its own sizes want 128 queries at least.
    sizes = BlockSizes(block_q=shape.rows, block_k_major=shape.key_block, block_k=shape.key_block, block_b=1)
    how = {"sm_scale": shape.width**-0.5, "block_sizes": sizes}
    return lambda q, k, v, bias: flash_attention(q, k, v, bias, **how).transpose(0, 2, 1, 3)


def _tokamax(shape: Shape) -> Callable[..., Array]:
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # or it takes the command line for its own
    return lambda q, k, v, mask: tokamax.dot_product_attention(q, k, v, mask=mask, logits_soft_cap=shape.cap)


def _without_cap(shape: Shape) -> str | None:
    return "has no cap" if shape.cap else None


def _same_heads(shape: Shape) -> str | None:
    if shape.heads != shape.groups:
        return "wants as many key/value heads as query heads"
    return _without_cap(shape)


def _installed(_: Shape) -> str | None:
    return None if importlib.util.find_spec("tokamax") else "not installed"


PEERS: dict[str, Peer] = {
    "jax": Peer(None, _without_cap, _masked, _jax(None)),
    "jax cudnn": Peer("gpu", _without_cap, _masked, _jax("cudnn")),
    "jax ragged_paged": Peer("tpu", lambda _: None, _paged, _ragged),
    "jax flash": Peer("tpu", _same_heads, _biased, _flash),
    "tokamax": Peer(None, _installed, _masked, _tokamax),
}


def refuses(peer: Peer, shape: Shape, platform: str) -> str | None:
    """The reason why a peer cannot compute a shape on a platform, as far as it is known before it is tried."""
    if peer.platform not in (None, platform):
        return f"runs on no {platform}"
    return peer.refuses(shape)
