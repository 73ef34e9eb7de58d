"""What a published drafter drafts, in plain NumPy from its own tensors and by its own numbering.

Written from the formats' descriptions (drafters.md 1.2, 1.5, 3.1, 4.2, 4.3, 5). Shares no code with the library:
not its names, not its order of anything.
"""

from __future__ import annotations

import numpy as np

from tests.reference import rms_norm, rotate, softmax

OLD = {
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
}


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def facts(name, config):
    """What each format's keys mean, looked up one by one."""
    inner = config.get("dflash_config", {})
    layer = config.get("transformer_layer_config", config)
    out = {"layer": layer, "inner": inner, "scale": 1.0, "cap": None}
    if name == "speculators":
        out["states"] = config["aux_hidden_state_layer_ids"]  # H[id]
        spark = config["speculators_model_type"] == "dspark"
        drafts = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        missing = drafts == config["block_size"] if spark else False
        out["first"] = 0 if config.get("sample_from_anchor", missing) else 1
        out["causal"] = "none" if config.get("sliding_window_non_causal") else "windowed"
    else:
        ids = inner.get("target_layer_ids", config.get("target_layer_ids"))
        out["states"] = [i + 1 for i in ids]  # H[id + 1], the state behind block id; -1 is H[0]
        spark = name in ("deepspec", "specforge") or config.get("model_type") == "dspark"
        out["first"] = 0 if inner.get("shift_label", spark) else 1
        out["causal"] = {None: "windowed", True: "all", False: "none"}[config.get("is_causal")]
        out["scale"] = inner.get("output_multiplier", 1.0)
        out["cap"] = inner.get("final_logit_softcapping")
    out["block"] = inner.get("block_size", config.get("block_size"))
    out["mask"] = inner.get("mask_token_id", config.get("mask_token_id"))
    rope = layer.get("rope_parameters") or layer
    out["theta"] = rope["rope_theta"]
    out["markov"] = inner.get("markov_head_type", config.get("markov_head_type"))
    return out


def draft(name, config, tensors, states, anchor, embed, head):
    """Greedy drafts, their corrected logits over the columns, and confidences, of one text.

    Args:
      states: `[L + 1, s, D]`, hidden states of the s tokens before the anchor: the embedding, then each block's.
      embed, head: `[V, D]` of the target.
    """
    f = facts(name, config)
    w = {OLD.get(k, k).removeprefix("logit_head."): np.asarray(v).astype(np.float64) for k, v in tensors.items()}
    layer, block = f["layer"], f["block"]
    heads, groups = layer["num_attention_heads"], layer["num_key_value_heads"]
    hd = w["layers.0.self_attn.q_norm.weight"].shape[0]
    eps, s = layer["rms_norm_eps"], states.shape[1]
    taps = [states[i] for i in f["states"]]
    x = np.asarray(embed, np.float64)[[anchor] + [f["mask"]] * (block - 1)]
    at = np.arange(s + block)
    for i in range(layer["num_hidden_layers"]):
        p = f"layers.{i}."
        if "fc.weight" in w:
            fused = np.concatenate(taps, axis=1) @ w["fc.weight"].T
        else:
            share = softmax(w["layer_fusion_weights"][i])
            fused = sum(a * h for a, h in zip(share, taps, strict=True))
        ctx = rms_norm(fused, w["hidden_norm.weight"], eps)
        h = rms_norm(x, w[p + "input_layernorm.weight"], eps)
        end = "_target" if p + "self_attn.k_proj_target.weight" in w else ""
        pair = []
        for part in "kv":
            own = h @ w[p + f"self_attn.{part}_proj.weight"].T
            given = ctx @ w[p + f"self_attn.{part}_proj{end}.weight"].T
            pair.append(np.concatenate([given, own]).reshape(s + block, groups, hd))
        k = rotate(rms_norm(pair[0], w[p + "self_attn.k_norm.weight"], eps), at, f["theta"])
        q = (h @ w[p + "self_attn.q_proj.weight"].T).reshape(block, heads, hd)
        q = rotate(rms_norm(q, w[p + "self_attn.q_norm.weight"], eps), at[s:], f["theta"])
        windowed = layer.get("layer_types", ["full_attention"] * 2)[i] == "sliding_attention"
        out = np.zeros((block, heads, hd))
        for row in range(block):
            seen = np.ones(s + block, bool)
            if f["causal"] == "all" or (f["causal"] == "windowed" and windowed):
                seen &= at <= s + row
            if windowed:
                seen &= s + row - at < layer["sliding_window"]
            for n in range(heads):
                g = n // (heads // groups)
                out[row, n] = softmax(k[seen, g] @ q[row, n] / np.sqrt(hd)) @ pair[1][seen, g]
        x = x + out.reshape(block, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate * sigmoid(gate) * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    rows = rms_norm(x, w["norm.weight"], eps)[f["first"] :]
    ids = np.arange(len(head))
    if "d2t" in w:
        ids = (np.arange(len(w["d2t"])) + w["d2t"]).astype(int)
    z = rows @ np.asarray(head, np.float64)[ids].T * f["scale"]
    if f["cap"]:
        z = f["cap"] * np.tanh(z / f["cap"])
    tokens, sure, before, state = [], [], anchor, np.zeros(5)
    for n in range(len(rows)):
        e = np.zeros(0)
        if "markov_head.markov_w1.weight" in w:
            e = w["markov_head.markov_w1.weight"][before]
            inner = e
            if f["markov"] == "gated":
                x = np.concatenate([rows[n], e])
                inner = e * sigmoid(w["markov_head.gate_proj.weight"] @ x + w["markov_head.gate_proj.bias"])
            if f["markov"] == "rnn":
                x = np.concatenate([state, e, rows[n]])
                u, c, o = np.split(w["markov_head.joint_proj.weight"] @ x + w["markov_head.joint_proj.bias"], 3)
                inner, state = np.tanh(o), sigmoid(u) * state + (1 - sigmoid(u)) * np.tanh(c)
            z[n] += w["markov_head.markov_w2.weight"] @ inner
        if "confidence_head.proj.weight" in w:
            x = np.concatenate([rows[n], e])
            sure.append(sigmoid(w["confidence_head.proj.weight"][0] @ x + w["confidence_head.proj.bias"][0]))
        before = int(ids[np.argmax(z[n])])
        tokens.append(before)
    return np.array(tokens), z, np.array(sure)
