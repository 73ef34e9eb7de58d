"""Stop strings: matched over characters, wherever tokens, blocks and bytes divide them.

Known failures covered: VS-14, SV-6, SV-7.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.decoding.generate import decode, generate
from jspec.decoding.request import Request
from jspec.decoding.stops import AnswerText
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from tests import tables, tiny
from tests.scripted import Scripted, script
from tests.words import tokenizer


def text_of(pieces, ids, stops, **how):
    """The text, the number of tokens used and the stop string."""
    answer = AnswerText(tokenizer(pieces).stream(), stops, **how)
    out = ""
    for used, token in enumerate(ids, 1):
        out += answer.push(token)
        if answer.stop is not None:
            return out, used, answer.stop
    return out + answer.finish(), len(ids), answer.stop


def by_characters(data, stops, include):
    """The same on the whole text: end at the first character where a stop string is complete."""
    for end in range(len(data) + 1):
        matches = [s for s in stops if data[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return data[: end if include else end - len(longest)], longest
    return data, None


PIECES = ["a", "b", "ab", "ba", "c", "abc", "é", b"\xe2\x82", b"\xac", "€a", " "]


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=20),
    st.lists(
        st.sampled_from(["a", "ab", "ba", "abc", "aab", "bab", "€", "€a", "é", " a", "abab", "cc", "c€"]), max_size=3
    ),
    st.booleans(),
)
@settings(max_examples=400)
def test_matching_is_over_characters(ids, stops, include):
    whole = tokenizer(PIECES).decode(ids)
    expected, stop = by_characters(whole, stops, include)
    text, used, found = text_of(PIECES, ids, stops, include=include)
    assert (text, found) == (expected, stop)
    if stop is not None:
        # The token that completes it is the last that counts.
        assert by_characters(tokenizer(PIECES).decode(ids[:used]), stops, include)[1] == stop or used == len(ids)


@pytest.mark.parametrize(
    ("ids", "stops", "text", "used"),
    [
        ([0, 4, 1, 0, 1], ["ba"], "ac", 4),  # across tokens
        ([7, 8, 0], ["€"], "", 2),  # inside a character's bytes
        ([4, 7, 8, 0], ["c€a"], "", 4),
        ([0, 1], ["abc"], "ab", 2),  # held back, then given out
        ([5], ["bc", "abc"], "", 1),  # complete together: the longest
        ([5], ["b"], "a", 1),  # the rest of the token is dropped
        ([4, 7], ["c\ufffd"], "", 2),  # the tail counts as text
    ],
)
def test_by_hand(ids, stops, text, used):
    assert text_of(PIECES, ids, stops)[:2] == (text, used)


def test_nothing_stops_before_min_tokens():
    assert text_of(PIECES, [0, 1, 0, 1], ["b"], min_tokens=3) == ("aba", 4, "b")
    assert text_of(PIECES, [0, 1, 0, 1], ["b"], min_tokens=2) == ("a", 2, "b")


def test_what_is_streamed_is_final_and_soon():
    answer = AnswerText(tokenizer(PIECES).stream(), ["abc"])
    assert [answer.push(t) for t in (0, 1, 1, 0, 0, 4)] == ["", "", "abb", "", "a", "ac"]


class Counting(str):
    """A text that counts the characters that are searched in it or cut from it."""

    seen = 0

    def __add__(self, other):
        return Counting(super().__add__(other))

    def __getitem__(self, key):
        part = Counting(super().__getitem__(key))
        Counting.seen += len(part)
        return part

    def find(self, what, start=0):
        Counting.seen += max(0, len(self) - start)
        return super().find(what, start)


def searched(make, count):
    """Characters looked at for `count` tokens that decode to an invalid byte each."""
    Counting.seen = 0
    answer = make(tokenizer([b"\xff", "a"]).stream(), ["abc", "\ufffd" * 9 + "a"])
    answer._held = Counting()
    text = "".join([answer.push(0) for _ in range(count)]) + answer.finish()
    assert text == "\ufffd" * count
    return Counting.seen


def test_the_cost_of_a_token_is_bounded():
    # SV-7: twice the tokens, twice the characters.
    assert 0 < searched(AnswerText, 400) <= 2.1 * searched(AnswerText, 200)


def test_text_that_is_held_back_to_its_end_is_noticed():
    class Forgetful(AnswerText):
        def _hold(self):
            return len(self._held)

        def _search(self):
            self._old = 0
            return super()._search()

    assert searched(Forgetful, 400) > 3 * searched(Forgetful, 200)


# --- In the loop ---

V = 12
WORDS = tokenizer(["x", "a", "b", "c", "d", "e", "f", b"\xe2", b"\x82", b"\xac", "g", "<end>"])
X, A, BB, C, D = range(5)
ENGINE = EngineConfig(target=tables.config(V), slots=2, rows=5, max_length=32, chunk=8, key_block=8)
DRAFTER = Scripted(proposals=4)
LINE = tables.params(
    tables.successors({5: X, X: A, A: BB, BB: C, C: D, D: 6, 6: 7, 7: 8, 8: 9, 9: 10, 10: 11}, V, 40.0)
)
TEXT = (X, A, BB, C, D, 6, 7, 8, 9, 10)


def run(requests, drafted=True, right=True):
    lent = script(requests, [TEXT] * len(requests), counts=99 if drafted else 0, right=right)
    return generate(ENGINE, LINE, requests, drafter=DRAFTER, weights=lent, tokenizer=WORDS)


def ask(**how):
    return Request(prompt=(5,), max_tokens=10, temperature=0.8, seed=3, **how)


@pytest.mark.parametrize("right", [True, False, [True, True, False]], ids=str)
@pytest.mark.parametrize(
    ("stop", "text", "used"),
    [("ab", "x", 3), ("c", "xab", 4), ("x", "", 1), ("bcd", "xa", 5), ("€", "xabcdf", 9), ("zz", "xabcdf€g", 10)],
)
def test_a_stop_inside_a_block_ends_the_answer_there(stop, text, used, right):
    # VS-14: tokens behind it are dropped; the request beside it and the next one do not notice.
    other = Request(prompt=(5, 5), max_tokens=8, temperature=0.8, seed=9)
    alone = run([other])[0]
    results = run([ask(stop=(stop,)), other, other], right=right)
    assert (results[0].text, len(results[0].tokens), results[0].tokens) == (text, used, TEXT[:used])
    assert (results[0].finish, results[0].stop) == (("length", None) if stop == "zz" else ("stop", stop))
    assert [r.tokens for r in results[1:]] == [alone.tokens] * 2
    assert run([ask(stop=(stop,))], drafted=False)[0].tokens == TEXT[:used]
    kept = run([ask(stop=(stop,), include_stop=True)])[0].text
    assert kept == text + (stop if stop != "zz" else "")


def test_later_sampling_does_not_shift():
    # A random target: the requests behind a stop have the texts that they have alone.
    weights = tiny.params()
    letters = tokenizer([chr(48 + i) for i in range(64)])
    requests = tiny.requests([3, 9, 17, 5, 4, 8], max_tokens=24, temperature=1.0)
    alone = [generate(tiny.engine(3), weights, [r], tokenizer=letters)[0] for r in requests]
    cut = [
        dataclasses.replace(r, stop=(a.text[4 + i : 6 + i],))
        for i, (r, a) in enumerate(zip(requests, alone, strict=True))
    ]
    for lent in (None, script(cut, [a.tokens for a in alone])):
        drafter = None if lent is None else Scripted(proposals=7)
        mixed = [*cut[:3], *requests[3:], *cut[3:], *requests[:3]]
        results = generate(tiny.engine(3), weights, mixed, drafter=drafter, weights=lent, tokenizer=letters)
        for result, request in zip(results, mixed, strict=True):
            whole = alone[request.prompt[0]]
            expected, _ = by_characters(whole.text, request.stop, False)
            assert result.text == expected
            assert result.tokens == whole.tokens[: len(result.tokens)]


@pytest.mark.parametrize(
    "how", [{"max_tokens": 8}, {"max_tokens": 9, "end_ids": (8,)}, {"max_tokens": 8, "stop": ("f\ufffd",)}], ids=str
)
def test_streamed_and_whole_text_are_equal(how):
    # SV-6: an answer that ends inside a character, by length, end token and stop string.
    request = dataclasses.replace(ask(), **how)
    lent = script([request], [TEXT])
    events = list(decode(ENGINE, LINE, [request], drafter=DRAFTER, weights=lent, tokenizer=WORDS))
    result = events[-1].result
    assert "".join(e.text for e in events) == result.text
    assert result.text == ("xabcd" if "stop" in how else "xabcdf\ufffd")
    assert result.finish == ("length" if how == {"max_tokens": 8} else "stop")


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(JspecError, match="request 0 has stop strings, `ab` first"):
        generate(ENGINE, LINE, [ask(stop=("ab",))], drafter=DRAFTER, weights=script([], []))


def test_numbers_of_tokens_with_and_without_speculation():
    # Usage counts to the token that completes the stop string, however many the round emitted.
    for drafted in (True, False):
        result = run([ask(stop=("ab",))], drafted=drafted)[0]
        assert len(result.tokens) == 3
    assert np.all([r.rounds == 1 for r in run([ask(stop=("ab",))])])
