"""`jspec synthesise`: plans as TOML, what of them is refused, and texts that go on where they stopped."""

import json
from pathlib import Path

import pytest

from jspec.cli import main
from jspec.errors import JspecError
from jspec.training import plan, prompts, texts
from jspec.training.texts import Prompt
from tests.hostile import checkpoint

TOML = """
slots = 3
max_length = 96
shard = 4
[answers]
max_tokens = 24
temperature = 0.8
[invented]
temperature = 1.0
max_tokens = 40
seed = 3
[[sources]]
kind = "math"
file = "sums.jsonl"
[[sources]]
kind = "chat"
file = "talk.jsonl"
[[sources]]
kind = "chat"
invent = "0"
"""


@pytest.fixture
def data(tmp_path):
    sums = [Prompt(id=f"s{i}", kind="math", turns=("abc"[: 1 + i % 3] * (1 + i),)) for i in range(9)]
    prompts.write(tmp_path / "data" / "sums.jsonl", sums)
    prompts.write(tmp_path / "data" / "talk.jsonl", [Prompt(id="t", kind="chat", turns=("hello", "and"))])
    said = " ".join(f"w{i}" for i in range(13))
    prompts.write(tmp_path / "bench.jsonl", [Prompt(id="b", kind="chat", turns=("abab", said))])
    return tmp_path


def run(folder, out="out", *, tokens=10_000, text=TOML, stop=lambda: False):
    (folder / "plan.toml").write_text(text)
    lines = []
    ended = plan.run(
        plan.read(folder / "plan.toml"),
        checkpoint(),
        folder / out,
        data=folder / "data",
        benchmarks=[folder / "bench.jsonl"],
        tokens=tokens,
        tell=lines.append,
        stop=stop,
    )
    return ended, lines


def files(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.glob("**/*")) if p.is_file()}


def test_texts_of_a_plan(data):
    ended, lines = run(data)
    assert ended and lines[-1].endswith("answer tokens")
    got = list(texts.load_all(data / "out" / "texts"))
    kinds = {t.id.split("/")[0].split("-")[0]: t.kind for t in got}
    assert kinds["s2"] == "math" and {"t", "invented"} <= set(kinds), kinds
    # `abab` is a benchmark's prompt, so it is asked for nowhere and named.
    report = json.loads((data / "out" / "overlap.json").read_text())
    assert [hit["prompt"] for hit in report["left_out"]] == ["s1"] and not any(t.id == "s1/0" for t in got)
    # Stopped after each file and begun again it is the same.
    for calls in range(1, len(list((data / "out" / "texts").iterdir()))):
        asked = iter([False] * (calls - 1) + [True])
        assert not run(data, "parts", stop=lambda left=asked: next(left))[0]
    assert run(data, "parts")[0]
    assert files(data / "parts") == files(data / "out")


def test_prompts_of_an_earlier_run_are_skipped(data):
    assert run(data, text=TOML.replace('file = "sums.jsonl"', 'file = "sums.jsonl"\nskip = 3'))[0]
    got = [t.id for t in texts.load_all(data / "out" / "texts") if t.kind == "math"]
    assert got and not {"s0/0", "s1/0", "s2/0"} & set(got)


def test_it_ends_at_the_number_of_tokens(data):
    assert run(data, tokens=1)[0]
    assert [p.name for p in (data / "out" / "texts").iterdir()] == ["00000.npz"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("slots = 3", "slots = 0"), "`slots`"),
        (("slots = 3", "slots = true"), "`slots`"),
        (("slots = 3", "slot = 3"), "`slot`"),
        (("slots = 3", "slots = ["), "cannot be read"),
        (("max_tokens = 24", "length = 24"), "length"),
        (("max_tokens = 24", "max_tokens = 0"), "max_tokens"),
        (("temperature = 0.8", "temperature = -1.0"), "temperature"),
        (('file = "sums.jsonl"', ""), "a source of prompts"),
        (('file = "sums.jsonl"', 'file = "sums.jsonl"\ninvent = ""'), "a source of prompts"),
        (('file = "sums.jsonl"', 'file = "none.jsonl"'), "cannot be read"),
        (('file = "sums.jsonl"', 'file = "sums.jsonl"\nskip = -1'), "a source of prompts"),
        (('kind = "math"', 'kind = "sport"'), "a source of prompts"),
        (('kind = "math"', 'kind = "math"\nname = "x"'), "is no plan"),
    ],
    ids=str,
)
def test_what_is_no_plan_is_refused(data, change, message):
    assert change[0] in TOML
    with pytest.raises(JspecError, match=message):
        run(data, text=TOML.replace(*change))


def test_a_plan_without_sources_is_refused(data):
    with pytest.raises(JspecError, match="no `sources`"):
        run(data, text="slots = 3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["missing.toml", "--tokens", "5"], "cannot be read"), (["plan.toml", "--tokens", "0"], "`--tokens` is `0`")],
)
def test_commands_that_cannot_run(data, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(data)
    (data / "plan.toml").write_text(TOML)
    assert main(["synthesise", *arguments, "--out", "x"]) == 2
    assert message in capsys.readouterr().err and not (data / "x").exists()


def test_files_need_a_folder(data):
    (data / "plan.toml").write_text(TOML)
    with pytest.raises(JspecError, match="no folder of data"):
        plan.run(plan.read(data / "plan.toml"), checkpoint(), data / "x", data=None, benchmarks=[], tokens=1)


def test_the_plans_that_come_along_are_read():

    for path in sorted((Path(__file__).parents[2] / "configs" / "texts").glob("*.toml")):
        assert plan.read(path).sources
