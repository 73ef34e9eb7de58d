"""The host's loop: what a request gets, when it ends, and that no neighbour notices.

Most of it on table targets, where the right text is known beforehand. Known failures covered: VS-6, VS-12,
VS-13 (end ids), VS-16, VS-17, DT-1, KV-2, KV-7, KV-8, SV-8, SV-9, and a slot's next user.
"""

import dataclasses
import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import noise, sampling
from jspec.decoding.generate import RoundTimes, decode, generate
from jspec.decoding.request import Request
from jspec.drafters.doubles import Lens
from jspec.drafters.ngram import NGram
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from jspec.startup import CompileCounter
from tests import reference, tables, tiny
from tests.reference import LEVEL, chi_square, law
from tests.scripted import Scripted, script

V, STOP = 12, 11
ENGINE = EngineConfig(target=tables.config(V), slots=2, rows=4, max_length=32, chunk=8, key_block=8)
DRAFTER = Scripted(proposals=3)
# Greedy: 1 8 9 STOP 3 4 5 6 7 ...
LINE = tables.params(tables.successors({1: 8, 8: 9, 9: STOP, STOP: 3, 3: 4, 4: 5, 5: 6, 6: 7, 7: 2, 2: 10}, V))
TEXT = (8, 9, STOP, 3, 4, 5, 6, 7, 2, 10)
EVEN = tables.params(np.zeros((V, V)))


def run(weights, requests, drafted=None, **how):
    """Decodes with the scripted drafter; `drafted` is what it proposes, nothing when left out."""
    written = script(requests, drafted or [()] * len(requests), counts=99 if drafted else 0, **how)
    return tiny.decode(ENGINE, weights, requests, drafter=DRAFTER, lent=written)


# --- What ends a request ---


@pytest.mark.parametrize("right", [True, False, [True, False]], ids=str)
@pytest.mark.parametrize(
    ("settings", "tokens", "finish"),
    [
        ({"max_tokens": 4, "end_ids": (STOP,)}, TEXT[:3], "stop"),
        ({"max_tokens": 3, "end_ids": (STOP,)}, TEXT[:3], "stop"),
        ({"max_tokens": 2, "end_ids": (STOP,)}, TEXT[:2], "length"),
        ({"max_tokens": 9, "end_ids": (10, 5, 4)}, TEXT[:5], "stop"),
        ({"max_tokens": 9, "end_ids": (8,)}, TEXT[:1], "stop"),
        ({"max_tokens": 9, "end_ids": (1, 0)}, TEXT[:9], "length"),  # an end token of the prompt ends nothing
        ({"max_tokens": 1}, TEXT[:1], "length"),
        ({"max_tokens": 9}, TEXT[:9], "length"),
    ],
    ids=str,
)
def test_stop_or_cap_whichever_comes_first(settings, tokens, finish, right):
    request = Request(prompt=(1,), temperature=0.0, **settings)
    trace = run(LINE, [request], [TEXT], right=right)[0]
    assert (trace.tokens, trace.result.finish) == (tokens, finish)
    assert trace.result.error is None


@pytest.mark.parametrize(
    ("prompt", "asked", "given"), [(31, 5, 1), (30, 1, 1), (30, 2, 2), (20, 10**9, 12), (1, 99, 31)]
)
def test_max_tokens_is_capped_by_the_room_and_told(prompt, asked, given):
    trace = run(LINE, [Request(prompt=(1,) * prompt, max_tokens=asked, temperature=0.0)])[0]
    assert (len(trace.tokens), trace.result.max_tokens, trace.result.finish) == (given, given, "length")


# --- What cannot be taken ---


@pytest.mark.parametrize("length", [32, 33, 10_000])
def test_a_prompt_that_cannot_fit_is_refused_and_the_neighbour_told_so_far(length):
    good = Request(prompt=(1,), max_tokens=3, temperature=0.0)
    events = []
    with pytest.raises(JspecError, match=f"`{length}`(.|\n)*31"):
        for event in decode(ENGINE, LINE, [good, good, Request(prompt=(1,) * length)]):
            events.append(event)
    assert [e.result.tokens for e in events if e.result] == [TEXT[:3]] * 2
    # Where all requests are known, none of them is begun.
    with pytest.raises(JspecError, match=f"`{length}`"):
        generate(ENGINE, LINE, [good, Request(prompt=(1,) * length)], on_finish=lambda *_: pytest.fail("begun"))


