"""Targets whose logits are a table of the last token, so that every law can be worked out by hand.

They are ordinary targets. The embedding of token i is the i-th axis, every block adds nothing, and the
head's row v holds the logits of v after each token: `logits after i = table[i]`. With a width that is a
power of four no product rounds, so the table comes out bit for bit.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jspec.target.config import TargetConfig
from jspec.target.model import Layer, TargetParams


def config(vocab: int, width: int = 16, max_positions: int = 128) -> TargetConfig:
    return TargetConfig(
        family="llama",
        vocab_size=vocab,
        width=width,
        layers=1,
        heads=1,
        kv_heads=1,
        head_width=2,
        ff_width=2,
        max_positions=max_positions,
        norm_eps=1e-30,
        tied_head=False,
    )


def params(table: np.ndarray, width: int = 16) -> TargetParams:
    """`table [V, V]`: row i holds the logits that follow token i. `width` is a power of 4, at least V."""
    vocab = len(table)
    embed = np.eye(vocab, width, dtype=np.float32)
    head = np.zeros((vocab, width), np.float32)
    head[:, :vocab] = np.asarray(table, np.float32).T
    zeros = lambda *shape: jnp.zeros(shape, jnp.float32)  # noqa: E731
    layer = Layer(
        attn_norm=jnp.ones((width,), jnp.float32),
        qkv=zeros(6, width),
        out=zeros(width, 2),
        ff_norm=jnp.ones((width,), jnp.float32),
        gate_up=zeros(4, width),
        down=zeros(width, 2),
    )
    # The norm turns an axis of length 1 into one of length sqrt(D); its weight turns it back.
    norm = jnp.full((width,), width**-0.5, jnp.float32)
    return TargetParams(embed=jnp.asarray(embed), layers=(layer,), final_norm=norm, head=jnp.asarray(head))


def successors(following: dict[int, int], vocab: int, margin: float = 9.0) -> np.ndarray:
    """A table under which greedy decoding writes `following[i]` after i, and 0 after any other."""
    table = np.zeros((vocab, vocab), np.float32)
    for i in range(vocab):
        table[i, following.get(i, 0)] = margin
    return table


def broken(weights: TargetParams, token: int, kind: str) -> TargetParams:
    """The same target, but what it computes at `token` is not a number.

    kind: `kv` (from the embedding on, so keys and values too), or only the logits: `nan`, `inf`, `-inf`.
    """
    if kind == "kv":
        return weights.replace(embed=weights.embed.at[token, 0].set(jnp.nan))
    assert weights.head is not None
    width = weights.embed.shape[1]
    vocab = weights.embed.shape[0]
    assert vocab + 2 <= width, "needs two axes that no token uses"
    # The token points along the spare axes alone; only its own logits see the head's columns there.
    embed = weights.embed.at[token].set(0.0).at[token, vocab : vocab + 2].set(0.5**0.5)
    if kind == "nan":
        # The feed-forward of this row alone: infinity times zero, added to the residual after K/V were written.
        layer = weights.layers[0]
        gate_up = layer.gate_up.at[:2, vocab : vocab + 2].set(3e38)
        return weights.replace(embed=embed, layers=(layer.replace(gate_up=gate_up),))
    huge = 3e38 if kind == "inf" else -3e38
    return weights.replace(embed=embed, head=weights.head.at[:, vocab : vocab + 2].set(huge))
