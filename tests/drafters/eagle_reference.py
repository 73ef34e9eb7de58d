"""EAGLE-3 in plain NumPy, float64, written from the specification (drafters.md 6): one text, everything from scratch.

Shares no code with the library, and counts as the first trainers do: pair t holds the target's state at t and the
token at t + 1, and is turned by t (6.2). Only distances matter, so one more for every pair changes nothing.
"""

from __future__ import annotations

import numpy as np

from tests.reference import rms_norm, rotate, softmax


def f64(x):
    return np.asarray(x, np.float64)


def fused(params, config, features):
    """`g [n, D]` of tapped residuals `[n, T * D]`."""
    c, x = config, f64(features)
    if c.fuse_norm == "whole":
        x = rms_norm(x, f64(params.fuse_norm), c.norm_eps)
    elif c.fuse_norm == "each":
        w = f64(params.fuse_norm)
        parts = [slice(i * c.width, (i + 1) * c.width) for i in range(len(c.taps))]
        x = np.concatenate([rms_norm(x[:, p], w[p], c.norm_eps) for p in parts], axis=1)
    return x @ f64(params.fuse).T


def layer(params, config, embed, states, tokens):
    """Outputs `[n, D]` of pairs, each seeing all before it: `states [n, D]`, `tokens [n]`, pair t turned by t."""
    c, n = config, len(tokens)
    e = f64(embed)[np.asarray(tokens)] * c.embed_scale
    g = rms_norm(states, f64(params.state_norm), c.norm_eps)
    x = np.concatenate([rms_norm(e, f64(params.embed_norm), c.norm_eps), g], axis=1)
    size = c.kv_heads * c.head_width

    def heads(y, count, norm):
        y = y.reshape(n, count, c.head_width)
        return y if norm is None else rms_norm(y, f64(norm), c.norm_eps)

    kv = f64(params.kv)
    q = rotate(heads(x @ f64(params.q).T, c.heads, params.q_norm), np.arange(n), c.rope.theta)
    k = rotate(heads(x @ kv[:size].T, c.kv_heads, params.k_norm), np.arange(n), c.rope.theta)
    v = heads(x @ kv[size:].T, c.kv_heads, None)
    out = np.zeros((n, c.heads, c.head_width))
    for row in range(n):
        for head in range(c.heads):
            group = head // (c.heads // c.kv_heads)
            weight = softmax(k[: row + 1, group] @ q[row, head] / np.sqrt(c.head_width))
            out[row, head] = weight @ v[: row + 1, group]
    y = (g if c.norm_residual else states) + out.reshape(n, -1) @ f64(params.out).T
    h = rms_norm(y, f64(params.ff_norm), c.norm_eps)
    gate, up = np.split(h @ f64(params.gate_up).T, 2, axis=1)
    return y + (gate / (1 + np.exp(-gate)) * up) @ f64(params.down).T


def chain(params, config, weights, features, tokens, drafts):
    """Logits `[K, Vd]` of a chain whose drafts are given.

    Args:
      features: `[s, T * D]`, of every token before the anchor.
      tokens: `[s + 1]`, the text up to the anchor.
      drafts: `[K - 1]` target ids, what steps 1 .. K - 1 read.
    """
    c = config
    states = fused(params, c, features)
    read = list(tokens[1:])
    head = f64(weights.head if params.head is None else params.head)
    out = []
    for step in range(len(drafts) + 1):
        y = layer(params, c, weights.embed, states, read)[-1]
        hidden = rms_norm(y, f64(params.final_norm), c.norm_eps)
        z = head @ hidden * c.logit_scale
        out.append(z if c.logit_cap is None else c.logit_cap * np.tanh(z / c.logit_cap))
        if step < len(drafts):
            states = np.concatenate([states, (hidden if c.norm_output else y)[None]])
            read.append(drafts[step])
    return np.stack(out)