def test_a_drafter_that_does_not_fit_is_refused():
    # KV-8: the one N holds the anchor and K proposals.
    with pytest.raises(JspecError, match="`scripted_k4` proposes `4` tokens"):
        generate(ENGINE, LINE, [], drafter=Scripted(proposals=4))
    with pytest.raises(JspecError, match=r"reads the target's blocks `\[0\]`"):
        generate(ENGINE, LINE, [], drafter=Lens(proposals=1, taps=(0,), width=16, eps=1e-5))


# --- What is not a number ---

BAD = 6


def target(kind):
    table = tables.successors({1: 8, 8: 9, 9: BAD, BAD: 3, 2: 3, 3: 4, 4: 5, 5: 2}, V)
    return tables.broken(tables.params(table), BAD, kind) if kind else tables.params(table)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("kind", ["kv", "nan", "inf", "-inf"])
def test_rows_that_are_not_numbers_end_their_request_alone(kind, drafted):
    # VS-17: request 1 meets the bad token as its third; two more requests use both slots afterwards.
    requests = [Request(prompt=(t,), max_tokens=9, temperature=0.0) for t in (2, 1, 3, 4)]
    texts = [(3, 4, 5, 2, 3, 4, 5, 2, 3), (8, 9, BAD, 3, 4), (4, 5, 2, 3, 4, 5, 2, 3, 4), (5, 2, 3, 4, 5, 2, 3, 4, 5)]
    sound = run(target(None), requests, texts if drafted else None)
    traces = run(target(kind), requests, texts if drafted else None)
    bad = traces.pop(1).result
    assert (bad.tokens, bad.finish) == ((8, 9, BAD), "error")
    assert f"round {bad.rounds}" in bad.error and "after 3 output tokens" in bad.error
    assert bad.rounds == (1 if drafted else 4)
    del sound[1]
    assert tiny.differing(traces, sound) == (0, 0)
    assert [t.tokens for t in traces] == [texts[0], texts[2], texts[3]]


def test_a_prompt_that_is_not_a_number_never_starts():
    requests = [Request(prompt=p, max_tokens=4, temperature=0.0) for p in ((2,), (1, BAD, 3), (3,), (0, 2))]
    results = generate(ENGINE, target("kv"), requests)
    assert [r.finish for r in results] == ["length", "error", "length", "length"]
    assert results[1].tokens == () and "prefill" in results[1].error
    assert [r.tokens for r in (results[0], results[2], results[3])] == [(3, 4, 5, 2), (4, 5, 2, 3), (3, 4, 5, 2)]


# --- The right text ---


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.7}], ids=str)
def test_every_token_is_the_choice_of_a_pass_over_the_whole_text(settings):
    # From outside: prefill, rounds, positions and noise, against NumPy on the text that came out.
    requests = tiny.requests([1, 2, 16, 17, 18, 40], max_tokens=20, **settings)
    for request, trace in zip(requests, tiny.decode(tiny.engine(3), tiny.params(), requests), strict=True):
        text = np.array([*request.prompt, *trace.tokens])
        whole = reference.forward(tiny.params(), tiny.T, text)
        begin = len(request.prompt)
        scores = whole["logits"][begin - 1 : -1]
        if request.temperature:
            positions = np.arange(begin, len(text), dtype=np.int32)[None]
            seed, index = sampling.seed_words(request.seed)[None], np.zeros((1,), np.int32)
            scores = scores / 0.7 + np.asarray(noise.gumbel(*map(jnp.asarray, (seed, index, positions)), 64))[0]
        chosen = np.take_along_axis(scores, text[begin:, None], axis=1)[:, 0]
        assert (chosen > scores.max(axis=1) - 1e-4).all()
        # One position off, and other tokens would have been chosen.
        assert (np.roll(scores, 1, axis=0).argmax(axis=1) != text[begin:]).any()
        for layer in range(tiny.T.layers):
            for held, wanted in ((trace.columns[layer], "keys"), (trace.columns[tiny.T.layers + layer], "values")):
                numbers = held.view(np.float32).swapaxes(0, 1)
                np.testing.assert_allclose(numbers, whole[wanted][layer, : len(text) - 1], atol=1e-5)


