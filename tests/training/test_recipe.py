"""`jspec train`: recipes as TOML, what of them is refused, and a run from texts to a drafter that loads.

Known failures: DR-3.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jspec.cli import main
from jspec.drafters import named
from jspec.errors import JspecError
from jspec.training import loop, recipe, synthesise, texts
from jspec.training.texts import Prompt
from tests import tiny
from tests.hostile import checkpoint

TOML = """
[drafter]
family = "dspark"
block = 7
from_anchor = true
taps = [-1, 0]
ff_width = 32
draft_vocab = 50
markov = "vanilla"
rank = 4
shared_row = true
confidence = "hidden"
[data]
held_out = 2
decoded = 2
[batch]
rows = 2
length = 96
anchors = 16
[objective]
variation = 1.0
[optimizer]
steps = 4
rate = 1e-3
[run]
dtype = "float32"
evaluate_every = 2
log_every = 1
"""


def written(tmp_path, text=TOML):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def target():
    return checkpoint()


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    asked = [Prompt(id=str(i), kind="chat", turns=(word,)) for i, word in enumerate(["a", "bc", "cab", "b", "ca"])]
    config = tiny.engine(2, max_length=96)
    list(synthesise.run(target, config, asked, synthesise.Settings(max_tokens=20), folder, shard=3))
    return folder


def test_from_texts_to_a_drafter(target, answers, tmp_path):
    # T says any token: its special ones are among them, so none can be found that no text holds.
    with pytest.raises(JspecError, match="every special token"):
        recipe.run(recipe.read(written(tmp_path)), target, [answers], tmp_path / "out")
    said = np.concatenate([text.tokens for text in texts.load_all(answers)])
    unsaid = int(np.setdiff1d(np.arange(64), said)[0])
    text = TOML.replace("block = 7", f"block = 7\nmask_id = {unsaid}")
    mine, lines = recipe.read(written(tmp_path, text)), []
    assert recipe.run(mine, target, [answers], tmp_path / "out", tell=lines.append, stop=lambda: True) is None
    assert not any("features" in line for line in lines)  # it stopped before the first of them
    calls = iter([False, False, False, True])  # two shards of features, two steps
    assert recipe.run(mine, target, [answers], tmp_path / "out", tell=lines.append, stop=lambda: next(calls)) is None
    folder = recipe.run(mine, target, [answers], tmp_path / "out", tell=lines.append)
    drafter, weights = named.load(folder, target, proposals=3)
    assert drafter.config.mask_id == unsaid and drafter.config.taps == (-1, 0)
    assert weights.ids.shape == (50,)
    # Its vocabulary holds every token that it was to learn, as there are few of them.
    found = list(texts.load_all(answers))
    learned, held = recipe.split(found, 2, 0)
    assert len(held) == 2 and len(learned) == 3
    assert np.isin(np.concatenate([t.tokens[t.loss_mask] for t in learned]), weights.ids).all()
    # The texts are the target's greedy answers, so decoding them accepts what was told from them.
    last = loop.read_metrics(tmp_path / "out" / "run")[-1]["evaluation"]
    assert last["decoded_length_k7"] == last["decoded_simulated_length_k7"] == last["length_k7"] > 1
    assert (tmp_path / "out" / "run" / "metrics.png").read_bytes().startswith(b"\x89PNG")


def test_texts_of_another_target_are_refused(target, answers, tmp_path):
    other = dataclasses.replace(target, fingerprint="0" * 64)
    with pytest.raises(JspecError, match="written by the target"):
        recipe.run(recipe.read(written(tmp_path)), other, [answers], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mask_token_that_texts_hold_is_refused(target, answers, tmp_path):
    used = int(next(texts.load_all(answers)).tokens[-1])
    text = TOML.replace("block = 7", f"block = 7\nmask_id = {used}")
    with pytest.raises(JspecError, match="mask token"):
        recipe.run(recipe.read(written(tmp_path, text)), target, [answers], tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("[run]", "[runs]", "runs"),
        ("log_every", "log_evry", "log_evry"),
        ("steps = 4", "steps = 4\nepochs = 1", "lengths"),
        ("steps = 4", "", "lengths"),
        ("held_out = 2", "held_out = -1", "held_out"),
        ("held_out = 2", 'features = "disk"', "features"),
        ("[data]", "[data", "cannot be read"),
        ("rows = 2", "rows = 0", "rows"),
    ],
)
def test_bad_recipes_are_refused(tmp_path, old, new, match):
    with pytest.raises(JspecError, match=match):
        recipe.read(written(tmp_path, TOML.replace(old, new, 1)))


def test_the_command_tells_what_is_wrong(tmp_path, capsys):
    assert main(["train", str(tmp_path / "none.toml"), "--texts", "x", "--out", str(tmp_path / "out")]) != 0
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_shipped_recipes_read():
    paths = sorted((Path(__file__).parents[2] / "configs" / "train").glob("*.toml"))
    assert paths
    for path in paths:
        recipe.read(path)
