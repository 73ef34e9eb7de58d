"""Prompts: read, invented, balanced; kept apart from benchmarks; answers that loop are left out."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.errors import JspecError
from jspec.training import filters, overlap, prompts, synthesise
from jspec.training.texts import Prompt, Text
from tests import tiny
from tests.hostile import checkpoint


def prompt(name, *turns, kind="chat"):
    return Prompt(id=name, kind=kind, turns=turns)


def test_layouts(tmp_path):
    rows = [
        {"id": "a", "kind": "code", "turns": ["one", "two"]},
        {"question": "how many?", "answer": "two"},
        {"id": "b", "instruction": "Shorten.", "instances": [{"input": "long text", "output": "text"}]},
        {"id": "c", "instruction": "Invent.", "instances": [{"input": "", "output": "x"}]},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    got = prompts.read(path, "math")
    assert [(p.id, p.kind, p.turns) for p in got] == [
        ("a", "code", ("one", "two")),
        ("p-2", "math", ("how many?",)),
        ("b", "math", ("Shorten.\n\nlong text",)),
        ("c", "math", ("Invent.",)),
    ]
    prompts.write(tmp_path / "q.jsonl", got)
    assert prompts.read(tmp_path / "q.jsonl") == got


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", "{}", '{"turns": []}', '{"turns": [""]}', '{"turns": [3]}', '{"question": 3}', '{"turns": 5}',
     '{"question": "a", "kind": "sport"}', '{"instruction": "a", "instances": [3]}'],
)  # fmt: skip
def test_lines_without_a_prompt_are_refused(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "fine"}\n' + line + "\n")
    with pytest.raises(JspecError, match="line 2 of"):
        prompts.read(path, "math")


def test_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    for name in ("bad.jsonl", "missing.jsonl"):
        with pytest.raises(JspecError, match="cannot be read"):
            prompts.read(tmp_path / name, "math")


def test_circles_are_told_from_repetition():
    rng = np.random.default_rng(0)
    fresh = rng.permutation(1000).tolist()
    assert not any(filters.looping(fresh[:n]) for n in range(200))
    for period in (1, 3, 20):
        loop = fresh[:30] + fresh[:period] * 100
        found = next(n for n in range(300) if filters.looping(loop[:n]))
        assert 64 <= found <= 30 + period + 8 + 32 + 2 * 16  # noticed soon
    # A list that says the same 20 tokens with another word between them is no loop.
    listed = [token for i in range(20) for token in (*fresh[:20], 1000 + i, 2000 + i)]
    assert not any(filters.looping(listed[:n]) for n in range(len(listed)))


def test_balanced():
    a = [prompt("a0", "x"), prompt("a1", "Y  y"), prompt("a2", "z")]
    b = [prompt("b0", "y Y"), prompt("b1", "X"), prompt("b2", "w"), prompt("b3", "v"), prompt("b4", "u")]
    # What was said before is left out, wherever it was said and however it was spaced.
    assert [p.id for p in prompts.balanced([a, b])] == ["a0", "b0", "a2", "b2"]


def test_invented_prompts_are_read_again(tmp_path, monkeypatch):
    target, config = checkpoint(), tiny.engine(3, max_length=96)
    settings = synthesise.Settings(temperature=1.0, max_tokens=6, seed=3)

    def take(folder, count):
        made = prompts.invented(target, config, folder, kind="chat", system=None, settings=settings, shard=2)
        return [path for path, _ in zip(made, range(count), strict=False)]

    monkeypatch.setattr(
        synthesise,
        "invent",
        lambda target, config, *, first, count, **rest: [
            prompt(f"i{n}", f"text {n}") for n in range(first, first + count)
        ],
    )
    assert [p.id for p in take(tmp_path, 5)] == ["i0", "i1", "i2", "i3", "i4"]
    monkeypatch.setattr(synthesise, "invent", lambda *_, **__: pytest.fail("it was made already"))
    assert [p.id for p in take(tmp_path, 5)] == ["i0", "i1", "i2", "i3", "i4"]


BENCHMARK = prompt(
    "m0", "If a train leaves the old station at noon, and another leaves an hour later, when do they meet?"
)


@pytest.mark.parametrize(
    ("turns", "hit"),
    [
        (BENCHMARK.turns, True),
        (("fine", "IF a train leaves the old station at NOON and another leaves an hour EARLY"), True),
        (("If a train leaves the old station at noon and another leaves at one",), False),  # 12 words in common
        (("what?",), True),  # the whole of a short one
        (("What is it?",), False),
    ],
)
def test_overlap(turns, hit):
    marks = overlap.Benchmarks([BENCHMARK, prompt("m1", "What?")])
    hits = []
    kept = list(marks.apart([prompt("p", *turns), prompt("q", "something else")], hits))
    assert [p.id for p in kept] == (["q"] if hit else ["p", "q"])
    assert len(hits) == hit and marks.count == 2
    if hit:
        with pytest.raises(JspecError, match="stand in a benchmark"):
            overlap.refuse(hits)
    overlap.refuse([])


def test_repeated_by_hand():
    assert filters.repeated([1, 2, 3, 1, 2, 3, 4], 3) == pytest.approx(1 / 5)  # 123 231 312 123 234
    assert filters.repeated([1, 1, 1, 1], 2) == pytest.approx(2 / 3)
    assert filters.repeated([1, 2], 3) == 0.0
    assert filters.loop_free(range(100)) and not filters.loop_free([*range(8), *range(8)])


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4))
def test_repeated_counts_what_was_seen(tokens, size):
    runs = [tokens[i : i + size] for i in range(len(tokens) - size + 1)]
    again = sum(run in runs[:i] for i, run in enumerate(runs))
    assert filters.repeated(tokens, size) == pytest.approx(again / len(runs) if runs else 0.0)


def test_worth():
    def text(*answers):
        tokens = np.concatenate([np.full(2, 99), *answers]).astype(np.int32)
        ends = 2 + np.cumsum([len(a) for a in answers])
        spans = tuple((int(e) - len(a), int(e)) for a, e in zip(answers, ends, strict=True))
        return Text(id="t", kind="chat", tokens=tokens, answers=spans)

    fine, loop = np.arange(30), np.tile(np.arange(5), 8)
    assert filters.worth(text(fine)) and filters.worth(text(fine, fine + 40))
    assert not filters.worth(text(loop)) and not filters.worth(text(fine, loop)) and not filters.worth(text(fine[:10]))
    assert not filters.worth(text())