# --- Seeds and settings ---


def test_unseeded_requests_get_fresh_recorded_seeds():
    # DT-1: one at a time; the recorded seed replays the text.
    asked = Request(prompt=(1,), max_tokens=10)
    results = [generate(ENGINE, EVEN, [asked])[0] for _ in range(20)]
    assert len({r.tokens for r in results}) == len({r.seed for r in results}) == 20
    replayed = generate(ENGINE, EVEN, [dataclasses.replace(asked, seed=r.seed) for r in results])
    assert [r.tokens for r in replayed] == [r.tokens for r in results]
    assert generate(ENGINE, EVEN, [dataclasses.replace(asked, seed=7)] * 2)[0].seed == 7


def test_unset_temperature_is_sampled():
    # VS-6: {top_k: 4} over four equal ids gives all four, evenly.
    table = np.zeros((V, V))
    table[:, 4:] = -9.0
    requests = [Request(prompt=(1,), max_tokens=31, top_k=4, seed=s) for s in range(20)]
    drawn = np.concatenate([r.tokens for r in generate(ENGINE, tables.params(table), requests)])
    assert chi_square(np.bincount(drawn, minlength=4), np.full(4, 0.25)) > LEVEL


def test_seeded_and_unseeded_requests_mix():
    # VS-16. The unseeded rows can only draw what top-k leaves.
    table = np.random.default_rng(0).standard_normal((V, V))
    weights = tables.params(table)
    mixed = [
        Request(prompt=(r, 3), max_tokens=12, temperature=t, top_k=3, seed=s)
        for r, (s, t) in enumerate([(1, 0.1), (None, 1.0), (2, 1.0), (None, 0.1)])
    ]
    traces = run(weights, mixed, [(1, 2, 3) * 4] * 4)
    for request, trace in zip(mixed, traces, strict=True):
        seeded = dataclasses.replace(request, seed=trace.result.seed)
        assert run(weights, [seeded])[0].tokens == trace.tokens  # solo, plain
        text = (3, *trace.tokens)
        assert all(law(table[a], 1.0, top_k=3)[b] > 0 for a, b in itertools.pairwise(text))


def test_answers_to_one_prompt_and_seed_differ():
    requests = [Request(prompt=(1,), max_tokens=10, seed=5, choice_index=i) for i in range(4)]
    assert len({r.tokens for r in generate(ENGINE, EVEN, requests)}) == 4


def test_a_request_can_be_ended_by_the_caller():
    requests = [Request(prompt=(1,), max_tokens=n, temperature=0.0) for n in (9, 5, 9, 2)]
    asked = []

    def abort(index, tokens):
        asked.append((index, len(tokens)))
        return index == 0 and len(tokens) >= 3

    got = generate(ENGINE, LINE, requests, abort=abort)
    assert [(r.tokens, r.finish) for r in got] == [
        (TEXT[:3], "abort"), (TEXT[:5], "length"), (TEXT[:9], "length"), (TEXT[:2], "length")
    ]  # fmt: skip
    assert max(n for i, n in asked if i == 0) == 3 and (1, 5) not in asked  # not asked about what has ended


# --- The loop ---


