"""Published drafters: rewritten in our format and back without loss; files that were made to trip the reader."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.drafters import files, named
from jspec.drafters.formats import convert, layout, source
from jspec.drafters.formats.recognise import FORMATS, recognise
from jspec.errors import JspecError
from tests.drafters import published
from tests.drafters.published import read

EVERY = published.variants()

HOSTILE = ["x", -1, 0, 1e308, 10**30, True, [[]], [10**30], {"x": 1}]


@pytest.mark.parametrize("name", published.READ)
def test_odd_configurations_end_in_an_error_of_ours(tmp_path, name):
    """Any value in any place either loads or is refused; nothing else is raised."""
    variant = next(iter(published.listing(name)["variants"]))
    config, tensors = published.made(name, variant)
    folder = published.put(tmp_path, config, tensors)
    nests = [k for k, v in config.items() if isinstance(v, dict) and k != "auto_map"]
    for place in [(), *((k,) for k in nests)]:
        keys = config if not place else config[place[0]]
        for key in [*keys, "quantization_config", "confidence_temperatures", "draft_vocab_size", "is_causal"]:
            for value in HOSTILE:
                changed = json.loads(json.dumps(config))
                (changed if not place else changed[place[0]])[key] = value
                (folder / "config.json").write_text(json.dumps(changed))
                try:
                    opened = source.open_folder(folder)
                    reading = recognise(opened).read(opened, published.target())
                    layout.check(opened, reading)
                except JspecError:
                    continue


@pytest.mark.parametrize("name", published.READ)
def test_odd_tensors_end_in_an_error_of_ours(tmp_path, name):
    variant = next(iter(published.listing(name)["variants"]))
    config, tensors = published.made(name, variant)
    for number, held in enumerate(n for n in tensors if "layers.1." not in n):
        for shape in {(), (0,), (0, 32), (1,), (2, 2, 2)} - {tensors[held].shape}:
            changed = tensors | {held: np.zeros(shape, tensors[held].dtype)}
            folder = published.put(tmp_path / f"{number}", config, changed)
            with pytest.raises(JspecError):
                convert.read(folder, published.target())


# --- Conversion -----------------------------------------------------------------------------------


def same(a, b):
    assert a.config == b.config and a.target == b.target
    assert (a.ids is None) == (b.ids is None) and (a.ids is None or (a.ids == b.ids).all())
    assert jax.tree.structure(a.params) == jax.tree.structure(b.params)
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(("name", "variant"), EVERY)
def test_to_our_format_and_back_without_loss(tmp_path, name, variant):
    target = published.target()
    found, config, tensors = read(tmp_path / "theirs", name, variant, dtype=None)
    convert.convert(tmp_path / "theirs", tmp_path / "ours", target)
    ours = files.load(tmp_path / "ours")
    same(ours, found.saved)
    assert ours.record["format"] == name and ours.record["configuration"] == config
    chosen, _ = named.drafter(f"{tmp_path}/ours_k3", target)
    assert chosen.name == f"{ours.config.family}_k3"
    direct, _ = named.drafter(f"{tmp_path}/theirs_k3", target)
    assert direct.config == chosen.config
    wrote = 0
    for to, one in FORMATS.items():
        if one.write is None:
            continue
        try:
            convert.convert(tmp_path / "ours", tmp_path / to, target, to)
        except JspecError as error:
            assert f"the format `{to}` has no place for" in str(error)
            assert to != name
            continue
        wrote += 1
        again = convert.read(tmp_path / to, target)
        assert again.format.name == to
        same(again.saved, found.saved)
        if to == name:  # each tensor as it was, to the bit
            back = load_file(tmp_path / to / "model.safetensors")
            for tensor_name, value in tensors.items():
                common = tensor_name.removeprefix("logit_head.")
                if common in back:
                    np.testing.assert_array_equal(back[common], value)
                else:  # copies of the target's
                    assert common in ("embed_tokens.weight", "lm_head.weight"), common
    assert wrote >= (0 if name == "angelspec" else 1)


def test_formats_that_can_hold_a_drafter():
    # What `--to` offers, and that AngelSpec's, which lacks the block, is not written.
    assert [f.name for f in FORMATS.values() if f.write is None] == ["angelspec"]


def test_conversions_that_cannot_be(tmp_path):
    target = published.target()
    read(tmp_path / "theirs", "zlab", "flat")
    with pytest.raises(JspecError, match="format to write is `gguf`"):
        convert.convert(tmp_path / "theirs", tmp_path / "out", target, "gguf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("")
    with pytest.raises(JspecError, match="is there already"):
        convert.convert(tmp_path / "theirs", tmp_path / "full", target)
    with pytest.raises(JspecError, match="has no place for one fusion for all layers"):
        convert.convert(tmp_path / "theirs", tmp_path / "out", target, "angelslim")
    assert not (tmp_path / "out").exists()
    convert.convert(tmp_path / "theirs", tmp_path / "ours", target)
    with pytest.raises(JspecError, match="was trained for the target"):
        convert.convert(tmp_path / "ours", tmp_path / "out", published.target(seed=1), "zlab")
    with pytest.raises(JspecError, match="`dtype` is `float32`"):
        convert.convert(tmp_path / "ours", tmp_path / "out", target, dtype="float32")


def test_other_kinds_of_ours_are_not_converted(tmp_path, monkeypatch):
    target = published.target()
    read(tmp_path / "theirs", "zlab", "flat")
    convert.convert(tmp_path / "theirs", tmp_path / "ours", target)
    other = dataclasses.replace(files.load(tmp_path / "ours"), config=target.config)
    monkeypatch.setattr(convert, "load", lambda *_: other)
    with pytest.raises(JspecError, match="of kind `TargetConfig`"):
        convert.convert(tmp_path / "ours", tmp_path / "out", target, "zlab")


def test_a_drafter_with_copies_knows_its_target(tmp_path):
    # 12.15: another target of the very same shape, as a fine-tuned one is.
    with pytest.raises(JspecError, match=r"not the one of `tiny`: 64 of 64 rows differ"):
        read(tmp_path, "deepspec", "dspark", to=published.target(seed=1))


def test_the_command_tells_how_a_drafter_was_understood(tmp_path, capsys, monkeypatch):
    from jspec import cli
    from jspec.target import loading

    read(tmp_path / "theirs", "speculators", "dspark reduced")
    monkeypatch.setattr(loading, "load", lambda *_, **__: published.target())
    monkeypatch.setattr(cli, "configure_cache", lambda _: None)
    assert cli.main(["convert", str(tmp_path / "theirs"), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    for piece in (
        "DFlash or DSpark of speculators, dtype bfloat16: the tensors' own type",
        "drafts 40 of 64 tokens",
        "8 rows, every row predicts, the anchor's too: up to 8 drafts",
        "taps      blocks [1, 2, 4] of 6",
        "mask      token 63",
        "target    tiny",
    ):
        assert piece in out
    facts = json.loads(out.splitlines()[-1])
    assert facts["from"] == "speculators" and facts["config"]["taps"] == [1, 2, 4]
    assert cli.main(["convert", str(tmp_path / "theirs"), str(tmp_path / "out")]) == 2
    assert "is there already" in capsys.readouterr().err
