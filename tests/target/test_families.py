"""Configurations of every family: defaults, and what is refused."""

from __future__ import annotations

import pytest

from jspec.target import (
    families,
    hf,
)
from jspec.target.config import RopeConfig
from jspec.target.documents import Document
from tests.target import folders
from tests.target.folders import CONFIGS
from tests.target.reading import GEMMA, LLAMA, MOE, refused, write


@pytest.mark.parametrize(
    ("base", "config", "told"),
    [
        (LLAMA, {"model_type": "mamba"}, "`mamba`"),
        (LLAMA, {"model_type": ...}, "`model_type`"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "`LlamaForSequenceClassification`"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "`gptq`"),
        (LLAMA, {"hidden_act": "relu"}, "`relu`"),
        (LLAMA, {"num_key_value_heads": 3}, "`3` key/value heads"),
        (LLAMA, {"hidden_size": 30}, "`30` and `4` query heads"),
        (LLAMA, {"head_dim": 7}, "`7`"),
        (LLAMA, {"num_hidden_layers": 10**9}, "`1000000000`"),
        (LLAMA, {"num_hidden_layers": 9000}, "`9000` layers"),
        (LLAMA, {"num_hidden_layers": 0}, "`0`"),
        (LLAMA, {"vocab_size": "64"}, "`'64'`"),
        (LLAMA, {"tie_word_embeddings": 1}, "`tie_word_embeddings`"),
        (LLAMA, {"rms_norm_eps": 0}, "`rms_norm_eps`"),
        (CONFIGS["qwen2-window"], {"layer_types": ["full_attention"]}, "`1` entries"),
        (CONFIGS["qwen2-window"], {"layer_types": ["full_attention", "x", "x"]}, "`x`"),
        (CONFIGS["qwen2"], {"layer_types": ["sliding_attention"] * 2}, "`use_sliding_window`"),
        (MOE, {"num_experts_per_tok": 5}, "`5` of `4` experts"),
        (MOE, {"decoder_sparse_step": 0}, "`decoder_sparse_step`"),
        (GEMMA, {"sliding_window": None}, "`sliding_window` null"),
        (GEMMA, {"sliding_window": 0}, "`sliding_window` as `0`"),
        (GEMMA, {"sliding_window_pattern": 0}, "`sliding_window_pattern`"),
        (GEMMA, {"use_bidirectional_attention": True}, "`use_bidirectional_attention`"),
        (GEMMA, {"final_logit_softcapping": -1.0}, "`logit_cap`"),
    ],
)
def test_configurations_that_are_refused(folder, base, config, told):
    refused(write(folder, base, config=config), told)


@pytest.mark.parametrize("sizes", [{"num_experts": 0}, {"mlp_only_layers": [0, 1, 2]}])
def test_a_mixture_without_experts_is_dense(folder, sizes):
    made = hf.load(write(folder, MOE | sizes, arrays=folders.tensors(MOE | {"mlp_only_layers": [0, 1, 2]})))
    assert made.config.moe is None


def test_null_counts_as_absent(folder):
    made = hf.load(write(folder, config={"head_dim": None, "num_key_value_heads": 2, "mlp_bias": None}))
    assert made.config == hf.load(folder).config and made.config.head_width == 8


def test_gemma2_caps_can_be_switched_off(folder):
    made = hf.load(write(folder, CONFIGS["gemma2"], config={"attn_logit_softcapping": None}))
    assert made.config.score_cap is None and made.config.logit_cap == 3.0
    assert hf.load(write(folder, CONFIGS["gemma2"], config={"attn_logit_softcapping": ...})).config.score_cap == 50.0


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", families.FAMILIES)
def test_live_defaults_are_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers", reason="compares with transformers, of the extra `reference`")
    theirs = transformers.AutoConfig.for_model(kind)
    doc = Document({"model_type": kind}, "config.json")
    c = families.FAMILIES[kind].config(doc)
    assert (c.vocab_size, c.width, c.layers, c.heads, c.kv_heads, c.ff_width, c.norm_eps, c.tied_head) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.intermediate_size,
        theirs.rms_norm_eps,
        theirs.tie_word_embeddings,
    )
    assert c.head_width == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert c.max_positions == theirs.max_position_embeddings
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * c.layers
    assert c.windowed == tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    assert not c.windowed or c.window == theirs.sliding_window
    assert (c.score_cap, c.logit_cap) == tuple(
        getattr(theirs, name, None) for name in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    ropes = theirs.rope_parameters
    full = ropes.get("full_attention", ropes)
    assert c.rope == RopeConfig(theta=full["rope_theta"])
    if c.window_rope is not None:
        assert c.window_rope == RopeConfig(theta=ropes["sliding_attention"]["rope_theta"])
    if c.moe is not None:
        assert (c.moe.experts, c.moe.per_token, c.moe.width, c.moe.normalize) == (
            theirs.num_experts,
            theirs.num_experts_per_tok,
            theirs.moe_intermediate_size,
            theirs.norm_topk_prob,
        )
