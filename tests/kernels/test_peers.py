"""The peers of `bench/kernels.py` are given the same question as our kernel, each in its own layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from bench import kernels, peer_attention
from pallas_kernels.tree_attention import api, shapes

SHAPE = shapes.Shape(slots=2, rows=5, heads=4, groups=2, width=64, capacity=64, key_block=16, dtype="float32")
ALONE = dataclasses.replace(SHAPE, heads=2)


def answers(shape):
    """The bench's own call, and what the reference makes of it."""
    call = kernels.arguments(shape)
    want = api.attend("reference", *call, key_block=shape.key_block, cap=shape.cap)
    return call, np.asarray(want).reshape(-1)


def differs(got, want) -> float:
    return float(np.abs(np.asarray(got, np.float32).reshape(-1) - want).max())


def test_jax_s_attention():
    shape = dataclasses.replace(SHAPE, window=9)
    call, want = answers(shape)
    peer = peer_attention.PEERS["jax"]
    assert differs(peer.run(shape)(*peer.prepare(shape, *call)), want) < 3e-6


def test_ragged_pages_hold_the_same_cache():
    # By the kernel's own reference: the kernel runs on a TPU only.
    shape = dataclasses.replace(SHAPE, window=9, cap=5.0)
    call, want = answers(shape)
    given = peer_attention.PEERS["jax ragged_paged"].prepare(shape, *call)
    how = {"sm_scale": shape.width**-0.5, "sliding_window": shape.window, "soft_cap": shape.cap}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        got = ref_ragged_paged_attention(*given, **how)
    assert differs(got, want) < 3e-6


def test_a_bias_masks_what_the_bits_mask():
    call, want = answers(ALONE)
    q, k, v, bias = peer_attention.PEERS["jax flash"].prepare(ALONE, *call)
    scores = jnp.einsum("rhnd,rhsd->rhns", q, k) * ALONE.width**-0.5 + bias
    got = jnp.einsum("rhns,rhsd->rnhd", jax.nn.softmax(scores), v)
    assert differs(got, want) < 3e-6


def test_a_reason_stands_where_a_peer_cannot():
    why = {name: peer_attention.refuses(peer, SHAPE, "cpu") for name, peer in peer_attention.PEERS.items()}
    assert why["jax"] is None and why["jax cudnn"] == why["jax flash"] == "runs on no cpu"
    assert "key/value heads" in peer_attention.refuses(peer_attention.PEERS["jax flash"], SHAPE, "tpu")
    assert "no cap" in peer_attention.refuses(peer_attention.PEERS["jax"], dataclasses.replace(SHAPE, cap=5.0), "cpu")


def test_a_peer_that_gives_up_does_not_stop_the_table(monkeypatch):
    def gives_up(shape):
        def run(*call):
            raise NotImplementedError("heads of 64\nand more")

        return run

    broken = dataclasses.replace(peer_attention.PEERS["jax"], run=gives_up)
    monkeypatch.setitem(kernels.peer_attention.PEERS, "jax", broken)
    rows = {row["kernel"]: row for row in kernels.measure(SHAPE, 1e9, 1, 1)}
    assert rows["jax"]["refused"] == "NotImplementedError: heads of 64"
    assert rows["xla"]["from_xla"] == 0.0 and rows["xla"]["ms"] > 0
