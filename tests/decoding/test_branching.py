"""Trees change no token and no bit: drafts may branch, and the text stays that of plain decoding.

One engine of 32 rows serves every budget. The oracle's tree holds the right continuation on a branch beside a
spoilt chain, so paths leave the front chain in nearly every round; random trees leave it now and then.
Known failures covered: TR-1 (windows in trees), TR-3 (only the target's own token is followed, whatever its
place), VS-1. The negative control is `exact="off"`, which keeps what branches computed.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import accept, branching, growth
from jspec.decoding.branching import Branching
from jspec.decoding.generate import generate
from jspec.decoding.request import Request, admission
from jspec.decoding.state import RUNNING
from jspec.drafters.base import Plain, Rows
from jspec.drafters.doubles import Lens, Oracle, Random, script
from jspec.engine import static
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from tests import tables, tiny
from tests.decoding import test_matrix as mixed
from tests.tiny import DTYPES, T, differing

LENGTHS = [1, 5, 15, 16, 17, 33, 9, 30]
NEW = 24
ENGINE = tiny.engine(3, rows=32)
PATTERN = (0, 2, 1, 5, 7, 3, 0, 0, 4)
CASES = [("nobody", 2), ("oracle", 8), ("oracle", 16), *(("detour", b) for b in (3, 8, 16, 32))]
CASES += [("random", b) for b in (8, 16, 32)] + [("lens", 32)]


@functools.cache
def work():
    """Greedy and sampled by turns."""
    return [
        dataclasses.replace(r, temperature=0.8 * (i % 2), top_p=0.95, max_tokens=NEW + i % 3)
        for i, r in enumerate(tiny.requests(LENGTHS))
    ]


@functools.cache
def plain(dtype):
    return tiny.decode(ENGINE, tiny.params(dtype), work())


def drafting(name, dtype):
    texts = [(*r.prompt, *t.tokens) for r, t in zip(work(), plain(dtype), strict=True)]
    lent = script(texts, ENGINE.capacity)
    return {
        "nobody": (Plain(), ()),
        "oracle": (Oracle(proposals=7), lent),
        "detour": (Oracle(proposals=7, pattern=PATTERN), lent),
        "random": (Random(proposals=3, vocab=T.vocab_size), ()),
        "lens": (Lens(proposals=2, taps=(1,), width=T.width, eps=T.norm_eps), None),
    }[name]


def run(name, dtype, budget, exact="trunk", engine=ENGINE):
    drafter, lent = drafting(name, dtype)
    order = np.random.default_rng(budget).permutation(len(LENGTHS))
    branching = Branching(budget=budget, exact=exact)
    weights = tiny.params(dtype)
    return tiny.decode(engine, weights, work(), drafter=drafter, lent=lent, order=order, branching=branching)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "budget"), CASES)
def test_trees_write_the_plain_text(name, budget, dtype):
    traces = run(name, dtype, budget)
    assert differing(traces, plain(dtype)) == (0, 0)
    rounds = sum(t.result.rounds for t in traces)
    accepted = sum(t.result.accepted for t in traces)
    assert name != "nobody" or accepted == 0
    if name == "oracle":
        assert [t.result.rounds for t in traces] == [-(-len(t.tokens) // min(budget, 8)) for t in traces]
    if name == "detour" and budget > 8:
        # Two rounds for a detour, and all of it is kept: four tokens a round on average.
        assert accepted > 2.5 * rounds


@pytest.mark.parametrize("dtype", DTYPES)
def test_processors_and_log_probabilities_follow_the_path(dtype):
    requests = mixed.work("mixed")
    base = tiny.decode(ENGINE, tiny.params(dtype), requests)
    texts = [(*r.prompt, *t.tokens) for r, t in zip(requests, base, strict=True)]
    drafter, lent = Oracle(proposals=7, pattern=PATTERN), script(texts, ENGINE.capacity)
    traces = tiny.decode(
        ENGINE, tiny.params(dtype), requests, drafter=drafter, lent=lent, branching=Branching(budget=32)
    )
    assert differing(traces, base) == (0, 0)
    assert [t.result.logprobs for t in traces] == [t.result.logprobs for t in base]


def test_windows_in_trees_are_those_of_the_text():
    # TR-1, through whole texts: windows of 5 tokens, shorter than a block and than its paths.
    config = dataclasses.replace(ENGINE, target=dataclasses.replace(T, window=5, windowed=(0,)))
    base = tiny.decode(config, tiny.params(), work())
    assert any(a.tokens != b.tokens for a, b in zip(base, plain(DTYPES[0]), strict=True))
    texts = [(*r.prompt, *t.tokens) for r, t in zip(work(), base, strict=True)]
    drafter, lent = Oracle(proposals=7, pattern=PATTERN), script(texts, config.capacity)
    traces = tiny.decode(config, tiny.params(), work(), drafter=drafter, lent=lent, branching=Branching(budget=16))
    assert differing(traces, base) == (0, 0)
    assert sum(t.result.accepted for t in traces) > 2 * sum(t.result.rounds for t in traces)


# --- Round by round ---


def rounds_of(drafter, lent, branching, weights, *, spoil=None, requests=None):
    """Steps the engine by hand: texts, and the info of every round."""
    requests = work()[:3] if requests is None else requests
    state = static.init(ENGINE, drafter, weights, lent)
    for slot, request in enumerate(requests):
        state = static.reset(drafter, state, np.int32(slot))
        for tokens, start, count in static.chunks(ENGINE, np.asarray(request.prompt, np.int32)):
            features, _, cache = static.prefill(ENGINE, weights, state.cache, np.int32(slot), tokens, start, count)
            rows = Rows(
                slot=np.int32(slot), tokens=tokens[None], features=features, start=start[None], count=count[None]
            )
            state = state.replace(cache=cache, drafter=static.observe(drafter, lent, state.drafter, rows))
        state = static.admit(state, admission(ENGINE, request, slot))
    infos, texts = [], [[], [], []]
    while np.asarray(state.running).any():
        state, info = static.step(ENGINE, drafter, weights, lent, state, branching=branching)
        info = jax.device_get(info)
        infos.append(info)
        for slot in range(3):
            texts[slot].extend(info.tokens[slot, : info.count[slot]].tolist())
        if spoil is not None:
            state = spoil(state)
    return [tuple(t) for t in texts], infos


def test_what_a_round_tells_of_its_trunk():
    drafter, lent = drafting("detour", DTYPES[0])
    texts, infos = rounds_of(drafter, lent, Branching(budget=16), tiny.params())
    assert texts == [t.tokens for t in plain(DTYPES[0])[:3]]
    left = 0
    for before, after in itertools.pairwise(infos):
        for slot in range(3):
            if before.finish[slot] != RUNNING:
                continue
            # What is provisional is the next round's trunk, unless it could not be emitted any more.
            assert after.trunk[slot] <= before.provisional[slot] <= 15
            if after.finish[slot] == RUNNING:
                assert after.trunk[slot] == before.provisional[slot]
            # Nothing of it is refused: the trunk commits whole.
            assert after.count[slot] > after.trunk[slot] or after.finish[slot] != RUNNING
            left += before.provisional[slot] > 0
    assert left > 5
    for info in infos:
        live = info.count > 0
        assert (info.accepted <= info.proposed)[live].all() and (info.proposed <= 15).all()
        running = live & (info.finish == RUNNING)
        assert (info.count == info.accepted + 1)[running].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trunk_that_is_wrong_is_cut(dtype):
    # A near tie may fall the other way on a branch. Here every second provisional path is spoilt.
    drafter, lent = drafting("detour", dtype)
    cut = []

    def spoil(state):
        if len(cut) % 2 == 0:
            last = jnp.maximum(state.trunk_count - 1, 0)
            wrong = state.trunk.at[jnp.arange(3), last].add(1) % T.vocab_size
            state = state.replace(trunk=wrong)
        cut.append(np.asarray(state.trunk_count))
        return state

    texts, infos = rounds_of(drafter, lent, Branching(budget=16), tiny.params(dtype), spoil=spoil)
    assert texts == [t.tokens for t in plain(dtype)[:3]]
    assert sum(((i.trunk > 0) & (i.count <= i.trunk) & (i.finish == RUNNING)).any() for i in infos) > 2


def test_a_loop_on_the_device_branches_too():
    drafter, lent = drafting("detour", DTYPES[0])
    short = [dataclasses.replace(r, prompt=r.prompt[:1]) for r in tiny.requests([1, 1, 1], max_tokens=24)]
    base = tiny.decode(ENGINE, tiny.params(), short)
    lent = script([(*r.prompt, *t.tokens) for r, t in zip(short, base, strict=True)], ENGINE.capacity)
    state = static.init(ENGINE, drafter, tiny.params(), lent)
    for slot, request in enumerate(short):
        state = static.admit(static.reset(drafter, state, np.int32(slot)), admission(ENGINE, request, slot))
    _, out = static.run(ENGINE, drafter, tiny.params(), lent, state, branching=Branching(budget=16))
    lines = [tuple(line[:n].tolist()) for line, n in zip(np.asarray(out.tokens), np.asarray(out.count), strict=True)]
    assert lines == [t.tokens for t in base]
    assert int(out.rounds) < 12


def test_a_second_best_branch_is_not_followed():
    # TR-3, through the engine: 1 is followed by 2; the tree's children of the root are 3, 4, 5, then 2 as the last.
    table = tables.successors({1: 2, 2: 6, 6: 1}, 8)
    engine = EngineConfig(target=tables.config(8), slots=1, rows=8, max_length=16, chunk=4, key_block=4)
    weights = tables.params(table)
    drafter = Children(proposals=1)
    for offered, accepted in (((3, 4, 5, 7), 0), ((3, 4, 5, 2), 3)):
        request = Request(prompt=(1,), max_tokens=9, temperature=0.0, seed=0)
        (result,) = generate(
            engine,
            weights,
            [request],
            drafter=drafter,
            weights=jnp.asarray(offered, jnp.int32),
            branching=Branching(budget=8),
        )
        assert result.tokens == (2, 6, 1) * 3
        # The branch is read again as a trunk, and commits then: once for each 2.
        assert result.accepted == accepted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Children(Plain):
    """Its weights as children of the root, and nothing below them."""

    def grow(self, weights, state, anchor, position, sampling, nodes):
        score = -0.1 * jnp.arange(1, 1 + len(weights), dtype=jnp.float32)
        return growth.best(weights[None, None], score[None, None], nodes)


# --- What is refused ---


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"budget": 1}, "`1` rows"),
        ({"budget": True}, "`True` rows"),
        ({"budget": 8.0}, "`8.0` rows"),
        ({"budget": 8, "exact": "gated"}, "`tree_exact` is `'gated'`"),
    ],
)
def test_settings_that_cannot_be_are_refused(asked, told):
    with pytest.raises(JspecError, match=told):
        Branching(**asked)


def test_what_engine_or_rule_cannot_do_is_refused():
    asked = {"drafter": Plain(), "weights": ()}
    with pytest.raises(JspecError, match="the engine verifies `32`"):
        generate(ENGINE, tiny.params(), work(), branching=Branching(budget=33), **asked)
    with pytest.raises(JspecError, match="trees under the rule `rejection`"):
        generate(ENGINE, tiny.params(), work(), branching=Branching(budget=32), accept="rejection", **asked)
    assert branching.of(None, None) is None
    assert branching.of(8, None) == Branching(budget=8, exact="trunk")
    assert branching.of(8, "off") == Branching(budget=8, exact="off")
    with pytest.raises(JspecError, match="there is no `tree_budget`"):
        branching.of(None, "trunk")


# --- Negative controls ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_trunk_bits_differ(dtype):
    _, numbers = differing(run("detour", dtype, 32, exact="off"), plain(dtype))
    assert numbers > 0


def test_branches_that_commit_where_they_stand_change_the_text(monkeypatch):
    # The fault: rows count as committed wherever they are, so columns of siblings stay in the text's.
    monkeypatch.setattr(accept, "committed", lambda block, accepted: jnp.sum(accepted, axis=1, dtype=jnp.int32))
    engine = dataclasses.replace(ENGINE, max_length=63)  # an engine of its own: its programs hold the fault
    drafter, lent = drafting("detour", DTYPES[0])
    longest = [r for r in work() if len(r.prompt) + r.max_tokens <= 63]
    base = tiny.decode(engine, tiny.params(), longest)
    patched = Branching(budget=30)
    traces = tiny.decode(engine, tiny.params(), longest, drafter=drafter, lent=lent, branching=patched)
    sequences, numbers = differing(traces, base)
    assert sequences > 0 and numbers > 0
