"""The static engine's programs: the loop on the device, chunks, capacity, one slot's affairs.

Rule 2.1.6 (capacity: an update that does not fit is shifted in silence, so none may ever not fit) and known
failures KV-1, KV-2 and SV-4 (cancelling affects only its own request).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.decoding import round as rounds
from jspec.decoding import tree
from jspec.decoding.request import admission
from jspec.decoding.state import STOP
from jspec.drafters.ngram import NGram
from jspec.engine import static
from jspec.engine.config import LONGEST_BLOCK, EngineConfig
from jspec.errors import JspecError
from tests import tiny
from tests.tiny import NOBODY, T, params

ENGINE = tiny.engine(3)
NGRAM = NGram(proposals=7)


def started(requests, drafter=NGRAM, weights=None):
    """A state in which each request has a slot and is prefilled."""
    weights = params() if weights is None else weights
    state = static.init(ENGINE, drafter, weights, ())
    for slot, request in enumerate(requests):
        number = np.int32(slot)
        state = static.reset(drafter, state, number)
        for tokens, start, count in static.chunks(ENGINE, np.asarray(request.prompt, np.int32)):
            features, _, cache = static.prefill(ENGINE, weights, state.cache, number, tokens, start, count)
            rows = rounds.Rows(
                slot=number, tokens=tokens[None], features=features, start=start[None], count=count[None]
            )
            state = state.replace(cache=cache, drafter=static.observe(drafter, (), state.drafter, rows))
        state = static.admit(state, admission(ENGINE, request, slot))
    return state


def finished(state, drafter=NGRAM):
    """Stepped to the end: the state, and what each slot emitted."""
    emitted = [[] for _ in range(ENGINE.slots)]
    while np.asarray(state.running).any():
        state, info = static.step(ENGINE, drafter, params(), (), state)
        for slot in range(ENGINE.slots):
            emitted[slot].extend(np.asarray(info.tokens)[slot, : info.count[slot]].tolist())
    return state, emitted


def columns(state, slot):
    held = int(state.length[slot]) - 1
    return [tiny.bits(x)[slot, :, :held] for x in (*state.cache.keys, *state.cache.values)]


def work(**settings):
    return tiny.requests([5, 17, 34], max_tokens=30, **settings)


# --- The loop on the device ---


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_device_loop_equals_stepping(temperature):
    stepped, emitted = finished(started(work(temperature=temperature)))
    looped, transcript = static.run(ENGINE, NGRAM, params(), (), started(work(temperature=temperature)))
    for slot in range(3):
        assert transcript.tokens[slot, : transcript.count[slot]].tolist() == emitted[slot]
        for a, b in zip(columns(stepped, slot), columns(looped, slot), strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(stepped.length, looped.length)
    np.testing.assert_array_equal(stepped.finish, looped.finish)
    assert 0 < transcript.rounds <= 30
    assert not np.asarray(transcript.tokens)[:, 31 + ENGINE.rows :].any()


def test_the_device_loop_of_nothing_does_nothing():
    _, transcript = static.run(ENGINE, NGRAM, params(), (), static.init(ENGINE, NGRAM, params(), ()))
    assert int(transcript.rounds) == 0 and not np.asarray(transcript.count).any()


# --- One slot's affairs ---


def test_a_round_changes_only_the_columns_of_its_block():
    # KV-2: slots that begin, that stand at the very end of the text, and that are done.
    requests = [*tiny.requests([1]), *tiny.requests([63, 63])]
    state = started(requests)
    state = static.cancel(state, np.int32(2))
    before = [tiny.bits(x).copy() for x in (*state.cache.keys, *state.cache.values)]
    begin = np.asarray(state.cache.length).copy()
    assert begin.tolist() == [0, 62, 62]
    state, info = static.step(ENGINE, NGRAM, params(), (), state)
    assert info.count[2] == 0
    for old, new in zip(before, (*state.cache.keys, *state.cache.values), strict=True):
        for slot in range(3):
            outside = np.ones((ENGINE.capacity,), bool)
            outside[begin[slot] : begin[slot] + ENGINE.rows] = False
            np.testing.assert_array_equal(tiny.bits(new)[slot][:, outside], old[slot][:, outside])
            assert (tiny.bits(new)[slot][:, begin[slot]] != old[slot][:, begin[slot]]).any()
    # Slot 1 had room for one token and has it; a block written there still lies where it belongs.
    assert (info.count[1], state.length[1]) == (1, 64)


def test_cancelling_stops_one_slot_and_no_other():
    # SV-4.
    whole, texts = finished(started(work()))
    state = started(work())
    state, info = static.step(ENGINE, NGRAM, params(), (), state)
    emitted = [np.asarray(info.tokens)[s, : info.count[s]].tolist() for s in range(3)]
    state = static.cancel(state, np.int32(1))
    state, rest = finished(state)
    assert rest[1] == [] and int(state.finish[1]) == STOP
    assert int(state.length[1]) == 17 + len(emitted[1])
    for slot in (0, 2):
        assert emitted[slot] + rest[slot] == texts[slot]
        for a, b in zip(columns(state, slot), columns(whole, slot), strict=True):
            np.testing.assert_array_equal(a, b)


def test_resetting_and_filling_one_slot_disturbs_no_other():
    _, texts = finished(started(work()))
    state = started(work())
    state, info = static.step(ENGINE, NGRAM, params(), (), state)
    emitted = [np.asarray(info.tokens)[s, : info.count[s]].tolist() for s in range(3)]
    state = static.reset(NGRAM, state, np.int32(1))
    assert not bool(state.running[1])
    prompt = np.asarray(tiny.requests([40])[0].prompt, np.int32)
    for tokens, start, count in static.chunks(ENGINE, prompt):
        _, _, cache = static.prefill(ENGINE, params(), state.cache, np.int32(1), tokens, start, count)
        state = state.replace(cache=cache)
    _, rest = finished(state)
    assert [emitted[s] + rest[s] for s in (0, 2)] == [texts[s] for s in (0, 2)]


# --- Chunks and capacity ---


@given(st.integers(1, 200), st.integers(1, 40))
def test_chunks_are_the_prompt_but_its_last_token_on_a_grid(length, chunk):
    config = dataclasses.replace(ENGINE, chunk=chunk)
    prompt = np.arange(1, length + 1, dtype=np.int32)
    parts = static.chunks(config, prompt)
    assert [int(start) for _, start, _ in parts] == list(range(0, length - 1, chunk))
    read = [t for tokens, _, count in parts for t in tokens[:count].tolist()]
    assert read == list(range(1, length))
    for tokens, start, count in parts:
        assert (tokens.shape, tokens.dtype, start.dtype, count.dtype) == ((chunk,), np.int32, np.int32, np.int32)
        assert not tokens[count:].any()


LONG = dataclasses.replace(T, max_positions=4096)


@given(st.integers(2, 4096), st.integers(1, 128), st.integers(1, 300), st.integers(1, 300))
def test_no_write_is_ever_shifted(max_length, rows, chunk, key_block):
    config = EngineConfig(target=LONG, rows=rows, max_length=max_length, chunk=chunk, key_block=key_block)
    capacity = config.capacity
    assert capacity % key_block == 0
    # The longest prompt leaves room for one token; its last chunk is padded to the whole chunk.
    last_chunk = (max_length - 2 + chunk - 1) // chunk * chunk
    assert last_chunk <= capacity
    # The anchor of a slot that is done may be the last token; its block is rewritten there.
    assert max_length - 1 + rows <= capacity


def test_a_block_at_the_very_end_lies_where_it_belongs():
    # The largest length a state can have: N columns from there are written, none shifted.
    state = static.init(ENGINE, NOBODY, params(), ())
    at = np.full((3,), ENGINE.max_length - 1, np.int32)
    cache = state.cache.replace(length=jnp.asarray(at))
    block = tree.chain(jnp.ones((3,), jnp.int32), jnp.ones((3, 7), jnp.int32), jnp.full((3,), 7, jnp.int32), 8)
    *_, after = static.verify(ENGINE, params(), cache, block)
    written = np.asarray(after.keys[0]).any(axis=(0, 1, 3))
    assert np.flatnonzero(written).tolist() == list(range(63, 71))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("slots", [0, -1, 1.0, True, "1", None, 5000]),
        ("rows", [0, LONGEST_BLOCK + 1, 2.5]),
        ("max_length", [1, 257, None]),
        ("chunk", [0, 5000]),
        ("key_block", [0, -16]),
    ],
)
def test_shapes_that_cannot_be_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(JspecError) as caught:
            EngineConfig(target=T, **{"max_length": 64, field: value})
        assert f"`{field}`" in caught.value.given and f"`{value!r}`" in caught.value.given


@pytest.mark.parametrize("taps", [(2,), (-2,), (1, 0), (0, 0)])
def test_taps_that_cannot_be_are_refused(taps):
    with pytest.raises(JspecError, match="taps"):
        EngineConfig(target=T, max_length=64, taps=taps)


def test_an_engine_is_a_key():
    assert hash(tiny.engine(3)) == hash(tiny.engine(3)) and tiny.engine(3) == tiny.engine(3)
    assert tiny.engine(3) != tiny.engine(3, chunk=8)
    jax.jit(lambda config: jnp.zeros(config.rows), static_argnums=0)(tiny.engine(3))
