"""Contract 2.1 for every processor and for mixed batches: tokens, and every bit of keys and values.

Plain decoding of one engine against every drafter, in another order and so with other neighbours in other
slots. In the mixed batch each request has settings of its own.
"""

import dataclasses
import functools

import numpy as np
import pytest

from jspec.decoding import processors
from jspec.drafters.doubles import Random, Self
from jspec.drafters.draft_model import DraftModel
from jspec.drafters.ngram import NGram
from tests import tiny
from tests.scripted import Scripted, script
from tests.tiny import DTYPES, T, differing
from tests.words import tokenizer

LETTERS = tokenizer([chr(48 + i) for i in range(T.vocab_size)])
LENGTHS = [1, 5, 15, 16, 17, 33, 3, 9]
KINDS = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.4},
    "bias": {"logit_bias": {3: 1.5, 9: -2.0, 60: 3.0}},
    "min_tokens": {"min_tokens": 7, "end_ids": tuple(range(8, 16))},
    "end_ids": {"end_ids": tuple(range(16, 24))},
    "ignore_eos": {"end_ids": tuple(range(0, 8)), "ignore_eos": True},
    "logprobs": {"logprobs": 3, "logprobs_kind": "processed"},
    "filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "choices": {"choice_index": 3},
}
DRAFTERS = ["oracle", "wrong", "now and then", "ngram", "random", "draft model", "self"]


@functools.cache
def work(kind):
    """Requests of one kind, or of all kinds in turn; greedy and sampled by turns."""
    names = list(KINDS) if kind == "mixed" else [kind] * len(LENGTHS)
    lengths = [LENGTHS[i % 8] for i in range(len(names))] if kind == "mixed" else LENGTHS
    return [
        dataclasses.replace(r, temperature=0.9 * (i % 2), max_tokens=18 + i % 3, **KINDS[names[i]])
        for i, r in enumerate(tiny.requests(lengths))
    ]


@functools.cache
def plain(kind, dtype):
    return tiny.decode(tiny.engine(3), tiny.params(dtype), work(kind))


def drafting(name, kind, dtype):
    texts = [t.tokens for t in plain(kind, dtype)]
    if name == "oracle":
        return Scripted(proposals=7), script(work(kind), texts)
    if name == "wrong":
        return Scripted(proposals=7), script(work(kind), texts, right=False)
    if name == "now and then":
        return Scripted(proposals=7), script(work(kind), texts, right=[True, True, True, False], every=2)
    if name == "ngram":
        return NGram(proposals=7), ()
    if name == "random":
        return Random(proposals=7, vocab=T.vocab_size), ()
    if name == "draft model":
        return DraftModel(proposals=4, model=T, vocab=T.vocab_size, key_block=16), tiny.params(dtype, 1)
    return Self(proposals=7, engine=tiny.engine(3)), tiny.params(dtype)


def check(name, kind, dtype):
    requests = work(kind)
    drafter, lent = drafting(name, kind, dtype)
    order = np.random.default_rng(DRAFTERS.index(name)).permutation(len(requests))
    traces = tiny.decode(tiny.engine(3), tiny.params(dtype), requests, drafter=drafter, lent=lent, order=order)
    assert differing(traces, plain(kind, dtype)) == (0, 0)
    assert [t.result.logprobs for t in traces] == [t.result.logprobs for t in plain(kind, dtype)]
    if name == "oracle":
        # Nothing right is turned down: eight tokens a round, until the text ends.
        assert [t.result.rounds for t in traces] == [-(-len(t.tokens) // 8) for t in traces]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_setting_holds_with_speculation(kind, dtype):
    assert any(t.tokens != u.tokens for t, u in zip(plain(kind, dtype), unset(kind, dtype), strict=True)) or kind in (
        "ignore_eos",
        "logprobs",
    )
    for name in ("oracle", "now and then", "ngram"):
        check(name, kind, dtype)


@functools.cache
def unset(kind, dtype):
    """The same requests without the setting."""
    defaults = {f.name: f.default for f in dataclasses.fields(work(kind)[0])}
    defaults["logit_bias"] = {}
    bare = [dataclasses.replace(r, **{k: defaults[k] for k in KINDS[kind]}) for r in work(kind)]
    return tiny.decode(tiny.engine(3), tiny.params(dtype), bare)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_mixed_batches_hold_with_every_drafter(name, dtype):
    check(name, "mixed", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_request_of_a_mixed_batch_equals_itself_alone(dtype):
    alone = [t for r in work("mixed") for t in tiny.decode(tiny.engine(3), tiny.params(dtype), [r])]
    assert differing(alone, plain("mixed", dtype)) == (0, 0)


def test_a_penalty_on_committed_counts_alone_is_seen(monkeypatch):
    # The fault of VS-8: rows of a block that do not count the rows above them.
    as_it_is = processors._processed

    def forgetful(logits, block, *rest):
        return as_it_is(logits, block.replace(valid=block.valid & False), *rest)

    monkeypatch.setattr(processors, "_processed", forgetful)
    config = tiny.engine(5, max_length=61)  # an engine of its own: its programs hold the fault
    requests = [
        dataclasses.replace(r, max_tokens=18, frequency_penalty=1.5, temperature=0.0) for r in work("presence")[:4]
    ]
    base = tiny.decode(config, tiny.params(), requests)
    lent = script(requests, [t.tokens for t in base])
    sequences, _ = differing(
        tiny.decode(config, tiny.params(), requests, drafter=Scripted(proposals=6), lent=lent), base
    )
    assert sequences > 0
