"""Requests: what cannot be honoured is refused by name, in three parts, before anything is touched.

Known failures covered: VS-6 (unset temperature), SV-8 and SV-9 (lengths and max_tokens), DT-1 (seeds).
"""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.decoding import request as requests
from jspec.decoding import sampling
from jspec.decoding.request import Request
from jspec.decoding.state import END_IDS
from jspec.engine import static
from jspec.errors import JspecError
from tests import tiny

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, NAN, INF, -INF, 1e7, "0.8", None, True, 1j, [1.0]]),
        ("top_p", [-0.1, 1.1, NAN, INF, "1", None, False]),
        ("min_p", [-0.1, 1.5, NAN, None, True]),
        ("top_k", [-1, 2.0, "4", None, True, 2**31, NAN]),
        ("max_tokens", [0, -1, 5.0, "5", None, True, 2**31]),
        ("seed", [-1, 2**64, 1.0, "1", True]),
        ("choice_index", [-1, 0.0, None, 2**31]),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field, values):
    for value in values:
        with pytest.raises(JspecError) as caught:
            Request(prompt=(1,), **{field: value})
        error = caught.value
        assert f"`{field}`" in error.given and f"`{value!r}`" in error.given
        assert error.allowed and error.action
        assert str(error) == f"{error.given}\nAllowed: {error.allowed}\nTo do: {error.action}"
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_what_is_in_range_is_taken():
    for settings in (
        {"temperature": 0},
        {"temperature": 1e6, "top_p": 0, "min_p": 1, "top_k": 2**31 - 1, "max_tokens": 2**31 - 1},
        {"seed": 0},
        {"seed": 2**64 - 1, "choice_index": 2**31 - 1},
        {"top_k": np.int64(3), "seed": np.uint32(7)},
        {"end_ids": tuple(range(END_IDS))},
    ):
        requests.check(tiny.engine(), Request(prompt=(1,), **settings))
    unset = Request(prompt=(1,), top_k=4)
    assert (unset.temperature, unset.top_p, unset.min_p) == (1.0, 1.0, 0.0)


def test_prompts_and_ends_that_cannot_be_are_refused():
    with pytest.raises(JspecError, match="no token"):
        Request(prompt=())
    with pytest.raises(JspecError, match=f"`{END_IDS + 1}` entries"):
        Request(prompt=(1,), end_ids=tuple(range(END_IDS + 1)))
    for token in (-1, 64, 2**31, 1.0, "1", None, True, NAN):
        for field, where in (("prompt", (3, token)), ("end_ids", (3, token))):
            with pytest.raises(JspecError, match=rf"`{field}\[1\]`"):
                requests.check(tiny.engine(), Request(**{"prompt": (1,), field: where}))


@pytest.mark.parametrize(
    ("length", "fits"), [(1, True), (62, True), (63, True), (64, False), (65, False), (10_000, False)]
)
def test_a_prompt_must_leave_room_for_one_token(length, fits):
    # SV-8: both numbers are named.
    request = Request(prompt=(1,) * length)
    if fits:
        assert requests.capped(tiny.engine(), request) == min(256, 64 - length)
    else:
        with pytest.raises(JspecError, match=rf"`{length}` tokens(.|\n)*at most 63"):
            requests.check(tiny.engine(), request)


@given(st.integers(0, 2**64 - 1))
def test_a_seed_is_two_words(seed):
    low, high = (int(w) for w in sampling.seed_words(seed))
    assert low + (high << 32) == seed


def test_a_seed_is_drawn_once_and_kept():
    drawn = [Request(prompt=(1,)).with_seed() for _ in range(50)]
    assert len({r.seed for r in drawn}) == 50
    assert any(r.seed >= 2**32 for r in drawn)
    assert all(r.with_seed() is r for r in drawn)


def test_admission_turns_a_request_into_arrays():
    request = Request(
        prompt=(5, 6, 7), max_tokens=4, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125,
        seed=2**32 + 9, choice_index=2, end_ids=(61, 62),
    )  # fmt: skip
    made = static_admission(request)
    assert (made.slot, made.anchor, made.length, made.limit) == (2, 7, 3, 7)
    assert made.end_ids.tolist() == [61, 62] + [-1] * (END_IDS - 2)
    s = made.sampling
    values = [s.temperature, s.top_k, s.top_p, s.min_p, s.choice_index]
    assert [v.tolist() for v in values] == [[0.5], [3], [0.25], [0.125], [2]]
    assert s.seed.tolist() == [[9, 1]]
    # The dtypes that a state holds: else the first request would compile anew.
    state = static.init(tiny.engine(), tiny.NOBODY, tiny.params(), ())
    for mine, held in zip(vars(s).values(), vars(state.sampling).values(), strict=True):
        assert (mine.dtype, mine.shape[1:]) == (held.dtype, held.shape[1:])


def static_admission(request):
    return requests.admission(tiny.engine(), request, 2)
