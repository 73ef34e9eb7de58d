"""Files of texts: what is written comes back, what is damaged is refused, a killed run goes on. TN-1."""

import dataclasses

import numpy as np
import pytest

import jspec
from jspec import prompts
from jspec.errors import JspecError
from jspec.training import filters, synthesise, texts
from jspec.training.texts import Prompt, Text
from tests import tiny
from tests.hostile import checkpoint

ABOUT = {"target": "abc", "settings": {"temperature": 0.0}}


def made(count=3):
    rng = np.random.default_rng(0)
    return [
        Text(id=f"t{i}", kind="chat", tokens=rng.integers(0, 60000, 5 + i).astype(np.int32), answers=((2, 4 + i),))
        for i in range(count)
    ]


def same(a, b):
    return [(x.id, x.kind, x.tokens.tolist(), x.answers) for x in a] == [
        (x.id, x.kind, x.tokens.tolist(), x.answers) for x in b
    ]


def test_round_trip(tmp_path):
    path = tmp_path / "a" / "x.npz"
    texts.save(path, made(), ABOUT)
    got, about = texts.load(path)
    assert same(got, made()) and about == ABOUT
    assert [p.name for p in path.parent.iterdir()] == ["x.npz"]
    assert texts.count(got) == 2 + 3 + 4
    assert got[1].loss_mask.tolist() == [False, False, True, True, True, False]


def test_ids_beyond_sixteen_bits(tmp_path):
    wide = [dataclasses.replace(made(1)[0], tokens=np.array([1, 70000, 2, 3], np.int32))]
    texts.save(tmp_path / "x.npz", wide, ABOUT)
    assert texts.load(tmp_path / "x.npz")[0][0].tokens.tolist() == [1, 70000, 2, 3]


@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "other"])
def test_damaged_files_are_refused(tmp_path, damage):
    path = tmp_path / "x.npz"
    texts.save(path, made(), ABOUT)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "missing":
        path.unlink()
    else:
        np.savez(path, tokens=np.zeros(3))
    with pytest.raises(JspecError, match="cannot be read as texts"):
        texts.load(path)


def test_texts_of_two_targets_are_not_mixed(tmp_path):
    texts.save(tmp_path / "0.npz", made(), ABOUT)
    texts.save(tmp_path / "1.npz", made(), ABOUT | {"target": "def"})
    with pytest.raises(JspecError, match="was written by the target `def`"):
        list(texts.load_all(tmp_path))


PROMPTS = [Prompt(id=f"p{i}", kind="chat", turns=("abc" * (i + 1), "and then?")[: 1 + i % 2]) for i in range(5)]


def test_synthesis_goes_on_where_it_stopped(tmp_path):
    target = checkpoint()
    config = tiny.engine(3, max_length=96)
    settings = synthesise.Settings(temperature=0.8, max_tokens=9)
    whole = list(synthesise.run(target, config, PROMPTS, settings, tmp_path / "a", shard=2))
    assert [p.name for p in whole] == ["00000.npz", "00001.npz", "00002.npz"]
    part = synthesise.run(target, config, PROMPTS, settings, tmp_path / "b", shard=2)
    next(part)
    part.close()
    (tmp_path / "b" / "00001.npz.partial").write_bytes(b"half")  # killed while writing
    again = list(synthesise.run(target, config, PROMPTS, settings, tmp_path / "b", shard=2))
    for a, b in zip(whole, again, strict=True):
        assert a.read_bytes() == b.read_bytes()
    got = list(texts.load_all(tmp_path / "a"))
    assert [t.id for t in got] == ["p0/0", "p1/0", "p1/1", "p2/0", "p3/0", "p3/1", "p4/0"]
    second = got[2]
    ((start, end),) = second.answers
    assert end == len(second.tokens) and start > len(got[1].tokens)
    with pytest.raises(JspecError, match="was made with another settings"):
        list(synthesise.run(target, config, PROMPTS, dataclasses.replace(settings, seed=1), tmp_path / "a", shard=2))


def test_answers_are_what_the_target_says_alone(tmp_path):
    target = checkpoint()
    settings = synthesise.Settings(temperature=0.8, max_tokens=9)
    config = tiny.engine(3, max_length=96)
    together = synthesise.answer(target, config, PROMPTS, settings)
    alone = [t for p in PROMPTS for t in synthesise.answer(target, config, [p], settings)]
    assert same(sorted(together, key=lambda t: t.id), alone)


def test_ids_and_spans_are_those_that_are_served():
    # TN-1. What a user of `jspec.generate` sends, two turns of it, and what was labelled.
    target = checkpoint()
    config = tiny.engine(2, max_length=96)
    prompt = Prompt(id="p", kind="chat", turns=("abc", "cab"))
    first, second = synthesise.answer(target, config, [prompt], synthesise.Settings(max_tokens=12))
    chat = [{"role": "user", "content": "abc"}]
    for text, turn in ((first, "cab"), (second, None)):
        ((start, end),) = text.answers
        served, _ = prompts._ids(target, chat, True, None, False)
        assert text.tokens[:start].tolist() == list(served)
        answer = jspec.generate(target, [chat], drafter=None, config=config, max_tokens=12, temperature=0.0)[0]
        assert text.tokens[start:end].tolist() == list(answer.ids)
        assert text.loss_mask.tolist() == [start <= i < end for i in range(end)]
        if turn is not None:
            chat = [*chat, {"role": "assistant", "content": answer.text}, {"role": "user", "content": turn}]


def test_a_prompt_without_room_is_left_out():
    target = checkpoint()
    long = Prompt(id="long", kind="chat", turns=("0123" * 200,))
    got = synthesise.answer(
        target, tiny.engine(2, max_length=96), [long, PROMPTS[0]], synthesise.Settings(max_tokens=3)
    )
    assert [t.id for t in got] == ["p0/0"]


def test_an_answer_that_goes_in_circles_is_ended_and_its_chat_with_it(monkeypatch):
    target, config = checkpoint(), tiny.engine(2, max_length=96)
    settings = synthesise.Settings(temperature=0.8, max_tokens=9)
    whole = synthesise.answer(target, config, PROMPTS, settings)
    lost = next(t for t in whole if t.id == "p1/0")
    said = lost.tokens[slice(*lost.answers[0])].tolist()
    seen = []
    monkeypatch.setattr(filters, "looping", lambda tokens: seen.append(len(tokens)) or tokens == said[:4])
    got = synthesise.answer(target, config, PROMPTS, settings)
    assert same(got, [t for t in whole if not t.id.startswith("p1/")])
    assert max(seen) < 9  # nobody is asked about an answer that has ended


def test_invented_prompts_are_whole_turns():
    target = checkpoint()
    settings = synthesise.Settings(temperature=1.0, max_tokens=40, seed=3)
    config = tiny.engine(3, max_length=96)
    got = synthesise.invent(target, config, first=0, count=6, kind="chat", system="0", settings=settings)
    again = synthesise.invent(target, config, first=3, count=3, kind="chat", system="0", settings=settings)
    assert all(p.turns[0].strip() for p in got)
    assert [p for p in got if int(p.id.rsplit("-", 1)[1]) >= 3] == again


def test_a_template_without_a_beginning_is_refused():
    with pytest.raises(JspecError, match="puts nothing before what users say"):
        synthesise.invent(
            checkpoint(),
            tiny.engine(1, max_length=96),
            first=0,
            count=1,
            kind="chat",
            system=None,
            settings=synthesise.Settings(),
        )
