"""The command on a tiny target: what it refuses, and that it refuses before anything long begins."""

import io
import json

import pytest

from jspec import cli
from jspec.target import loading
from tests.hostile import checkpoint


@pytest.fixture
def loads(monkeypatch):
    """The tiny target in place of any other; the calls that asked for one."""
    calls = []

    def load(*arguments, **_):
        calls.append(arguments)
        return checkpoint()

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(cli, "configure_cache", lambda _: None)
    return calls


def test_log_probabilities_are_strict_json(loads, capsys):
    call = ["generate", "--raw", "abc", "--max-tokens", "3", "--temperature", "1", "--top-k", "2", "--seed", "1"]
    assert cli.main([*call, "--logprobs", "4", "--logprobs-kind", "processed"]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]

    def refuse(word):
        raise AssertionError(word)

    for line in lines:
        top = json.loads(line, parse_constant=refuse)["top"]
        assert [value is None for _, value in top] == [False, False, True, True]


def test_standard_input_of_another_encoding_is_told(loads, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 is"), encoding="utf-8"))
    assert cli.main(["generate", "-"]) == 2
    assert "standard input is not utf-8 (byte 3 is `0xe9`)" in capsys.readouterr().err
    assert not loads


def test_doctor_takes_one_target(loads, capsys):
    assert cli.main(["doctor", "a", "--model", "b"]) == 2
    assert "two targets were given" in capsys.readouterr().err
    assert not loads


@pytest.mark.parametrize(
    ("flags", "piece"),
    [
        (["--seed", "-1"], "`seed` is `-1`"),
        (["--temperature", "nan"], "`temperature` is `nan`"),
        (["--output-len", "0"], "`max_tokens` is `0`"),
        (["--num-prompts", "0"], "`num_prompts` is `0`"),
        (["--dataset-name", "nothing"], "`nothing` is no data set"),
    ],
)
def test_bench_refuses_before_it_loads(loads, capsys, flags, piece):
    assert cli.main(["bench", *flags]) == 2
    assert piece in capsys.readouterr().err
    assert not loads


def test_bench_looks_at_the_directory_of_results_first(loads, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert cli.main(["bench", "--save-result", "--result-dir", str(tmp_path / "file" / "results")]) == 2
    assert "--result-dir" in capsys.readouterr().err
    assert not loads