def test_events_tell_the_story_of_each_request():
    requests = [Request(prompt=(1,), max_tokens=n, temperature=0.0) for n in (3, 7, 1, 5)]
    written = script(requests, [TEXT] * 4)
    events = list(decode(ENGINE, LINE, requests, drafter=DRAFTER, weights=written))
    for index, request in enumerate(requests):
        mine = [e for e in events if e.index == index]
        assert [e.kind for e in mine[:2]] == ["start", "prefilled"] and mine[-1].kind == "done"
        rounds = [e for e in mine if e.kind == "tokens"]
        assert len(rounds) == len(mine) - 3 == mine[-1].result.rounds
        assert sum((e.tokens for e in rounds), ()) == mine[-1].result.tokens == TEXT[: request.max_tokens]
        assert sum(e.accepted for e in rounds) == mine[-1].result.accepted
        assert sum(e.proposed for e in rounds) == mine[-1].result.proposed
    # Two slots: the third starts when the first of the others is done, not earlier.
    order = [(e.kind, e.index) for e in events]
    assert order.index(("start", 2)) > order.index(("done", 0))
    assert order.index(("start", 1)) < order.index(("tokens", 0))


def test_measuring_changes_nothing():
    requests = [Request(prompt=(1,), max_tokens=9, temperature=0.0)] * 3
    times = RoundTimes()
    events = list(decode(ENGINE, LINE, requests, drafter=DRAFTER, weights=script(requests, [TEXT] * 3), times=times))
    assert [e.result.tokens for e in events if e.result] == [TEXT[:9]] * 3
    assert times.rounds > 0 and min(times.draft, times.verify, times.host) > 0


def test_nothing_to_do_is_done():
    assert generate(ENGINE, LINE, []) == []


def test_the_drafter_is_shown_every_committed_token_once():
    requests = tiny.requests([5, 17, 34, 1], max_tokens=20, temperature=0.0)
    drafter, records = NGram(proposals=7), {}

    def on_finish(state, slot, index):
        records[index] = np.asarray(state.drafter)[slot]

    results = generate(tiny.engine(3), tiny.params(), requests, drafter=drafter, weights=(), on_finish=on_finish)
    for index, (request, result) in enumerate(zip(requests, results, strict=True)):
        text = [*request.prompt, *result.tokens][:-1]  # the last one waits for the next round
        assert records[index].tolist() == text + [-1] * (tiny.engine(3).capacity - len(text))


def test_nothing_compiles_after_warm_up():
    # KV-7, SV-1 and the contract of fixed shapes: lengths, settings and seeds are values.
    rng = np.random.default_rng(0)
    weights, drafter = tiny.params(), NGram(proposals=3)

    def some(count):
        lengths = rng.integers(1, 60, count)
        for prompt in tiny.prompts(lengths, vocab=40):
            yield Request(
                prompt=prompt,
                max_tokens=int(rng.integers(1, 30)),
                temperature=float(rng.choice([0.0, 0.3, 1.0, 2.0])),
                top_k=int(rng.integers(0, 9)),
                top_p=float(rng.choice([0.5, 1.0])),
                min_p=float(rng.choice([0.0, 0.1])),
                end_ids=tuple(rng.integers(0, 64, rng.integers(0, 9)).tolist()),
                seed=[None, int(rng.integers(2**63))][rng.integers(2)],
            )

    for chosen in (None, drafter):
        generate(tiny.engine(3), weights, some(2), drafter=chosen, weights=() if chosen else None)
    live = []
    with CompileCounter() as counter:
        for chosen in (None, drafter, None, drafter):
            lent = () if chosen else None
            done = [e for e in decode(tiny.engine(3), weights, some(50), drafter=chosen, weights=lent) if e.result]
            assert len(done) == 50
            gc.collect()
            live.append(sum(x.nbytes for x in jax.live_arrays()))
    assert counter.names == []
    assert max(live) <= 1.01 * min(live)


def test_compiled_and_interpreted_rounds_agree():
    # KV-7: two rounds whose accept lengths are 3 and 1; no length was baked in.
    request = Request(prompt=(1,), max_tokens=6, temperature=0.0, seed=0)
    right = [True, True, True, True, True, True, False]
    compiled = run(LINE, [request], [TEXT], right=right)
    assert (compiled[0].result.rounds, compiled[0].result.accepted) == (2, 4)
    with jax.disable_jit():
        interpreted = run(LINE, [request], [TEXT], right=right)
    assert interpreted[0].result == compiled[0].result
