"""Published drafters: every fault refused by name, every oddity handled and told; what is what, by content.

Known failures covered: DR-5 to DR-9, LD-2, LD-3, LD-4, LD-12, LD-13, LD-15 (of drafters). Pitfalls of drafters.md 12:
2, 3, 4, 10, 11, 12, 13, 15 to 18, 23 to 29, 35.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec.drafters.block.drafter import BlockDrafter
from jspec.drafters.formats import body, convert, copies, source
from jspec.drafters.formats.recognise import recognise
from jspec.errors import JspecError
from tests.drafters import published, published_reference
from tests.drafters.damages import drop_key, put_key, several, tensor, verifier, with_map, without_maps
from tests.drafters.published import read
from tests.drafters.published_drafts import compare, drafted, states_of
from tests.words import tokenizer

FAULTS = {
    # Taps (DR-6, LD-12, LD-13, 12.10 to 12.12).
    "no taps": ("zlab", "flat", drop_key("target_layer_ids"), r"usual rule would give \[1, 2, 3\]"),
    "no taps in speculators": (
        "speculators",
        "dflash",
        drop_key("aux_hidden_state_layer_ids"),
        "`aux_hidden_state_layer_ids`",
    ),
    "taps in two places that differ": (
        "zlab",
        "flat",
        put_key("target_layer_ids", [1, 2, 3]),
        r"`target_layer_ids` as `\[1, 2, 3\]`",
    ),
    "a tap too few": (
        "zlab",
        "flat",
        put_key("target_layer_ids", [1, 4], True),
        r"`fc.weight` as BF16 of shape \(32, 96\)",
    ),
    "a tap too many": ("zlab", "flat", put_key("target_layer_ids", [0, 1, 2, 4], True), r"of shape \(32, 128\), as"),
    "a tap below": ("zlab", "flat", put_key("target_layer_ids", [-2, 1, 2], True), "not the last block"),
    "the embedding where it has no name": (
        "zlab",
        "flat",
        put_key("target_layer_ids", [-1, 1, 2], True),
        "taps the block `-1`",
    ),
    "the last block": ("zlab", "flat", put_key("target_layer_ids", [1, 2, 5], True), "not the last block"),
    "a tap beyond": ("deepspec", "dspark", put_key("target_layer_ids", [1, 2, 9]), "not the last block"),
    "the last hidden state": (
        "speculators",
        "dflash",
        put_key("aux_hidden_state_layer_ids", [2, 3, 6]),
        "not the last block",
    ),
    "a hidden state below": (
        "speculators",
        "dflash",
        put_key("aux_hidden_state_layer_ids", [-1, 3, 5]),
        "not the last block",
    ),
    "a tap twice": ("zlab", "flat", put_key("target_layer_ids", [1, 1, 4], True), "taps one block twice"),
    "taps counted wrongly": ("angelspec", "dflash", put_key("num_target_layers", 6), "`num_target_layers` as `6`"),
    # Mask and block (DR-8, 12.23, 12.35).
    "mask beyond": ("zlab", "flat", put_key("mask_token_id", 64, True), "mask token is `64`"),
    "no mask": ("zlab", "flat", drop_key("mask_token_id"), "which token is the mask"),
    "no mask in speculators": ("speculators", "dflash", drop_key("mask_token_id"), "which token is the mask"),
    "masks that differ": ("zlab", "flat", put_key("mask_token_id", 62), "`mask_token_id` as `62`"),
    "no block": ("angelspec", "dflare", drop_key("block_size"), "how many rows its block has"),
    "blocks that differ": ("zlab", "nested", put_key("block_size", 7), "`block_size` as `7`"),
    # Vocabulary (LD-2 to LD-4, 12.24, 12.25).
    "no map": (
        "speculators",
        "dflash",
        without_maps,
        "drafts `40` of the target's `64` tokens, and has no tensor `d2t`",
    ),
    "no map in specforge": ("specforge", "dspark reduced", without_maps, "`40` of the target's `64`"),
    "half a map": ("speculators", "dflash", lambda c, t: t.pop("d2t"), "no tensor `d2t`"),
    "map out of range": (
        "speculators",
        "dflash",
        several(with_map(39, 64), lambda c, t: t.pop("t2d")),
        "column `39` to the token `64`",
    ),
    "map below": (
        "speculators",
        "dflash",
        several(with_map(2, -1), lambda c, t: t.pop("t2d")),
        "column `2` to the token `-1`",
    ),
    "one token twice": (
        "speculators",
        "dflash",
        several(with_map(9, 3), lambda c, t: t.pop("t2d")),
        "columns `0` and `9` to one token, `3`",
    ),
    "maps that contradict each other": ("speculators", "dflash", with_map(39, 63), "contradict each other"),
    "map too long": ("speculators", "dflash", put_key("draft_vocab_size", 41), "has `40` entries in `d2t`"),
    "vocabulary too large": ("zlab", "flat", put_key("vocab_size", 5000), "whose `vocab_size` is `5000`"),
    "vocabulary too small": ("zlab", "flat", put_key("vocab_size", 63), "whose `vocab_size` is `63`"),
    "draft vocabulary of nothing": (
        "speculators",
        "dflash",
        put_key("draft_vocab_size", 0),
        "`draft_vocab_size` as `0`",
    ),
    # Heads (DR-9, 12.26, 12.27).
    "confidence of a Markov head that is not there": (
        "deepspec",
        "dflash",
        several(put_key("enable_confidence_head", True), put_key("confidence_head_with_markov", True)),
        "the Markov head is `None`",
    ),
    "rank below zero": ("deepspec", "dspark", put_key("markov_rank", -1), "of rank `-1`"),
    "rank zero with a head": ("deepspec", "dspark", put_key("markov_rank", 0), "`markov_rank` as `0`"),
    "another rank": ("deepspec", "dspark", put_key("markov_rank", 4), r"of shape \(64, 5\)"),
    "a head that is turned off": (
        "deepspec",
        "dspark",
        put_key("enable_confidence_head", False),
        "turns off the confidence head",
    ),
    "a head that is not there": (
        "deepspec",
        "dflash",
        put_key("enable_confidence_head", True),
        "lacks the tensor `confidence_head.proj.bias`",
    ),
    "a narrower confidence head": (
        "specforge",
        "dspark",
        put_key("confidence_head_with_markov", False, True),
        r"shape \(1, 37\)",
    ),
    "another Markov head": ("specforge", "dspark", put_key("markov_head_type", "gated", True), "markov_head.gate_proj"),
    "an unknown Markov head": ("specforge", "dspark", put_key("markov_head_type", "lstm", True), "`'lstm'`"),
    # Slots (12.2, 12.3).
    "DSpark without a word on slots": (
        "speculators",
        "dspark anchor slot",
        lambda c, t: c["speculators_config"].pop("proposal_methods"),
        "no `sample_from_anchor`",
    ),
    "DSpark with an odd number of drafts": (
        "speculators",
        "dspark anchor slot",
        lambda c, t: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=5),
        r"of `\[5\]`",
    ),
    "a Markov head under DFlash's name": (
        "deepspec",
        "dspark",
        put_key("architectures", ["DFlashDraftModel"]),
        "`DFlashDraftModel` and has a Markov head",
    ),
    # Body (12.16 to 12.18, DR-7).
    "no rope base": ("zlab", "flat", drop_key("rope_theta"), "base of its rotary embedding"),
    "rope bases that differ": ("zlab", "nested", put_key("rope_theta", 10_000.0), "`rope_theta` as `10000`"),
    "pairs of neighbours": ("deepspec", "dspark", put_key("rope_is_neox_style", False), "pairs neighbours"),
    "a part of the head": ("deepspec", "dspark", put_key("partial_rotary_factor", 0.25), "turn only `0.25`"),
    "an unknown rope": (
        "zlab",
        "nested",
        put_key("rope_parameters", {"rope_type": "su", "rope_theta": 1e4}),
        "rope type `su`",
    ),
    "biases": ("zlab", "flat", put_key("attention_bias", True), "sets `attention_bias`"),
    "a norm before the fusion": ("zlab", "flat", put_key("norm_before_fc", True), "sets `norm_before_fc`"),
    "a norm of each tap": ("zlab", "flat", put_key("fc_norm", True), "sets `fc_norm`"),
    "a norm on the output": ("deepspec", "dspark", put_key("norm_output", True), "sets `norm_output`"),
    "latent attention": ("specforge", "dspark", put_key("attention_mode", "mla", True), "`attention_mode` as `mla`"),
    "another activation": ("zlab", "flat", put_key("hidden_act", "gelu"), "`hidden_act` as `gelu`"),
    "a gated sum": ("angelspec", "dflash", put_key("fusion_type", "gated_sum"), "`fusion_type` as `gated_sum`"),
    "a correction": ("angelspec", "dspark", put_key("enable_hidden_correction", True), "corrections"),
    "quantised": ("zlab", "flat", put_key("quantization_config", {"quant_method": "fp8"}), "of quantised weights"),
    "layer kinds for another depth": ("zlab", "flat", put_key("layer_types", ["full_attention"]), "for 2 layers"),
    "an unknown layer kind": ("zlab", "flat", put_key("layer_types", ["full_attention", "linear"]), "linear"),
    "a window that is not used": (
        "zlab",
        "nested",
        put_key("use_sliding_window", False),
        "`use_sliding_window` as `False`",
    ),
    "a window shorter than the block": (
        "zlab",
        "with scales",
        put_key("sliding_window", 7),
        "window of `7` tokens and a block of `8` rows",
    ),
    "another depth": ("zlab", "flat", put_key("num_hidden_layers", 3), "`num_hidden_layers` as `3`"),
    "another width": ("zlab", "flat", put_key("hidden_size", 48), "`hidden_size` as `48`"),
    "other heads": ("zlab", "flat", put_key("num_attention_heads", 8), "`num_attention_heads` as `8`"),
    "no body": (
        "speculators",
        "dflash",
        lambda c, t: c.pop("transformer_layer_config"),
        "lacks the key `transformer_layer_config`",
    ),
    "a layer left out": (
        "zlab",
        "flat",
        lambda c, t: [t.pop(n) for n in list(t) if n.startswith("layers.0.")],
        r"the layers `\[1\]`",
    ),
    "one tensor under two names": (
        "angelspec",
        "dflash",
        tensor("norm.weight", lambda _: np.ones(32, np.float32)),
        "which are one tensor",
    ),
    "temperatures for another block": (
        "deepspec",
        "dspark",
        put_key("confidence_temperatures", [1.5, 2.0]),
        "`2` entries in `confidence_temperatures`",
    ),
    "not finite": ("zlab", "flat", tensor("norm.weight", lambda x: x * np.float32(np.inf)), "not finite"),
    # Another target (12.13, 12.15, 12.28).
    "another depth of the target": ("zlab", "flat", put_key("num_target_layers", 7), "whose `layers` is `7`"),
    "another depth in angelspec": (
        "angelspec",
        "dflare",
        put_key("target_num_hidden_layers", 36),
        "whose `layers` is `36`",
    ),
    "another class of the target": (
        "speculators",
        "dflash",
        verifier(architectures=["GlmMoeDsaForCausalLM"]),
        "class `GlmMoeDsaForCausalLM`",
    ),
    "another embedding": (
        "deepspec",
        "dspark",
        tensor("embed_tokens.weight", lambda x: x * 2),
        "`embed_tokens.weight` that is not the one",
    ),
    "a head of its own": (
        "speculators",
        "dflash",
        tensor("lm_head.weight", lambda x: x[::-1].copy()),
        "`lm_head.weight` that is not",
    ),
    "a copy that is no floats": (
        "deepspec",
        "dspark",
        tensor("embed_tokens.weight", lambda x: x.astype(np.int16)),
        "`embed_tokens.weight` as I16",
    ),
    "another norm": (
        "speculators",
        "dflash",
        tensor("verifier_norm.weight", lambda _: np.full(32, 2, ml_dtypes.bfloat16)),
        "`verifier_norm.weight` that is not",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_by_name(tmp_path, fault):
    name, variant, damage, told = FAULTS[fault]
    with pytest.raises(JspecError, match=told) as error:
        read(tmp_path, name, variant, damage)
    assert error.value.allowed and error.value.action


def test_a_tapped_last_block_would_be_read_without_the_check(tmp_path, monkeypatch):
    # The control of LD-13: without its check the drafter loads.
    monkeypatch.setattr(body.BlockConfig, "__post_init__", lambda self: None)
    _, _, damage, _ = FAULTS["the last block"]
    assert read(tmp_path, "zlab", "flat", damage)[0].saved.config.taps == (1, 2, 5)


def test_a_head_of_its_own_would_be_lost_without_the_comparison(tmp_path, monkeypatch):
    # The control of 12.24.
    monkeypatch.setattr(copies, "check", lambda *_: [])
    _, _, damage, _ = FAULTS["a head of its own"]
    assert read(tmp_path, "speculators", "dflash", damage)[0].saved.config.draft_vocab == 40


def test_switches_would_be_ignored_without_the_check(tmp_path, monkeypatch):
    # The control of DR-7.
    monkeypatch.setattr(body, "SWITCHES", ())
    for fault in ("a norm before the fusion", "a norm of each tap", "biases"):
        name, variant, damage, _ = FAULTS[fault]
        read(tmp_path / fault, name, variant, damage)


# --- What is handled ------------------------------------------------------------------------------


def test_a_padded_vocabulary_is_cut(tmp_path):
    # LD-2: ids that the target does not know are left away, so none of them can be drafted.
    def padded(config, tensors):
        config["vocab_size"] = 72
        for name in (
            "embed_tokens.weight",
            "lm_head.weight",
            "markov_head.markov_w1.weight",
            "markov_head.markov_w2.weight",
        ):
            more = np.full((8, tensors[name].shape[1]), 100, tensors[name].dtype)
            tensors[name] = np.concatenate([tensors[name], more])

    found, _, _ = read(tmp_path, "deepspec", "dspark", padded)
    plain, _, _ = read(tmp_path / "plain", "deepspec", "dspark")
    jax.tree.map(np.testing.assert_array_equal, found.saved.params, plain.saved.params)
    assert found.saved.config == plain.saved.config and found.saved.ids is None
    assert any("padded to 72" in note for note in found.notes)
    tokens, _, _ = drafted(found.saved, published.target(), states_of(), 7)
    assert tokens.max() < 64


def test_tokens_in_d2t_are_told_from_offsets(tmp_path):
    # 12.25: both are in use; what `t2d` marks decides, and the drafts are the same.
    def absolute(config, tensors):
        tensors["d2t"] = published.PRUNED.astype(np.int64)

    found, _, _ = read(tmp_path, "speculators", "dflash", absolute)
    np.testing.assert_array_equal(found.saved.ids, published.PRUNED)
    assert any("not offsets" in note for note in found.notes)
    offsets, _, _ = read(tmp_path / "offsets", "speculators", "dflash")
    np.testing.assert_array_equal(offsets.saved.ids, published.PRUNED)
    assert not any("offsets" in note for note in offsets.notes)


def test_drafts_are_tokens_of_the_map(tmp_path):
    # DR-5: with the map i to 4 i the predecessor of a draft is a target id, and drafts are multiples of 4.
    ids = np.arange(16) * 4
    config, tensors = published.made("speculators", "dspark reduced")
    head = np.asarray(published.target().params.head)
    successor = np.zeros((64, 5), ml_dtypes.bfloat16)
    successor[:, 0] = np.roll(np.arange(64), 3)  # a code of the predecessor
    tensors |= {
        "d2t": ids - np.arange(16),
        "t2d": np.isin(np.arange(64), ids),
        "lm_head.weight": head[ids].astype(ml_dtypes.bfloat16),
        "markov_head.markov_w1.weight": np.random.default_rng(0).normal(size=(64, 5)).astype(ml_dtypes.bfloat16) * 8,
        "markov_head.markov_w2.weight": tensors["markov_head.markov_w2.weight"][:16],
    }
    config["draft_vocab_size"] = 16
    found = convert.read(published.put(tmp_path, config, tensors), published.target(), "float32")
    target = published.target()
    wanted, _, _ = published_reference.draft(
        "speculators", config, tensors, states_of(), 7, target.params.embed, target.params.head
    )
    tokens, _, _ = drafted(found.saved, target, states_of(), 7)
    np.testing.assert_array_equal(tokens, wanted)
    assert set(tokens % 4) == {0}


def test_a_confidence_head_alone_runs(tmp_path):
    # DR-9, third case: rank 0, a head that reads the hidden state only.
    def alone(config, tensors):
        config |= {"enable_confidence_head": True, "confidence_head_with_markov": False}
        tensors["confidence_head.proj.weight"] = np.ones((1, 32), ml_dtypes.bfloat16) / 32
        tensors["confidence_head.proj.bias"] = np.ones((1,), ml_dtypes.bfloat16)

    found = compare(tmp_path, "deepspec", "dflash", alone)
    assert found.saved.config.confidence == "hidden" and found.saved.params.markov is None


def test_temperatures_of_a_confidence_head_are_kept(tmp_path):
    given = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    found, _, _ = read(tmp_path, "deepspec", "dspark", put_key("confidence_temperatures", given))
    np.testing.assert_array_equal(found.saved.params.confidence.temperature, np.float32(given))


def test_settings_are_read_from_either_place(tmp_path):
    # DR-6: nested, beside the body, or both alike.
    a, _, _ = read(tmp_path / "a", "zlab", "flat")

    def lifted(config, tensors):
        config |= config.pop("dflash_config")

    def both(config, tensors):
        config |= config["dflash_config"]

    for number, damage in enumerate((lifted, both)):
        b, _, _ = read(tmp_path / str(number), "zlab", "flat", damage)
        assert b.saved.config == a.saved.config


def test_the_mask_may_come_from_the_tokenizer(tmp_path):
    # 12.23: the last resort is a token of that very name, never padding or an end.
    target = published.target()
    letters = [*target.tokenizer.special]
    assert body.MASK_TOKEN not in letters
    with_mask = dataclasses.replace(target, tokenizer=tokenizer(["a", "b", body.MASK_TOKEN]))
    found, _, _ = read(tmp_path, "zlab", "flat", drop_key("mask_token_id"), to=with_mask)
    assert found.saved.config.mask_id == 2


@pytest.mark.parametrize(("drafts", "from_anchor"), [(7, False), (8, True)])
def test_dspark_without_the_key_is_told_by_its_drafts(tmp_path, drafts, from_anchor):
    # 12.2, 12.3: exports from before the key keep the anchor's row; later ones leave out the default.
    def damage(config, tensors):
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = drafts

    found, _, _ = read(tmp_path, "speculators", "dspark anchor slot", damage)
    assert found.saved.config.from_anchor is from_anchor and found.saved.config.longest == drafts
    assert any("no `sample_from_anchor`" in note for note in found.notes)


def test_dflash_without_the_key_fills_in_whatever_it_proposes(tmp_path):
    # 12.3: a converter wrote `block_size` where `block_size - 1` was meant.
    def damage(config, tensors):
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 8

    found, _, _ = read(tmp_path, "speculators", "dflash without the key", damage)
    assert not found.saved.config.from_anchor and found.saved.config.longest == 7
    assert any("at most 7" in note for note in found.notes)


def test_the_trained_block_is_the_most_that_is_drafted(tmp_path):
    # 12.35
    found, _, _ = read(tmp_path, "deepspec", "dspark")
    BlockDrafter(config=found.saved.config, proposals=7)
    with pytest.raises(JspecError, match="rows beyond are noise"):
        BlockDrafter(config=found.saved.config, proposals=8)


def test_what_was_not_read_is_told(tmp_path):
    found, _, _ = read(tmp_path, "zlab", "flat", put_key("zeal", 3, True))
    assert "settings of its configuration that are not read: zeal" in found.notes
    found, _, _ = read(tmp_path / "quiet", "zlab", "flat")
    assert not found.notes
    found, _, _ = read(tmp_path / "named", "speculators", "dflash")
    assert "made for `Qwen/Qwen3.6-35B-A3B`; the target here is called `tiny`" in found.notes


@pytest.mark.parametrize(
    ("keys", "dtype", "given", "told"),
    [
        ({"dtype": "bfloat16"}, "bfloat16", None, "bfloat16: `dtype` of config.json"),
        ({"torch_dtype": "bfloat16"}, "bfloat16", None, "bfloat16: `torch_dtype` of config.json"),
        ({"dtype": "float32"}, "float32", None, "float32: `dtype` of config.json"),
        ({}, "bfloat16", None, "bfloat16: the tensors' own type: the configuration gives none"),
        ({"dtype": "auto"}, "bfloat16", "auto", "bfloat16: the tensors' own type"),
        ({"dtype": "float16"}, "bfloat16", None, "bfloat16 for float16"),
        ({"dtype": "bfloat16"}, "float32", "float32", "float32: asked for by the caller"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, None, None, "gives `dtype` as `bfloat16` and `torch_dtype`"),
        ({"dtype": "int8"}, None, None, "gives `dtype` as `int8`"),
        ({}, None, "float64", "`dtype` is `float64`"),
    ],
)
def test_the_number_type_is_decided_by_the_written_rule(tmp_path, keys, dtype, given, told):
    # LD-15
    def damage(config, tensors):
        config.pop("dtype")
        config |= keys

    if dtype is None:
        with pytest.raises(JspecError, match=told):
            read(tmp_path, "zlab", "flat", damage, dtype=given)
        return
    found, _, _ = read(tmp_path, "zlab", "flat", damage, dtype=given)
    assert found.saved.params.layers[0].q.dtype == dtype and found.dtype_rule.startswith(told)
    assert found.saved.params.layers[0].attn_norm.dtype == jnp.float32


# --- Recognised by content ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variant", "label"),
    [
        ("speculators", "dspark reduced", "DSparkDraftModel"),  # carries DeepSpec's name as published
        ("speculators", "dflash", "DFlashSpeculator"),
        ("angelslim", "dflare", "DFlashDraftModel"),  # 12.29: DFlare under DFlash's name
        ("specforge", "dspark", "DFlashDraftModel"),
        ("angelspec", "dflare", "QwenDFlareDraftModel"),
        ("zlab", "nested", "SomethingElse"),
    ],
)
def test_a_wrong_class_name_changes_nothing(tmp_path, name, variant, label):
    a, _, _ = read(tmp_path / "a", name, variant)
    b, _, _ = read(tmp_path / "b", name, variant, put_key("architectures", [label]))
    assert b.format.name == name and b.saved.config == a.saved.config


@pytest.mark.parametrize(
    ("name", "variant", "damage", "told"),
    [
        ("dflash2", "zlab", None, "holds DFlash2, which cannot be read yet"),
        ("dflash2", "zlab", put_key("architectures", ["DFlashDraftModel"]), "holds DFlash2"),
        ("eagle3", "legacy", None, "holds EAGLE-3, in the layout of its authors"),
        ("eagle3", "legacy", put_key("architectures", ["LlamaForCausalLM"]), "holds EAGLE-3"),
        ("eagle3", "speculators", None, "eagle3, in the format of speculators"),
        ("eagle3", "deepspec", None, "holds EAGLE-3"),
        ("eagle3", "deepspec", put_key("architectures", ["Qwen3DSparkModel"]), "holds EAGLE-3"),
        ("speculators", "dflash", put_key("speculators_model_type", "dflash2"), "holds dflash2"),
        ("speculators", "dflash", put_key("speculators_model_type", "mtp"), "holds mtp"),
        ("specforge", "dspark", put_key("projector_type", "domino", True), "projector `domino`"),
        ("deepspec", "dspark", put_key("architectures", ["Gemma4DSparkModel"]), "body of Gemma 4"),
        ("angelspec", "dspark", tensor("hidden_correction.up_proj.weight", lambda _: np.zeros(3, np.float32)), "DFly"),
        ("zlab", "flat", tensor("aux_hidden_norms.0.weight", lambda _: np.zeros(3, np.float32)), "Laguna"),
        ("zlab", "flat", put_key("format", "jspec.drafter"), "jspec's own format"),
        ("zlab", "flat", several(
            drop_key("dflash_config"), put_key("architectures", ["Qwen3ForCausalLM"])), "no drafter that is known"),
    ],
)  # fmt: skip
def test_other_drafters_are_refused_by_name(tmp_path, name, variant, damage, told):
    config, tensors = published.made(name, variant)
    if damage is not None:
        damage(config, tensors)
    folder = published.put(tmp_path, config, tensors)
    with pytest.raises(JspecError, match=told) as error:
        recognise(source.open_folder(folder))
    assert "DFlash of z-lab" in error.value.allowed or "published" in error.value.allowed


def test_folders_that_are_none(tmp_path):
    with pytest.raises(JspecError, match="is no folder"):
        convert.read(tmp_path / "nothing", published.target())
    (tmp_path / "empty").mkdir()
    with pytest.raises(JspecError, match=r"`config.json` cannot be read"):
        convert.read(tmp_path / "empty", published.target())
