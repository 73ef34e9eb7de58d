"""Data sets: layouts, limits and their unit, hostile files, and the way to the hub."""

import http.server
import importlib.util
import json
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from jspec.errors import JspecError
from jspec.measure import hub, suites
from jspec.measure.suites import BUILTIN, NAMES, Prompt, describe, load


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def fails(given: str, *args, **kwargs) -> str:
    """Loads what must be refused; the error's first part is checked, all of its text is returned."""
    with pytest.raises(JspecError) as caught:
        load(*args, **kwargs)
    error = caught.value
    assert given in error.given, error.given
    assert error.allowed and error.action
    return str(error)


# Layouts.

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Bye"}]


@pytest.mark.parametrize(
    ("record", "turns", "system"),
    [
        ({"turns": ["a", "b"]}, ("a", "b"), None),
        ({"prompt": "a"}, ("a",), None),
        ({"prompt": ["a", "b"]}, ("a", "b"), None),
        ({"prompt": CHAT}, ("Hi", "Bye"), "Be brief."),
        ({"question": "a", "answer": "x"}, ("a",), None),
        ({"problem": "a"}, ("a",), None),
        ({"text": "a"}, ("a",), None),
        ({"prompt": "Hi", "messages": CHAT}, ("Hi", "Bye"), "Be brief."),
        ({"conversations": SHAREGPT}, ("Hi", "Bye"), None),
        ({"conversation": SHAREGPT}, ("Hi", "Bye"), None),
        ({"instruction": "Do", "instances": [{"input": "x", "output": "y"}, {"input": "z"}]}, ("Do\n\nx",), None),
        ({"instruction": "Do", "instances": [{"input": "", "output": "y"}]}, ("Do",), None),
        ({"instruction": "Do", "instances": []}, ("Do",), None),
        ({"instruction": "Do", "input": "x", "output": "y"}, ("Do\n\nx",), None),
        ({"turns": ["line one\nline two\u2028still a line"]}, ("line one\nline two\u2028still a line",), None),
        ({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]}, ("Hi",), None),
    ],
)
def test_layouts(tmp_path, record, turns, system):
    assert load("custom", path=write(tmp_path / "a.jsonl", record)) == [Prompt("custom", 0, turns, system)]


