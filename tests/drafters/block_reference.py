"""A block drafter in plain NumPy, float64, written from the specification: one text, everything from scratch.

drafters.md 3.1 (body), 4.2 (Markov head), 4.3 (confidence), 5 (DFlare). Shares no code with the library.
"""

from __future__ import annotations

import numpy as np

from tests.reference import rms_norm, rotate, softmax


def f64(x):
    return np.asarray(x, np.float64)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def hidden(params, config, embed, features, anchor, start=None, rows=None):
    """`[rows, D]` behind the final norm.

    Args:
      embed: `[V, D]`; features: `[s, T * D]`, of every token before the anchor.
      start: the anchor's position, s if left out.
    """
    c = config
    s = len(features)
    start = s if start is None else start
    rows = c.block if rows is None else rows
    x = f64(embed)[[anchor] + [c.mask_id] * (rows - 1)] * c.embed_scale
    before, inside = np.arange(s), start + np.arange(rows)
    for d, layer in enumerate(params.layers):
        if params.fuse is not None:
            ctx = f64(features) @ f64(params.fuse).T
        else:
            share = softmax(f64(params.mix[d]))
            ctx = sum(w * f64(features)[:, j * c.width : (j + 1) * c.width] for j, w in enumerate(share))
        ctx = rms_norm(ctx, f64(params.context_norm), c.norm_eps)
        h = rms_norm(x, f64(layer.attn_norm), c.norm_eps)
        own = f64(layer.kv)
        given = own if layer.kv_context is None else f64(layer.kv_context)
        size = c.kv_heads * c.head_width

        def heads(y, count, size=None):
            return y.reshape(len(y), count, c.head_width)

        k = np.concatenate([heads(ctx @ given[:size].T, c.kv_heads), heads(h @ own[:size].T, c.kv_heads)])
        v = np.concatenate([heads(ctx @ given[size:].T, c.kv_heads), heads(h @ own[size:].T, c.kv_heads)])
        at = np.concatenate([before, inside])
        k = rotate(rms_norm(k, f64(layer.k_norm), c.norm_eps), at, c.rope.theta)
        q = rotate(rms_norm(heads(h @ f64(layer.q).T, c.heads), f64(layer.q_norm), c.norm_eps), inside, c.rope.theta)
        out = np.zeros((rows, c.heads, c.head_width))
        for row in range(rows):
            seen = np.ones(len(at), bool)
            if d in c.causal:
                seen &= at <= inside[row]
            if d in c.windowed:
                seen &= inside[row] - at < c.window
            for head in range(c.heads):
                g = head // (c.heads // c.kv_heads)
                weight = softmax(k[seen, g] @ q[row, head] / np.sqrt(c.head_width))
                out[row, head] = weight @ v[seen, g]
        x = x + out.reshape(rows, -1) @ f64(layer.out).T
        h = rms_norm(x, f64(layer.ff_norm), c.norm_eps)
        gate, up = np.split(h @ f64(layer.gate_up).T, 2, axis=1)
        x = x + (gate * sigmoid(gate) * up) @ f64(layer.down).T
    return rms_norm(x, f64(params.final_norm), c.norm_eps)


def logits(config, rows, head):
    """Base logits `[rows, Vd]`."""
    z = rows @ f64(head).T * config.logit_scale
    return z if config.logit_cap is None else config.logit_cap * np.tanh(z / config.logit_cap)


def corrected(params, config, weights, rows, previous):
    """Logits and confidence logits of the predicting rows, with the predecessor of each given.

    Args:
      rows: `[K, D]`, the rows that predict, in order.
      previous: `[K]`, target ids: the anchor, then the draft before.
    """
    z = logits(config, rows, weights.head)
    head, r = params.markov, config.rank
    sure, state = np.zeros(len(rows)), np.zeros(max(r, 1))
    for k in range(len(rows)):
        e = np.zeros(0)
        if head is not None:
            row = previous[k] if weights.columns is None or not config.shared_row else int(weights.columns[previous[k]])
            e = f64(head.previous)[row]
            if config.markov == "vanilla":
                inner = e
            elif config.markov == "gated":
                gate = sigmoid(f64(head.mix) @ np.concatenate([rows[k], e]) + f64(head.mix_bias))
                inner = gate * e
            else:
                joint = f64(head.mix) @ np.concatenate([state, e, rows[k]]) + f64(head.mix_bias)
                update, candidate, output = joint[:r], joint[r : 2 * r], joint[2 * r :]
                inner = np.tanh(output)
                state = sigmoid(update) * state + (1 - sigmoid(update)) * np.tanh(candidate)
            z[k] += f64(head.following) @ inner
        if params.confidence is not None:
            x = rows[k] if config.confidence == "hidden" else np.concatenate([rows[k], e])
            sure[k] = f64(params.confidence.weight) @ x + f64(params.confidence.bias)
    return z, sure
