"""Prompt lookup proposes what followed the last occurrence of the longest suffix, as a slow search finds it."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.decoding.sampling import greedy
from jspec.drafters import history
from jspec.drafters.base import Rows
from jspec.drafters.ngram import NGram
from jspec.errors import JspecError

S, B, K = 32, 3, 5
propose = jax.jit(lambda drafter, *args: drafter.propose((), *args), static_argnums=0)


def looked_up(text, drafter):
    """The proposal for one text, by search."""
    for size in range(min(drafter.longest, len(text) - 1), drafter.shortest - 1, -1):
        suffix = text[-size:]
        for end in range(len(text) - 1, size - 1, -1):  # the most recent first
            if text[end - size : end] == suffix:
                out = list(text)
                for ahead in range(drafter.proposals):  # what is proposed may be looked up again
                    out.append(out[end + ahead])
                return out[len(text) :]
    return []


def proposals(texts, drafter):
    record = np.full((B, S), -1, np.int32)
    for slot, text in enumerate(texts):
        record[slot, : len(text) - 1] = text[:-1]
    anchor = np.array([t[-1] for t in texts], np.int32)
    position = np.array([len(t) - 1 for t in texts], np.int32)
    made = propose(drafter, record, anchor, position, greedy(B))
    return [made.tokens[b, : made.count[b]].tolist() for b in range(B)]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=S - 1), min_size=B, max_size=B))
@settings(max_examples=200)
def test_equals_a_slow_search(texts):
    for drafter in (NGram(proposals=K), NGram(proposals=K, longest=4, shortest=2)):
        assert proposals(texts, drafter) == [looked_up(t, drafter) for t in texts]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ([7], []),
        ([1, 2, 3], []),
        ([1, 2, 9, 9, 9, 1, 2], [9, 9, 9, 1, 2]),
        ([1, 2, 5, 4, 4, 1, 2, 6, 8, 8, 1, 2], [6, 8, 8, 1, 2]),  # the most recent
        ([3, 1, 2, 5, 4, 4, 0, 1, 2, 6, 8, 8, 3, 1, 2], [5, 4, 4, 0, 1]),  # but the longest first
        ([4, 4], [4, 4, 4, 4, 4]),
        ([1, 2, 1, 2], [1, 2, 1, 2, 1]),
    ],
)
def test_by_hand(text, tokens):
    assert proposals([text] * B, NGram(proposals=K)) == [tokens] * B


@pytest.mark.parametrize("settings", [{"proposals": 0}, {"shortest": 0}, {"shortest": 4}, {"longest": 0}])
def test_settings_that_cannot_be_are_refused(settings):
    with pytest.raises(JspecError, match="ngram"):
        NGram(**{"proposals": 3} | settings)


@given(st.data())
@settings(max_examples=50)
def test_the_record_holds_what_was_committed_and_nothing_else(data):
    # Rows of up to 8, of which `count` are committed; the rest must leave no trace. Then one slot is emptied.
    observe, reset = jax.jit(history.observe), jax.jit(history.reset)
    record, texts = history.init(B, S), [[] for _ in range(B)]
    for _ in range(data.draw(st.integers(1, 3))):
        tokens = np.array(data.draw(st.lists(st.integers(0, 99), min_size=24, max_size=24)), np.int32).reshape(B, 8)
        count = np.array(data.draw(st.lists(st.integers(0, 8), min_size=B, max_size=B)), np.int32)
        start = np.array([len(t) for t in texts], np.int32)
        rows = Rows(np.int32(0), tokens, np.zeros((B, 8, 0), np.float32), start, count)
        record = observe(record, rows)
        for slot in range(B):
            texts[slot].extend(tokens[slot, : count[slot]].tolist())
    gone = data.draw(st.integers(0, B - 1))
    texts[gone] = []
    record = np.asarray(reset(record, np.int32(gone)))
    assert [row.tolist() for row in record] == [t + [-1] * (S - len(t)) for t in texts]
