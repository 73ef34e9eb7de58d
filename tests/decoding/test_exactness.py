"""Contract 2.1: inside one engine the text, and every bit of its keys and values, is a function of prompt,
settings and seed alone. Drafter, acceptance history, batch mates, slot and order of arrival change nothing.

Known failures covered: VS-1, VS-2, VS-15, VS-16, KV-1, KV-2, KV-6, DR-4, DT-2. The negative controls plant the three
faults that would break the law, and each must be seen: keys summed in two parts and prefill by another
program in the bits, noise from a running stream in the sequences.

(KV-3 speaks of a draft model's cache: no drafter here has one.)
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jspec.decoding.request import Request, admission
from jspec.drafters.doubles import Lens, Oracle, Random, Self
from jspec.drafters.doubles import script as oracle_script
from jspec.drafters.ngram import NGram
from jspec.engine import static
from jspec.target import attention
from tests import tiny
from tests.scripted import Scripted, script
from tests.target.test_attention import split
from tests.tiny import DTYPES, T, differing

# On, before and behind the borders of chunks and key blocks (16); each prompt greedy or sampled.
LENGTHS = [1, 2, 5, 9, 15, 16, 17, 18, 31, 32, 33, 34, 40, 3, 16, 17]
NEW = 20


@functools.cache
def work() -> list[Request]:
    sampled = {"temperature": 0.8, "top_p": 0.95}
    return [
        dataclasses.replace(r, max_tokens=NEW + i % 3, **({"temperature": 0.0} if i % 2 else sampled))
        for i, r in enumerate(tiny.requests(LENGTHS))
    ]


@functools.cache
def plain(slots, dtype):
    """Plain decoding in the same engine: what every other way of decoding must equal."""
    return tiny.decode(tiny.engine(slots), tiny.params(dtype), work())


def outputs(slots, dtype):
    return [t.tokens for t in plain(slots, dtype)]


def check(slots, dtype, drafter, lent=None, *, seed=0):
    """Decodes in another order, so with other neighbours in other slots, and compares with plain."""
    order = np.random.default_rng(seed).permutation(len(LENGTHS))
    traces = tiny.decode(tiny.engine(slots), tiny.params(dtype), work(), drafter=drafter, lent=lent, order=order)
    assert differing(traces, plain(slots, dtype)) == (0, 0)
    return [t.result for t in traces]


def accepted(results):
    """Share of the verified proposals that were accepted."""
    return sum(r.accepted for r in results) / sum(r.proposed for r in results)


ENGINES = [(slots, dtype) for dtype in DTYPES for slots in (1, 3, 8)]


@pytest.mark.parametrize(("slots", "dtype"), ENGINES)
def test_any_script_writes_the_plain_text(slots, dtype):
    texts = outputs(slots, dtype)
    assert len(set(texts)) == len(texts)
    assert {r.finish for r in (t.result for t in plain(slots, dtype))} == {"length"}
    run = lambda seed=0, **how: check(slots, dtype, Scripted(proposals=7), script(work(), texts, **how), seed=seed)  # noqa: E731
    oracle = run()
    assert accepted(oracle) == 1
    # A full block emits 8: the proposals and the target's own.
    assert [r.rounds for r in oracle] == [-(-len(t) // 8) for t in texts]
    assert accepted(run(right=False, seed=1)) == 0
    assert 0 < accepted(run(right=[True, True, True, False, True, False], seed=2)) < 1
    assert accepted(run(counts=[i % 8 for i in range(16)], seed=3)) == 1  # VS-15: ragged
    assert accepted(run(every=3, seed=4)) == 1  # KV-6: drafted and undrafted rounds
    # Ids that no vocabulary holds: never accepted, never harmful.
    assert accepted(run(right=[True, False], wrong_by=1 << 20, seed=5)) < 1
    assert accepted(run(right=[True, False], wrong_by=-1000, seed=6)) < 1


@pytest.mark.parametrize(("slots", "dtype"), ENGINES)
def test_prompt_lookup_writes_the_plain_text(slots, dtype):
    results = check(slots, dtype, NGram(proposals=7))
    assert sum(r.proposed for r in results) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "drafter",
    [
        NGram(proposals=3),
        NGram(proposals=1),  # DR-4: the smallest draft
        Random(proposals=7, vocab=T.vocab_size),
        Self(proposals=7, engine=tiny.engine(3)),
        Lens(proposals=2, taps=(1,), width=T.width, eps=T.norm_eps),
    ],
    ids=lambda d: d.name,
)
def test_every_drafter_writes_the_plain_text(drafter, dtype):
    results = check(3, dtype, drafter)
    if isinstance(drafter, Self):
        assert accepted(results) == 1
    if isinstance(drafter, NGram) and drafter.proposals == 1:
        assert all(r.accepted <= r.proposed <= r.rounds for r in results)


def test_every_pattern_of_accept_lengths_crosses_the_borders():
    # KV-1: every accept length 0..3 after every other, over a prompt of 13 and 50 tokens.
    pattern = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3)
    requests = tiny.requests([13, 13, 13], max_tokens=50, temperature=0.0)
    base = tiny.decode(tiny.engine(3), tiny.params(), requests)
    texts = [(*r.prompt, *t.tokens) for r, t in zip(requests, base, strict=True)]
    assert [len(t) for t in texts] == [63, 63, 63]
    drafter = Oracle(proposals=4, pattern=pattern)
    lent = oracle_script(texts, tiny.engine(3).capacity)
    traces = tiny.decode(tiny.engine(3), tiny.params(), requests, drafter=drafter, lent=lent)
    assert differing(traces, base) == (0, 0)
    # One chunk of prompt was observed first, so the pattern starts at its second entry.
    lengths = [pattern[i % 16] + 1 for i in range(1, 99)]
    rounds = int(np.searchsorted(np.cumsum(lengths), 50)) + 1
    assert [t.result.rounds for t in traces] == [rounds] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_alone_or_beside_others(dtype):
    alone = [t for r in work() for t in tiny.decode(tiny.engine(3), tiny.params(dtype), [r])]
    assert differing(alone, plain(3, dtype)) == (0, 0)


def test_prefill_is_the_same_with_any_drafter():
    # VS-2: the cache right after the prompt, before any round.
    def after_prompt(drafter, lent):
        config, weights = tiny.engine(3), tiny.params()
        state = static.init(config, drafter, weights, lent)
        prompt = np.asarray(work()[10].prompt, np.int32)
        for tokens, start, count in static.chunks(config, prompt):
            _, _, cache = static.prefill(config, weights, state.cache, np.int32(1), tokens, start, count)
            state = state.replace(cache=cache)
        return [tiny.bits(x) for x in (*state.cache.keys, *state.cache.values)]

    base = after_prompt(tiny.NOBODY, ())
    drafted = after_prompt(NGram(proposals=3), ())
    for a, b in zip(base, drafted, strict=True):
        np.testing.assert_array_equal(a, b)
    # And it is what the whole run is built on.
    for a, b in zip(base, plain(3, DTYPES[0])[10].columns, strict=True):
        np.testing.assert_array_equal(a[1, :, :32], b[:, :32])


def test_the_whole_trace_repeats():
    # DT-2: drafts and accept lengths too, not only the text.
    runs = [check(3, DTYPES[0], NGram(proposals=7)) for _ in range(2)]
    assert runs[0] == runs[1]


# --- Negative controls ---


def test_two_sums_are_seen_in_the_bits(monkeypatch):
    monkeypatch.setattr(attention, "read", split)
    config = tiny.engine(3, max_length=63)  # an engine of its own: its programs hold the fault
    requests = [r for r in work() if len(r.prompt) + r.max_tokens <= 63]
    base = tiny.decode(config, tiny.params(), requests)
    drafter, lent = Scripted(proposals=7), script(requests, [t.tokens for t in base])
    _, numbers = differing(tiny.decode(config, tiny.params(), requests, drafter=drafter, lent=lent), base)
    assert numbers > 0


def test_prefill_by_another_program_is_seen_in_the_bits():
    config, other = tiny.engine(3), tiny.engine(3, chunk=1)
    prompt = np.asarray(work()[12].prompt, np.int32)
    caches = []
    for engine in (config, other):
        cache = static.init(config, NGram(proposals=3), tiny.params(), ()).cache
        for tokens, start, count in static.chunks(engine, prompt):
            _, _, cache = static.prefill(engine, tiny.params(), cache, np.int32(0), tokens, start, count)
        caches.append([np.asarray(x)[0, :, : len(prompt) - 1] for x in (*cache.keys, *cache.values)])
    same = [np.array_equal(tiny.bits(a), tiny.bits(b)) for a, b in zip(*caches, strict=True)]
    assert not all(same)
    for a, b in zip(*caches, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)  # the same numbers, yet not the same bits


def test_noise_from_a_running_stream_is_seen_in_the_sequences():
    # A stream advances with every round, so what it gives at a position depends on how rounds fell.
    def stream(drafter, lent):
        config, weights = tiny.engine(3), tiny.params()
        state = static.init(config, drafter, weights, lent)
        requests = [dataclasses.replace(r, temperature=0.8, max_tokens=24) for r in tiny.requests([1, 1, 1])]
        emitted = [[], [], []]
        for slot, request in enumerate(requests):
            state = static.admit(static.reset(drafter, state, np.int32(slot)), admission(config, request, slot))
        while np.asarray(state.running).any():
            state, info = static.step(config, drafter, weights, lent, state)
            for slot in range(3):
                emitted[slot].extend(np.asarray(info.tokens)[slot, : info.count[slot]].tolist())
            if advance:
                drawn = jax.tree.map(np.asarray, state.sampling)
                state = state.replace(sampling=drawn.replace(seed=drawn.seed + np.uint32(1)))
        return requests, emitted

    for advance in (False, True):
        requests, base = stream(tiny.NOBODY, ())
        _, drafted = stream(Scripted(proposals=7), script(requests, base))
        assert (base != drafted) == advance
