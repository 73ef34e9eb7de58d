"""One round's bookkeeping: what is emitted, what ends a request, what the drafter is shown.

`commit` on blocks of rows is compared with a host that reads the target's choices one by one, as plain
decoding would. Known failures covered: VS-12 (stop or cap, whichever comes first), VS-13's end ids, VS-17
(rows that are not numbers), VS-3 and VS-5 (what is emitted is the target's own choice), BM-2.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.decoding import state as states
from jspec.decoding import tree
from jspec.decoding.state import ERROR, LENGTH, RUNNING, STOP
from jspec.engine import static
from jspec.engine.config import EngineConfig
from tests import tables
from tests.scripted import Scripted, script

V, N, B = 12, 6, 16
ENGINE = EngineConfig(target=tables.config(V), slots=B, rows=N, max_length=32, chunk=8, key_block=8)
DRAFTER = Scripted(proposals=5)


@dataclasses.dataclass(frozen=True)
class Case:
    """One slot before a commit, and what the verified rows say."""

    choice: tuple[int, ...]  # the target's, after each row
    proposals: tuple[int, ...] = ()
    room: int = 20  # tokens until the limit
    length: int = 7
    ends: tuple[int, ...] = ()
    bad: tuple[tuple[int, str], ...] = ()  # rows that are not numbers, and how
    finish: int = RUNNING


@dataclasses.dataclass(frozen=True)
class Outcome:
    tokens: tuple[int, ...]
    finish: int
    accepted: int


def one_by_one(case: Case) -> Outcome:
    """The same by reading choices in order, as plain decoding emits them."""
    accepted = 0
    while accepted < len(case.proposals) and case.proposals[accepted] == case.choice[accepted]:
        accepted += 1
    if case.finish != RUNNING:
        return Outcome((), case.finish, 0)
    tokens = []
    for row in range(accepted + 1):
        if row in dict(case.bad):
            return Outcome(tuple(tokens), ERROR, accepted)
        tokens.append(case.choice[row])
        if case.choice[row] in case.ends:
            return Outcome(tuple(tokens), STOP, accepted)
        if len(tokens) == case.room:
            return Outcome(tuple(tokens), LENGTH, accepted)
    return Outcome(tuple(tokens), RUNNING, accepted)


@jax.jit
def empty():
    return states.init(ENGINE, jnp.float32, DRAFTER.init(None, B, ENGINE.capacity))


def settle(cases):
    """Commits all cases as slots of one batch."""
    cases = [*cases, *[Case(choice=(0,) * N, finish=LENGTH)] * (B - len(cases))]
    column = lambda name: np.array([getattr(c, name) for c in cases], np.int32)  # noqa: E731
    ends = np.full((B, states.END_IDS), -1, np.int32)
    logits = np.zeros((B, N, V), np.float32)
    finite = np.ones((B, N), bool)
    proposals = np.zeros((B, N - 1), np.int32)
    for slot, case in enumerate(cases):
        ends[slot, : len(case.ends)] = case.ends
        proposals[slot, : len(case.proposals)] = case.proposals
        logits[slot, np.arange(N), [*case.choice, *[0] * (N - len(case.choice))]] = 9.0
        for row, how in case.bad:
            if how == "kv":
                finite[slot, row] = False
            elif how == "nan":
                logits[slot, row, 3] = np.nan
            else:
                logits[slot, row] = float(how)
    length = column("length")
    state = empty()
    state = state.replace(
        anchor=np.full((B,), 5, np.int32),
        length=length,
        limit=length + column("room"),
        end_ids=ends,
        finish=column("finish"),
        cache=state.cache.replace(length=length - 1),
    )
    count = np.array([len(c.proposals) for c in cases], np.int32)
    block = tree.chain(state.anchor, proposals, count, N)
    features = np.zeros((B, N, 0), np.float32)
    after, info = jax.device_get(static.commit(DRAFTER, script([], []), state, block, count, logits, features, finite))
    for slot, case in enumerate(cases):
        expected = one_by_one(case)
        emitted = len(expected.tokens)
        assert tuple(info.tokens[slot, : info.count[slot]].tolist()) == expected.tokens, case
        assert info.finish[slot] == expected.finish, case
        if all(row > expected.accepted for row, _ in case.bad):  # else there is no choice to agree with
            assert info.accepted[slot] == expected.accepted, case
        assert not info.tokens[slot, emitted:].any()
        assert after.length[slot] == length[slot] + emitted
        assert after.cache.length[slot] == after.length[slot] - 1
        assert after.anchor[slot] == (expected.tokens[-1] if emitted else 5)
        # The drafter is shown the anchor and all emitted tokens but the last, and nothing else.
        shown = [5, *expected.tokens][:emitted]
        record = np.full((ENGINE.capacity,), -1)
        record[length[slot] - 1 : length[slot] - 1 + emitted] = shown
        np.testing.assert_array_equal(after.drafter[slot], record)
    return [one_by_one(c) for c in cases]


STOP_ID = 11


@pytest.mark.parametrize(
    ("case", "tokens", "finish"),
    [
        # VS-12: the block 8 9 STOP 3 4 and its extra token, with room for 4, 3, 2 and 6.
        (Case((8, 9, STOP_ID, 3, 4, 5), (8, 9, STOP_ID, 3, 4), 4, ends=(STOP_ID,)), (8, 9, STOP_ID), STOP),
        (Case((8, 9, STOP_ID, 3, 4, 5), (8, 9, STOP_ID, 3, 4), 3, ends=(STOP_ID,)), (8, 9, STOP_ID), STOP),
        (Case((8, 9, STOP_ID, 3, 4, 5), (8, 9, STOP_ID, 3, 4), 2, ends=(STOP_ID,)), (8, 9), LENGTH),
        (Case((8, 9, STOP_ID, 3, 4, 5), (8, 9, STOP_ID, 3, 4), 6), (8, 9, STOP_ID, 3, 4, 5), LENGTH),
        # Any of several end ids; one that is refused, or only proposed, ends nothing.
        (Case((8, 9, 10, 3, 4, 5), (8, 9, 10, 3, 4), ends=(STOP_ID, 10)), (8, 9, 10), STOP),
        (Case((8, 9, 3, STOP_ID, 0, 0), (8, 9, STOP_ID), ends=(STOP_ID,)), (8, 9, 3), RUNNING),
        (Case((STOP_ID, 8, 9, 3, 4, 5), (), ends=(STOP_ID,)), (STOP_ID,), STOP),
        # VS-17: what is before the bad row is emitted, what it and later rows say is not.
        (Case((8, 9, 3, 4, 5, 6), (8, 9, 3), bad=((2, "nan"),)), (8, 9), ERROR),
        (Case((8, 9, 3, 4, 5, 6), (8, 9, 3), bad=((2, "inf"),)), (8, 9), ERROR),
        (Case((8, 9, 3, 4, 5, 6), (8, 9, 3), bad=((2, "-inf"),)), (8, 9), ERROR),
        (Case((8, 9, 3, 4, 5, 6), (8, 9, 3), bad=((2, "kv"),)), (8, 9), ERROR),
        (Case((8, 9, 3, 4, 5, 6), (), bad=((0, "kv"),)), (), ERROR),
        (Case((8, 9, 3, 4, 5, 6), (8, 9, 3), ends=(9,), bad=((2, "kv"),)), (8, 9), STOP),
        (Case((8, 9, 3, 4, 5, 6), (8, 9, 3), 2, bad=((2, "kv"),)), (8, 9), LENGTH),
        (Case((8, 9, 3, 4, 5, 6), (8, 7, 3), bad=((2, "kv"),)), (8, 9), RUNNING),
        (Case((8, 9, 3, 4, 5, 6), (8, 9, 3), finish=STOP), (), STOP),
    ],
    ids=str,
)
def test_by_hand(case, tokens, finish):
    outcome = settle([case])[0]
    assert (outcome.tokens, outcome.finish) == (tokens, finish)


ids = st.integers(1, 4)


@st.composite
def cases(draw):
    choice = draw(st.lists(ids, min_size=N, max_size=N))
    count = draw(st.integers(0, N - 1))
    spoilt = draw(st.integers(0, N))  # proposals agree up to here
    proposals = [c if i < spoilt else draw(ids) for i, c in enumerate(choice[:count])]
    kinds = st.sampled_from(["kv", "nan", "inf", "-inf"])
    bad = draw(st.dictionaries(st.integers(0, N - 1), kinds, max_size=2)) if draw(st.booleans()) else {}
    return Case(
        choice=tuple(choice),
        proposals=tuple(proposals),
        room=draw(st.integers(1, 8)),
        length=draw(st.integers(1, 20)),
        ends=tuple(draw(st.lists(ids, max_size=2, unique=True))),
        bad=tuple(bad.items()),
        finish=draw(st.sampled_from([RUNNING, RUNNING, RUNNING, STOP, LENGTH, ERROR])),
    )


@given(st.lists(cases(), min_size=B, max_size=B))
@settings(max_examples=60)
def test_a_round_emits_what_plain_decoding_would(batch):
    settle(batch)


def test_greedy_emits_the_best_though_the_draft_is_likely():
    # VS-3: p = .3, .5, .2 and a draft of token 0, which a ratio test could pass.
    logits = np.full((B, N, V), -np.inf, np.float32)
    logits[:, :, :3] = np.log([0.3, 0.5, 0.2])
    state = empty().replace(finish=np.zeros((B,), np.int32), limit=np.full((B,), 9, np.int32))
    block = tree.chain(state.anchor, np.zeros((B, 5), np.int32), np.full((B,), 1, np.int32), N)
    _, info = static.commit(
        DRAFTER, script([], []), state, block, np.ones((B,), np.int32), logits,
        np.zeros((B, N, 0), np.float32), np.ones((B, N), bool),
    )  # fmt: skip
    assert np.asarray(info.count).tolist() == [1] * B
    assert np.asarray(info.tokens)[:, 0].tolist() == [1] * B
    assert not np.asarray(info.accepted).any()


@pytest.mark.parametrize(
    ("offered", "room", "proposed"),
    [(5, 20, 5), (5, 3, 2), (5, 1, 0), (2, 20, 2), (99, 20, 5), (-3, 20, 0)],
)
def test_no_slot_drafts_beyond_its_limit_nor_its_drafter(offered, room, proposed):
    # KV-2: what could not be emitted is not drafted; a done slot drafts nothing.
    weights = script([], [])
    weights = weights.replace(tokens=weights.tokens + 3, counts=weights.counts + offered)
    state = empty()
    length = np.full((B,), 7, np.int32)
    running = np.where(np.arange(B) % 2, LENGTH, RUNNING).astype(np.int32)
    state = state.replace(length=length, limit=length + room, finish=running, anchor=np.full((B,), 5, np.int32))
    block, made = static.draft(ENGINE, DRAFTER, weights, state)
    assert np.asarray(made).tolist() == [proposed, 0] * (B // 2)
    np.testing.assert_array_equal(block.tokens[0], [5, *[3] * proposed, *[0] * (5 - proposed)])
    np.testing.assert_array_equal(np.asarray(block.valid).sum(axis=1), [proposed + 1, 1] * (B // 2))
