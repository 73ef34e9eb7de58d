"""What jspec understood of a checkpoint, as lines for people."""

from __future__ import annotations

import jax

from jspec.target import cache, products, rope
from jspec.target.checkpoint import Checkpoint
from jspec.target.config import RopeConfig, TargetConfig

GIB = 1 << 30


def describe(checkpoint: Checkpoint) -> list[str]:
    """A line for each thing that decides what the model computes, and for each thing left aside."""
    c, params = checkpoint.config, checkpoint.params
    sizes = [(x.size, x.nbytes) for x in jax.tree.leaves(params)]
    count, nbytes = (sum(column) for column in zip(*sizes, strict=True))
    lines = [
        f"{checkpoint.name}: {c.family}, {count / 1e6:,.1f} M parameters, {nbytes / GIB:.2f} GiB",
        f"source         {checkpoint.source}",
        f"fingerprint    {checkpoint.fingerprint[:16]}, license {checkpoint.license or 'not stated'}",
        f"shape          {c.layers} layers of width {c.width}, {c.heads} query and {c.kv_heads} key/value heads of "
        f"{c.head_width}, feed-forward {c.ff_width}, vocabulary {c.vocab_size:,}",
        f"longest text   {c.max_positions:,} tokens, "
        f"{cache.bytes_per_token(c, params.dtype):,} bytes of keys and values for each",
        f"number type    {checkpoint.dtype_rule}; norms, biases and routers float32",
        f"products       {params.products or products.default(params.dtype)}",
        *_attention(c),
        *_feed_forward(c),
        f"head           {'the embedding (tied)' if c.tied_head else 'its own matrix'}"
        + (f", logits capped at {c.logit_cap:g}" if c.logit_cap else ""),
        f"end ids        {', '.join(_shown(checkpoint, token) for token in checkpoint.end_ids) or 'none'}",
        _template(checkpoint),
    ]
    return lines + [f"note           {note}" for note in checkpoint.notes]


def _attention(c: TargetConfig) -> list[str]:
    lines = []
    full = [i for i in range(c.layers) if i not in c.windowed]
    scale = "" if c.query_scale is None else f", scores times {c.query_scale:.6g}"
    if c.score_cap is not None:
        scale += f", capped at {c.score_cap:g}"
    for layers, what in ((full, "all earlier tokens"), (c.windowed, f"the last {c.window} tokens")):
        if layers:
            which = "all layers" if len(layers) == c.layers else f"layers {_ranges(layers)}"
            lines.append(f"attention      {which}: {what}{scale}; rope {_rope(c.rope_of(layers[0]), c.head_width)}")
    extras = {
        "bias on q, k, v": c.qkv_bias,
        "bias behind attention": c.out_bias,
        "norm on q and k": c.qk_norm,
        "norm behind attention and feed-forward": c.post_norms,
        f"embedding times {c.embed_scale:.6g}": c.embed_scale != 1.0,
    }
    present = [name for name, there in extras.items() if there]
    return lines + ([f"besides        {', '.join(present)}"] if present else [])


def _feed_forward(c: TargetConfig) -> list[str]:
    bias = ", with biases" if c.ff_bias else ""
    dense = f"feed-forward   gated {c.activation}{bias}"
    if c.moe is None:
        return [dense]
    m = c.moe
    which = "all layers" if len(m.layers) == c.layers else f"layers {_ranges(m.layers)}"
    shares = "summing to 1" if m.normalize else "of the softmax over all"
    return [
        dense,
        f"experts        {which}: {m.per_token} of {m.experts} for each token, width {m.width}, shares {shares}",
    ]


def _rope(r: RopeConfig, head_width: int) -> str:
    table = rope.frequencies(r, head_width)
    more = {
        "default": "",
        "linear": f", factor {r.factor:g}",
        "dynamic": f", factor {r.factor:g} beyond {r.original:,} tokens, made for {r.length:,}",
        "llama3": f", factor {r.factor:g}, low {r.low:g}, high {r.high:g}, original {r.original:,}",
        "yarn": f", factor {r.factor:g}, original {r.original:,}, times {r.scale:.4g}",
    }[r.kind]
    return f"{r.kind}, base {r.theta:g}{more}, slowest pair {table[-1]:.3g}"


def _template(checkpoint: Checkpoint) -> str:
    if not checkpoint.tokenizer.has_template:
        return "chat template  none: prompts are plain text"
    switches = ", ".join(checkpoint.tokenizer.switches) or "none"
    return f"chat template  yes, its switches: {switches}"


def _shown(checkpoint: Checkpoint, token: int) -> str:
    return f"{token} {checkpoint.tokenizer.token_bytes(token).decode('utf-8', 'replace')!r}"


def _ranges(numbers: list[int] | tuple[int, ...]) -> str:
    """0, 1, 2, 5 as `0-2, 5`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
