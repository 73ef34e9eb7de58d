"""Files of EAGLE-3 drafters: what is written comes back, decodes by its name, and every fault is refused.

Test 1 of drafters.md 13 for this format. Known failures covered: LD-3, LD-13, DR-7.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.drafters import files, named
from jspec.drafters.files import Saved
from jspec.errors import JspecError
from tests import tiny
from tests.drafters import eagles
from tests.hostile import checkpoint


def saved(kind, target="abc"):
    config = eagles.KINDS[kind]
    params = eagles.lent(kind).params
    return Saved(config=config, params=params, ids=eagles.pruned(config), target=target, record={"steps": 3})


@pytest.mark.parametrize("kind", eagles.KINDS)
def test_round_trip(tmp_path, kind):
    given = saved(kind)
    files.save(tmp_path, given, jnp.float32)
    got = files.load(tmp_path)
    assert (got.config, got.target, got.record) == (given.config, "abc", {"steps": 3})
    jax.tree.map(np.testing.assert_array_equal, got.params, given.params)
    assert (got.ids is None) == (given.ids is None)
    assert got.ids is None or (got.ids == given.ids).all()
    document = json.loads((tmp_path / "config.json").read_text())
    assert document["kind"] == "eagle3" and set(document["config"]) == {f.name for f in dataclasses.fields(got.config)}


def setting(name, value):
    def damage(folder):
        document = json.loads((folder / "config.json").read_text())
        document["config"][name] = value
        (folder / "config.json").write_text(json.dumps(document))

    return damage


def tensors(change):
    def damage(folder):
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return damage


FAULTS = {
    "head missing": (tensors(lambda t: t.pop("head")), "lacks the tensor `head`"),
    "map missing": (tensors(lambda t: t.pop("ids")), "lacks the tensor `ids`"),  # LD-3
    "tensor besides": (tensors(lambda t: t.update(more=np.zeros(3, np.float32))), "has besides the tensor `more`"),
    "head of all tokens": (tensors(lambda t: t.update(head=np.zeros((64, 32), np.float32))), r"`head` as F32 of shape"),
    "head that it has not": (setting("own_head", False), "has besides the tensor `head`"),
    "norm of taps ignored": (setting("fuse_norm", None), "has besides the tensor `fuse_norm`"),  # DR-7
    "norm of queries ignored": (setting("qk_norm", False), "has besides the tensor `k_norm`"),
    "norm unknown": (setting("fuse_norm", "some"), "`fuse_norm` of the drafter is `'some'`"),
    "switch a number": (setting("norm_output", 1), "`norm_output` of the drafter is `1`"),
    "last block tapped": (setting("taps", [0, 1]), "not the last block"),  # LD-13
    "one tap fewer": (setting("taps", [0]), r"`fuse_norm` as F32 of shape \(64,\)"),
    "no steps": (setting("steps", 0), "`steps` of the drafter is `0`"),
    "odd heads": (setting("kv_heads", 3), "key/value heads that divide"),
    "vocabulary too large": (setting("draft_vocab", 65), "the draft vocabulary has `65`"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_by_name(tmp_path, fault):
    files.save(tmp_path, saved("norm of each tap"), jnp.float32)
    damage, told = FAULTS[fault]
    damage(tmp_path)
    with pytest.raises(JspecError, match=told):
        files.load(tmp_path)


def test_a_folder_is_a_drafter_of_its_target_alone(tmp_path):
    target = checkpoint()
    files.save(tmp_path / "d", saved("pruned", target="0" * 64))
    with pytest.raises(JspecError, match="was trained for the target `000000000000`"):
        named.drafter(f"{tmp_path}/d_k3", target)
    files.save(tmp_path / "d", saved("pruned", target=target.fingerprint))
    chosen, lent = named.drafter(f"{tmp_path}/d_k3", target)
    assert (chosen.name, chosen.mode, chosen.taps) == ("eagle3_k3", "coupled", (-1, 0))
    assert lent.head is None  # its own is used, and the target's rows would only lie there
    assert named.drafter(f"{tmp_path}/d_k3", target, accept="rejection")[0].draws
    with pytest.raises(JspecError, match="whose `layers` is `5`"):
        dataclasses.replace(chosen.config, target_layers=5).check_target(tiny.T)
