"""Log-probabilities: of the target's own logits or of the law that was drawn from, the same with any drafter."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec.decoding.generate import decode, generate
from jspec.decoding.request import Request
from jspec.drafters.ngram import NGram
from jspec.engine.config import EngineConfig
from tests import reference, tables, tiny
from tests.decoding.test_penalties import processed
from tests.scripted import Scripted, script

V = 12
ENGINE = EngineConfig(target=tables.config(V), slots=2, rows=4, max_length=32, chunk=8, key_block=8)
DRAFTER = Scripted(proposals=3)
TABLE = (np.random.default_rng(3).standard_normal((V, V)) * 2).astype(np.float32)
ENDS = (11,)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def expected(request, result):
    """`[tokens, V]` by the definitions, position by position."""
    last, out = request.prompt[-1], []
    for count, token in enumerate(result.tokens):
        logits = TABLE[last]
        if request.logprobs_kind == "processed":
            logits = processed(logits, request.prompt, result.tokens[:count], request, ENDS)
            if request.temperature > 0:
                filters = {"top_k": request.top_k, "top_p": request.top_p, "min_p": request.min_p}
                with np.errstate(divide="ignore"):
                    logits = np.log(reference.law(logits, request.temperature, **filters))
        out.append(log_softmax(logits))
        last = token
    return np.array(out)


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {3: 2.0}},
    {"temperature": 1.2, "top_k": 5, "frequency_penalty": 0.8},
    {"temperature": 1.0, "top_p": 0.8, "min_tokens": 4},
    {"temperature": 0.5, "min_p": 0.1, "presence_penalty": 1.0},
]


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_log_probabilities_equal_their_definition(kind):
    requests = [
        Request(prompt=(r, 2), max_tokens=9, seed=r, end_ids=ENDS, logprobs=4, logprobs_kind=kind, **s)
        for r, s in enumerate(SETTINGS)
    ]
    weights = tables.params(TABLE)
    quiet = script(requests, [()] * len(requests), counts=0)
    plain = generate(ENGINE, weights, requests, drafter=DRAFTER, weights=quiet)
    for request, result in zip(requests, plain, strict=True):
        table = expected(request, result)
        assert len(result.logprobs) == len(result.tokens) > 0
        for row, entry in zip(table, result.logprobs, strict=True):
            assert entry.logprob == pytest.approx(row[entry.token], abs=2e-5)
            assert entry.rank == 1 + (row > row[entry.token] + 1e-9).sum()
            order = np.argsort(-row, kind="stable")[:4]
            assert [t for t, _ in entry.top if np.isfinite(row[t])] == [t for t in order if np.isfinite(row[t])]
            np.testing.assert_allclose([v for _, v in entry.top], row[order], atol=2e-5)
    # Bit for bit the same with drafts, right and wrong.
    for right in (True, [True, True, False]):
        lent = script(requests, [r.tokens for r in plain], right=right)
        drafted = generate(ENGINE, weights, requests, drafter=DRAFTER, weights=lent)
        assert [r.logprobs for r in drafted] == [r.logprobs for r in plain]


@pytest.mark.parametrize("dtype", tiny.DTYPES)
def test_asking_changes_nothing_else(dtype):
    requests = tiny.requests([3, 17, 9, 5], max_tokens=15, temperature=0.8)
    asked = [dataclasses.replace(r, logprobs=20 if i % 2 else None) for i, r in enumerate(requests)]
    engine, weights = tiny.engine(3), tiny.params(dtype)
    plain = tiny.decode(engine, weights, requests)
    scored = tiny.decode(engine, weights, asked)
    drafted = tiny.decode(engine, weights, asked, drafter=NGram(proposals=7))
    assert tiny.differing(plain, scored) == tiny.differing(plain, drafted) == (0, 0)
    assert [t.result.logprobs for t in scored] == [t.result.logprobs for t in drafted]
    assert [t.result.logprobs is None for t in scored] == [True, False, True, False]
    for trace in scored[1::2]:
        assert all(len(e.top) == 20 and e.top[e.rank - 1][0] == e.token for e in trace.result.logprobs if e.rank <= 20)


def test_events_carry_them_and_stops_cut_them():
    from tests.words import tokenizer

    letters = tokenizer([chr(97 + i) for i in range(V)])
    request = Request(prompt=(1,), max_tokens=9, seed=1, logprobs=0)
    lent = script([request], [()], counts=0)
    plain = generate(ENGINE, tables.params(TABLE), [request], drafter=DRAFTER, weights=lent, tokenizer=letters)[0]
    stop = plain.text[2:4]
    lent = script([request], [plain.tokens])
    cut = dataclasses.replace(request, stop=(stop,))
    events = list(decode(ENGINE, tables.params(TABLE), [cut], drafter=DRAFTER, weights=lent, tokenizer=letters))
    result = events[-1].result
    used = len(result.tokens)
    assert result.logprobs == plain.logprobs[:used] and used < 9
    assert sum((e.logprobs for e in events), ()) == result.logprobs
    assert all(e.top == () for e in result.logprobs)


def test_the_head_gives_float32():
    # DT-7: the argmax over bfloat16 operands with float32 sums, and a float32 result.
    rng = np.random.default_rng(0)
    from jspec.target import model

    hidden = jax.numpy.asarray(rng.standard_normal((2000, 512)), jax.numpy.bfloat16)
    head = jax.numpy.asarray(rng.standard_normal((4096, 512)) / 23, jax.numpy.bfloat16)
    logits = jax.jit(model.linear)(hidden.astype(jax.numpy.float32), head)
    assert logits.dtype == jax.numpy.float32
    exact = np.asarray(hidden, np.float32) @ np.asarray(head, np.float32).T
    assert (np.asarray(logits).argmax(axis=1) != exact.argmax(axis=1)).sum() == 0
