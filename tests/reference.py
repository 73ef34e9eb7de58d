"""Obviously right and slow: what the fast code is compared with. NumPy in float64, no sharing of code.

Also the statistics that the tests of laws share.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

# A fair sample fails a test at this level once in ten thousand runs; the seeds of tests are fixed.
LEVEL = 1e-4


def ancestors(parents: np.ndarray) -> np.ndarray:
    """`[N]` parents to `[N, N]` bool: entry (j, u) is True iff u is j or above it, by walking up."""
    out = np.zeros((len(parents), len(parents)), bool)
    for row in range(len(parents)):
        node = row
        while True:
            out[row, node] = True
            if node == 0:
                break
            node = int(parents[node])
    return out


def packed(rows: np.ndarray) -> np.ndarray:
    """`[N, N]` bool to `[N, W]` uint32, bit u of row j in word u // 32 at place u % 32."""
    words = -(-rows.shape[1] // 32)
    out = np.zeros((rows.shape[0], words), np.uint32)
    for j, row in enumerate(rows):
        for u in np.flatnonzero(row):
            out[j, u // 32] |= np.uint32(1 << (u % 32))
    return out


def depths(parents: np.ndarray) -> np.ndarray:
    """Steps from each row to row 0."""
    return ancestors(parents).sum(axis=1).astype(np.int32) - 1


def softmax(scores: np.ndarray) -> np.ndarray:
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Dense attention of one slot: `q [N, H, hd]`, `keys, values [S, G, hd]`, `visible [N, S]` to `[N, H, hd]`."""
    out = np.zeros(q.shape)
    share = q.shape[1] // keys.shape[1]
    for row in range(q.shape[0]):
        seen = np.flatnonzero(visible[row])
        for head in range(q.shape[1]):
            k, v = keys[seen, head // share].astype(np.float64), values[seen, head // share].astype(np.float64)
            scores = k @ q[row, head].astype(np.float64) / np.sqrt(q.shape[2])
            out[row, head] = softmax(scores) @ v
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding as complex multiplication: pair i is (x[i], x[i + hd/2])."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    turn = positions[:, None] * theta ** (-np.arange(half) / half)
    pairs = pairs * np.exp(1j * turn)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def forward(params, config, tokens, parents=None) -> dict[str, np.ndarray]:
    """A Llama block stack over one whole text, each row from scratch.

    Args:
      params: `TargetParams`, read as float64.
      tokens: `[n]`.
      parents: `[n]`, the row that each hangs under; a text when left out.

    Returns:
      `logits [n, V]`, `keys` and `values [L, n, G, hd]`, `residuals [L, n, D]`.
    """
    c = config
    tokens = np.asarray(tokens)
    visible = ancestors(np.maximum(np.arange(len(tokens)) - 1, 0) if parents is None else parents)
    positions = visible.sum(axis=1) - 1
    embed = np.asarray(params.embed, np.float64)
    x = embed[tokens]
    keys, values, residuals = [], [], []
    for layer in params.layers:
        w = {name: np.asarray(value, np.float64) for name, value in vars(layer).items() if value is not None}
        h = rms_norm(x, w["attn_norm"], c.norm_eps)
        q_rows, kv_rows = c.heads * c.head_width, c.kv_heads * c.head_width
        q = (h @ w["qkv"][:q_rows].T).reshape(-1, c.heads, c.head_width)
        k = (h @ w["qkv"][q_rows : q_rows + kv_rows].T).reshape(-1, c.kv_heads, c.head_width)
        v = (h @ w["qkv"][q_rows + kv_rows :].T).reshape(-1, c.kv_heads, c.head_width)
        q, k = rotate(q, positions, c.rope.theta), rotate(k, positions, c.rope.theta)
        x = x + attention(q, k, v, visible).reshape(len(tokens), -1) @ w["out"].T
        h = rms_norm(x, w["ff_norm"], c.norm_eps)
        gate, up = h @ w["gate_up"][: c.ff_width].T, h @ w["gate_up"][c.ff_width :].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T
        keys.append(k)
        values.append(v)
        residuals.append(x)
    head = embed if params.head is None else np.asarray(params.head, np.float64)
    logits = rms_norm(x, np.asarray(params.final_norm, np.float64), c.norm_eps) @ head.T
    return {
        "logits": logits,
        "keys": np.stack(keys),
        "values": np.stack(values),
        "residuals": np.stack(residuals),
    }


def kept(z: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """The tokens that the filters leave, by sorting: `z [V]` to `[V]` bool. Equal values share one fate."""
    order = np.argsort(-z, kind="stable")
    inside = np.ones(len(z), bool)
    if top_k:
        inside &= z >= z[order[min(top_k, len(z)) - 1]]
    p = softmax(np.where(inside, z, -np.inf))
    if top_p < 1:
        # Walk down the sorted tokens; the one that reaches p is the last that counts.
        mass, last = 0.0, 0
        for last in order:
            mass += p[last]
            if mass >= top_p:
                break
        inside &= z >= z[last]
    return inside & (p >= min_p * p.max() * (1 - 1e-12))


def law(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Probabilities of the next token, `logits [V]` to `[V]`; greedy at temperature 0."""
    if temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    z = np.asarray(logits, np.float64) / temperature
    return softmax(np.where(kept(z, top_k, top_p, min_p), z, -np.inf))


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of counts under a law; 0 if anything impossible happened. Rare cells are pooled."""
    counts, law = np.ravel(counts), np.ravel(law)
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 1.0
    return float(stats.chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1))
