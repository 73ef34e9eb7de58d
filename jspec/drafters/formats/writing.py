"""What writers of published formats share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.drafters.block.config import BlockConfig
from jspec.drafters.block.weights import BlockParams
from jspec.errors import JspecError
from jspec.target.checkpoint import Checkpoint
from jspec.target.config import RopeConfig


def check(name: str, config: BlockConfig, faults: Mapping[str, bool]) -> None:
    """Refuses a drafter that a format cannot hold.

    Args:
      faults: what the format has no place for, and whether the drafter has it.
    """
    found = [what for what, there in faults.items() if there]
    if found:
        raise JspecError(
            f"the format `{name}` has no place for {found[0]}, which this {config.family} drafter has.",
            "a drafter that the format can hold without loss.",
            "convert it to another format, or keep it as it is.",
        )


def qwen3(architecture: str, config: BlockConfig, params: BlockParams, target: Checkpoint) -> dict[str, Any]:
    """The keys of the body, as transformers writes them for Qwen3."""
    c = config
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "attention_bias": False,
        "dtype": str(params.layers[0].q.dtype),
        "head_dim": c.head_width,
        "hidden_act": "silu",
        "hidden_size": c.width,
        "intermediate_size": c.ff_width,
        "layer_types": ["sliding_attention" if i in c.windowed else "full_attention" for i in range(c.layers)],
        "max_position_embeddings": target.config.max_positions,
        "max_window_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_hidden_layers": c.layers,
        "num_key_value_heads": c.kv_heads,
        "rms_norm_eps": c.norm_eps,
        "rope_parameters": _rope(c.rope),
        "sliding_window": c.window if c.windowed else None,
        "tie_word_embeddings": False,
        "use_sliding_window": bool(c.windowed),
        "vocab_size": c.vocab_size,
    }


def heads(config: BlockConfig) -> dict[str, Any]:
    """The keys of Markov and confidence head."""
    c = config
    made: dict[str, Any] = {"enable_confidence_head": c.confidence is not None, "markov_rank": c.rank}
    if c.confidence is not None:
        made["confidence_head_with_markov"] = c.confidence == "markov"
    if c.markov is not None:
        made["markov_head_type"] = c.markov
    return made


def causal(config: BlockConfig) -> dict[str, bool]:
    """The key `is_causal`: true for all layers, false for none, left out where it is the windowed ones."""
    c = config
    if c.causal in ((), tuple(range(c.layers))):
        return {"is_causal": bool(c.causal)}
    if c.causal == c.windowed:
        return {}
    raise JspecError(
        f"in the layers `{list(c.causal)}` of {c.layers} rows do not see later rows of their block.",
        f"all layers, none, or the windowed ones, `{list(c.windowed)}`: the format has no words for others.",
        "keep it as it is.",
    )


def scaled(config: BlockConfig) -> bool:
    """Whether embeddings or logits are changed on the way."""
    return config.embed_scale != 1.0 or config.logit_scale != 1.0 or config.logit_cap is not None


def calibrated(params: BlockParams) -> bool:
    """Whether the confidence head has temperatures of its own."""
    return params.confidence is not None and bool((np.asarray(params.confidence.temperature) != 1.0).any())


def copies(target: Checkpoint, ids: np.ndarray | None) -> dict[str, np.ndarray]:
    """Embedding and head of the target; of the head the rows of the draft vocabulary."""
    p = target.params
    head = np.asarray(p.embed if p.head is None else p.head)
    return {"embed_tokens.weight": np.asarray(p.embed), "lm_head.weight": head if ids is None else head[ids]}


def _rope(rope: RopeConfig) -> dict[str, Any]:
    made: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "default":
        return made
    made["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        made["original_max_position_embeddings"] = rope.original
    if rope.kind == "llama3":
        made |= {"low_freq_factor": rope.low, "high_freq_factor": rope.high}
    if rope.kind == "yarn":
        made |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.scale,
        }
    if rope.kind == "dynamic":
        raise JspecError(
            "the drafter's rope type is `dynamic`.", "a rope type whose table does not depend on the text.", "keep it."
        )
    return made
