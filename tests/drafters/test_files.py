"""jspec's own drafter files: what is written comes back, every fault is refused by name.

Test 1 of drafters.md 13 for this format. Known failures covered: LD-3, LD-4, LD-12, LD-13, DR-8, DR-9.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.drafters import files, named
from jspec.drafters.block import weights as block
from jspec.drafters.block.config import BlockConfig, spread
from jspec.drafters.files import Saved
from jspec.errors import JspecError
from tests import tiny
from tests.drafters import blocks
from tests.hostile import checkpoint

KIND = "dspark gated pruned"


def saved(kind=KIND, target="abc", **changes):
    config = dataclasses.replace(blocks.KINDS[kind], **changes)
    return Saved(
        config=config,
        params=blocks.lent(kind).params,
        ids=blocks.pruned(config),
        target=target,
        record={"steps": 3},
    )


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_round_trip(tmp_path, kind):
    given = saved(kind)
    files.save(tmp_path / "d", given, jnp.float32)
    got = files.load(tmp_path / "d")
    assert (got.config, got.target, got.record) == (given.config, "abc", {"steps": 3})
    jax.tree.map(np.testing.assert_array_equal, got.params, given.params)
    assert (got.ids is None) == (given.ids is None)
    assert got.ids is None or (got.ids == given.ids).all()
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["config.json", "model.safetensors"]


def test_bfloat16_is_kept_and_vectors_stay_exact(tmp_path):
    files.save(tmp_path, saved())
    got = files.load(tmp_path).params
    assert got.layers[0].q.dtype == jnp.bfloat16 and got.layers[0].attn_norm.dtype == jnp.float32
    np.testing.assert_array_equal(got.layers[0].attn_norm, blocks.lent(KIND).params.layers[0].attn_norm)


def change_config(folder, change):
    document = json.loads((folder / "config.json").read_text())
    change(document)
    (folder / "config.json").write_text(json.dumps(document))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def setting(name, value):
    return lambda folder: change_config(folder, lambda d: d["config"].__setitem__(name, value))


def tensor(name, make):
    return lambda folder: change_tensors(folder, lambda t: t.__setitem__(name, make(t.get(name))))


FAULTS = {
    "tensor missing": (lambda f: change_tensors(f, lambda t: t.pop("layers.1.q")), "lacks the tensor `layers.1.q`"),
    "tensor renamed": (
        lambda f: change_tensors(f, lambda t: t.__setitem__("layers.1.Q", t.pop("layers.1.q"))),
        "lacks the tensor `layers.1.q`",
    ),
    "tensor besides": (tensor("more", lambda _: np.zeros(3, np.float32)), "has besides the tensor `more`"),
    "tensor of another shape": (tensor("final_norm", lambda x: x[:-1]), r"`final_norm` as F32 of shape \(31,\)"),
    "vector in bfloat16": (tensor("final_norm", lambda x: x.astype(ml_dtypes.bfloat16)), "`final_norm` as BF16"),
    "not finite": (tensor("final_norm", lambda x: x * np.inf), "`final_norm` that is not finite"),
    "map missing": (lambda f: change_tensors(f, lambda t: t.pop("ids")), "lacks the tensor `ids`"),  # LD-3
    "map too short": (tensor("ids", lambda x: x[:-1]), "`ids` as I32"),
    "no config": (lambda f: (f / "config.json").unlink(), "`config.json` cannot be read"),
    "another format": (lambda f: change_config(f, lambda d: d.update(format="x")), "is not a drafter of jspec"),
    "later version": (lambda f: change_config(f, lambda d: d.update(version=2)), "is of version 2"),
    "another kind": (lambda f: change_config(f, lambda d: d.update(kind="x")), "of kind `x`"),
    "key missing": (lambda f: change_config(f, lambda d: d["config"].pop("block")), "lacks the key `block`"),
    "key unknown": (setting("zeal", 1), "the unknown key `zeal`"),
    "taps a number": (setting("taps", 3), "of the wrong kind"),
    "no taps": (setting("taps", []), "taps the target's blocks"),  # LD-12
    "last block tapped": (setting("taps", [0, 1]), "not the last block"),  # LD-13
    "tap beyond": (setting("taps", [0, 9]), "not the last block"),
    "tap below": (setting("taps", [-2, 0]), "not the last block"),
    "one tap fewer": (setting("taps", [0]), r"`fuse` as F32 of shape \(32, 64\)"),  # LD-12
    "mask beyond": (setting("mask_id", 64), "mask token is `64`"),  # DR-8
    "mask missing": (setting("mask_id", None), "`mask_id`|wrong kind"),
    "rank without head": (setting("markov", None), "no Markov head"),  # DR-9
    "confidence of a head that is not there": (
        lambda f: change_config(
            f, lambda d: d["config"].update(markov=None, rank=0, shared_row=False, confidence="markov")
        ),
        "the Markov head is `None`",
    ),
    "block of one row": (setting("block", 0), "block has `0` rows"),
    "vocabulary too large": (setting("draft_vocab", 65), "the draft vocabulary has `65`"),
    "family unknown": (setting("family", "dflash2"), "family is `'dflash2'`"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_by_name(tmp_path, fault):
    files.save(tmp_path, saved(shared_row=False) if "rank" in fault else saved(), jnp.float32)
    if "rank" in fault:  # W1 then has a row for every token of the target
        change_tensors(tmp_path, lambda t: t.__setitem__("markov.previous", np.zeros((64, 5), np.float32)))
    damage, told = FAULTS[fault]
    damage(tmp_path)
    with pytest.raises(JspecError, match=told):
        files.load(tmp_path)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (None, "no map says which"),  # LD-3
        (np.arange(40) + 30, "names `64`"),  # LD-4
        (np.arange(40) - 1, "names `-1`"),
        (np.arange(40) // 2, "names a token twice"),
        (np.arange(39), r"has shape `\(39,\)`"),
    ],
)
def test_maps_that_cannot_be_are_refused(ids, told):
    given = saved()
    with pytest.raises(JspecError, match=told):
        block.lend(given.config, given.params, ids, tiny.params(), tiny.T)


def test_a_drafter_for_another_target_is_refused(tmp_path):
    target = checkpoint()
    files.save(tmp_path / "d", saved("dflash", target="0" * 64))
    with pytest.raises(JspecError, match="was trained for the target `000000000000`"):
        named.drafter(f"{tmp_path}/d_k3", target)
    files.save(tmp_path / "d", saved("dflash", target=target.fingerprint))
    chosen, lent = named.drafter(f"{tmp_path}/d_k3", target)
    assert chosen.name == "dflash_k3" and lent.head.shape == (64, 32)
    with pytest.raises(JspecError, match="whose `layers` is `5`"):
        block.lend(
            dataclasses.replace(saved("dflash").config, target_layers=5),
            lent.params,
            None,
            target.params,
            target.config,
        )


def test_the_rule_for_taps():
    # The lists of drafters.md 1.3.
    assert spread(28, 5) == (1, 7, 13, 19, 25)
    assert spread(36, 5) == (1, 9, 17, 25, 33)
    assert spread(36, 9) == (1, 5, 9, 13, 17, 21, 25, 29, 33)
    assert spread(40, 5) == (1, 10, 19, 28, 37)
    assert spread(64, 5) == (1, 16, 31, 46, 61)
    assert spread(30, 1) == (15,)


def test_every_setting_is_in_the_file(tmp_path):
    files.save(tmp_path, saved())
    document = json.loads((tmp_path / "config.json").read_text())
    assert set(document["config"]) == {f.name for f in dataclasses.fields(BlockConfig)}