def test_containers(tmp_path):
    expected = [Prompt("custom", i, (t,)) for i, t in enumerate("ab")]
    array = json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=1)
    (tmp_path / "a.json").write_text(array)
    (tmp_path / "lines.json").write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}')  # lines under the other name
    (tmp_path / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    (tmp_path / "raw.jsonl").write_text('{"prompt": "a\u2028b"}\n{"prompt": "c\x85d"}\n', encoding="utf-8")
    for file in ("a.json", "lines.json", "bom.jsonl"):
        assert load("custom", path=tmp_path / file) == expected
    assert [p.turns for p in load("custom", path=str(tmp_path / "raw.jsonl"))] == [("a\u2028b",), ("c\x85d",)]


def test_a_directory_is_searched_by_name(tmp_path):
    write(tmp_path / "gsm8k.jsonl", {"turns": ["a"]})
    (tmp_path / "sharegpt.json").write_text(json.dumps([{"conversations": SHAREGPT}]))
    assert load("gsm8k", path=tmp_path) == [Prompt("gsm8k", 0, ("a",))]
    assert load("sharegpt", path=tmp_path) == [Prompt("sharegpt", 0, ("Hi",))]
    assert "`mbpp.jsonl`, `mbpp.json`, `mbpp.parquet`" in fails("holds no file for `mbpp`", "mbpp", path=tmp_path)


def test_published_records_get_the_wording_and_prepared_turns_do_not(tmp_path):
    boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    for name, key, text, wanted in [
        ("math500", "problem", "What is $\\frac{1}{2}$?", "What is $\\frac{1}{2}$?" + boxed),
        ("gsm8k", "question", "{} ducks", "{} ducks" + boxed),
        (
            "humaneval",
            "prompt",
            "def f():\n",
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```",
        ),
        ("mbpp", "prompt", "Write a function.", "Write a function."),
        ("spec_bench", "turns", ["a", "b"], ["a", "b"]),
        ("mt_bench", "prompt", ["a", "b"], ["a", "b"]),
    ]:
        published = load(name, path=write(tmp_path / "a.jsonl", {key: text, "answer": "1", "solution": "s"}))
        assert list(published[0].turns) == ([wanted] if isinstance(wanted, str) else wanted)
        prepared = load(name, path=write(tmp_path / "a.jsonl", {"turns": ["as it is"]}))
        assert prepared[0].turns == ("as it is",)


def test_recorded_chats_are_asked_their_opening_alone(tmp_path):
    file = write(
        tmp_path / "a.jsonl",
        {"conversations": []},
        {"conversations": [{"from": "gpt", "value": "..."}, {"from": "human", "value": "go on"}]},
        {"conversations": [*SHAREGPT[:2], {"from": "wizard", "value": None}]},  # nobody asks this far
    )
    # The place in the file stays, so that a subset can be traced back.
    assert load("sharegpt", path=file) == [Prompt("sharegpt", 2, ("Hi",))]
    fails("line 1 of", "custom", path=file)


# Conversations and turns.


def test_bm_7_a_conversation_is_run_turn_by_turn_and_counted_in_both_units(tmp_path):
    file = write(tmp_path / "a.jsonl", {"turns": ["a1", "a2"]}, {"turns": ["b1", "b2"]})
    # The limit counts conversations: 4 and 3 both take all there is, and nothing is asked twice.
    for limit in (4, 3, 2, None):
        prompts = load("custom", path=file, num_prompts=limit)
        assert describe(prompts) == "2 conversations, 4 turns"
        assert [p.turns for p in prompts] == [("a1", "a2"), ("b1", "b2")]
    assert describe(load("custom", path=file, num_prompts=1)) == "1 conversation, 2 turns"
    assert "counted in conversations" in fails("`num_prompts` is `0`", "custom", path=file, num_prompts=0)

    asked = []
    for prompt in prompts:
        answers: list[str] = []
        for turn in range(len(prompt.turns)):
            history = prompt.messages(answers)
            asked.append([m["content"] for m in history])
            assert [m["role"] for m in history] == ["user", "assistant"] * turn + ["user"]
            answers.append(f"own answer to {history[-1]['content']}")
    assert asked == [["a1"], ["a1", "own answer to a1", "a2"], ["b1"], ["b1", "own answer to b1", "b2"]]
    with pytest.raises(JspecError, match="turns 1 to 2"):
        prompt.messages(answers)


def test_the_system_message_comes_first():
    assert Prompt("custom", 0, ("Hi",), "Be brief.").messages()[0] == {"role": "system", "content": "Be brief."}


def test_subsets_are_deterministic(tmp_path):
    file = write(tmp_path / "a.jsonl", *({"prompt": f"p{i}"} for i in range(50)))
    everything = load("custom", path=file)
    assert load("custom", path=file, num_prompts=7, seed=3) == everything[:7]
    shuffled = load("custom", path=file, seed=3, shuffle=True)
    assert sorted(shuffled, key=lambda p: p.conversation) == everything
    assert shuffled != everything
    assert load("custom", path=file, num_prompts=7, seed=3, shuffle=True) == shuffled[:7]
    assert load("custom", path=file, num_prompts=7, seed=4, shuffle=True) != shuffled[:7]
    # Pinned: another choice under the same seed would make old and new figures differ unseen.
    assert [p.conversation for p in shuffled[:7]] == [22, 5, 13, 15, 41, 32, 43]


# Built-in sets.


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_sets(name):
    prompts = load(name)
    assert len(prompts) >= 16
    texts = [t for p in prompts for t in p.turns]
    assert len(set(texts)) == len(texts)
    assert all(20 < len(t) < 1500 and t == t.strip() for t in texts)
    assert load(name, num_prompts=5) == prompts[:5]
    fails("was given the path", name, path="x.jsonl")


def test_the_builtin_chats_hold_conversations_of_two_turns():
    assert sum(len(p.turns) == 2 for p in load("builtin_chat")) >= 3


# What must be refused.


@pytest.mark.parametrize(
    ("content", "given"),
    [
        (b"", "holds no records"),
        (b"\n \n", "holds no records"),
        (b"[]", "holds no records"),
        (b'{"prompt": "a"}\n{"prompt": "b"\n', "line 2 of"),
        (b'{"prompt": "a"}\n\n{"prompt": "b"', "line 3 of"),
        (b'[{"prompt": "a"},\n{"prompt"}]', "line 2 of"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}', "line 2 of"),
        ('{"prompt": "a"}'.encode("utf-16"), "line 1 of"),
        (b"\x1f\x8b\x08\x00\x00", "is not UTF-8"),
        (b"PK\x03\x04", "line 1 of"),
        (b"[" * 100_000, "line 1 of"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "line 1 of"),
        (b"just text", "line 1 of"),
        (b'"a"', "line 1 of"),
        (b"null", "line 1 of"),
        (b'["a"]', "record 1 of"),
        (b"{}", "an empty object"),
        (b'{"prompt": "a"}\n{"promt": "b"}', "line 2 of"),
        (b'{"prompt": null}', "`prompt` at line 1"),
        (b'{"prompt": 5}', "is `5`"),
        (b'{"prompt": ""}', "`prompt` at line 1"),
        (b'{"prompt": "  "}', "`prompt` at line 1"),
        (b'{"prompt": []}', "is `[]`"),
        (b'{"turns": "a"}', "`turns` at line 1"),
        (b'{"turns": ["a", null]}', "`turns` at line 1"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"messages": {"role": "user"}}', "`messages` at line 1"),
        (b'{"messages": ["a"]}', "message 1 of `messages`"),
        (b'{"messages": [{"role": "user"}]}', "message 1 of `messages`"),
        (b'{"messages": [{"role": "wizard", "content": "a"}]}', "the role `'wizard'`"),
        (b'{"messages": [{"content": "a"}]}', "the role `None`"),
        (b'{"messages": [{"role": ["user"], "content": "a"}]}', "the role `list`"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "message 1 of `messages`"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "no message by the user"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}', "behind a turn"),
        (b'{"instruction": "a", "instances": "b"}', "`instances` at line 1"),
        (b'{"instruction": "a", "instances": [{"input": 3}]}', "`input` at line 1"),
    ],
)
def test_hostile_files(tmp_path, content, given):
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    text = fails(given, "custom", path=file)
    assert len(text) < 2000


@pytest.mark.parametrize("kwargs", [{"num_prompts": -1}, {"num_prompts": 1.5}, {"num_prompts": True}, {"seed": -1}])
def test_numbers_that_cannot_be(kwargs):
    (name,) = kwargs
    fails(f"`{name}` is `{kwargs[name]}`", "builtin_math", **kwargs)


def test_names_and_paths_that_cannot_be(tmp_path):
    assert all(f"{name}," in fails("`gsm9k` is no data set", "gsm9k") for name in NAMES[:-1])
    fails("`custom` has no path", "custom")
    fails("does not exist", "gsm8k", path=tmp_path / "nothing.jsonl")
    fails("holds no file", "custom", path=tmp_path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "gsm8k.parquet").write_bytes(b"PAR1")
    assert "pip install pyarrow" in fails("`pyarrow` is not installed", "gsm8k", path=tmp_path)


# The hub.


class Mirror(http.server.BaseHTTPRequestHandler):
    """Serves one file the way the hub does, and counts what it was asked."""

    files: ClassVar = {"/datasets/HuggingFaceH4/MATH-500/resolve/main/test.jsonl": b'{"problem": "1 + 1?"}\n'}
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.wfile.write(self.answer())

    def answer(self) -> bytes:
        self.asked.append(self.path)
        body = self.files.get(self.path, b"")
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.end_headers()
        return body

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, and no setting of the machine's."""
    if importlib.util.find_spec("huggingface_hub") is None:
        pytest.skip("huggingface_hub is not installed")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", *(f"{p}_proxy" for p in ("http", "https", "all"))):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def mirror(cache, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    # Whatever the client asks on its own account is then seen here, too.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    Mirror.asked.clear()
    yield Mirror
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_mirror_is_asked_once_and_then_the_cache(mirror, monkeypatch):
    first = load("math500")
    assert first[0].turns[0].startswith("1 + 1?\nPlease reason")
    asked = len(mirror.asked)
    assert asked > 0
    assert load("math500") == first
    assert len(mirror.asked) == asked
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load("math500") == first


def test_what_the_mirror_lacks_is_told_in_three_parts(mirror):
    text = fails("`openai/gsm8k/main/test-00000-of-00001.parquet`", "gsm8k")
    assert "`gsm8k.jsonl`" in text and "--dataset-path" in text and "`builtin_math`" in text


@pytest.mark.parametrize("name", [n for n in NAMES if n not in (*BUILTIN, "custom")])
def test_offline_says_what_works_instead(cache, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = fails("`HF_HUB_OFFLINE` is set", name)
    assert f"`{name}.jsonl`" in text and '`{"turns": [...]}`' in text


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "not an address"])
def test_no_connection_fails_at_once(cache, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    fails(f"`{endpoint}`", "gsm8k")


def test_spec_bench_comes_from_its_own_address(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    published = write(tmp_path / "question.jsonl", {"question_id": 81, "category": "writing", "turns": ["a", "b"]})
    monkeypatch.setitem(suites._SUITES, "spec_bench", suites._Suite(hub.WebFile(published.as_uri())))
    assert load("spec_bench") == [Prompt("spec_bench", 0, ("a", "b"))]
    monkeypatch.setitem(suites._SUITES, "spec_bench", suites._Suite(hub.WebFile((tmp_path / "no").as_uri())))
    fails("could not be fetched", "spec_bench")
