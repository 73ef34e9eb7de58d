"""The classical rule has the target's law with any drafter and any filter, and so has the default rule.

The joint law of two tokens over 49,152 seeds on a target of five tokens. Known failures covered: VS-3, VS-4, VS-5,
VS-7, VS-9 (b), DR-1, DR-2. Planted faults: a residual that is p itself, a drafter that searches but claims
its model's law, and a residual drawn by the noise that a coupled drafter shares.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import law, noise, rejection, sampling, tree
from jspec.decoding.generate import decode, generate
from jspec.decoding.request import Request
from jspec.drafters.base import Drafter, Plain, Proposal
from jspec.drafters.doubles import Self
from jspec.drafters.draft_model import DraftModel
from jspec.drafters.ngram import NGram
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from tests import reference, tables, tiny
from tests.reference import LEVEL, chi_square
from tests.texts import count

V, SLOTS, BATCHES = 5, 4096, 12
ENGINE = EngineConfig(target=tables.config(V), slots=SLOTS, rows=3, max_length=4, chunk=4, key_block=4)
RNG = np.random.default_rng(5)
PAIR = dataclasses.replace(ENGINE, slots=2)
P, Q = RNG.dirichlet(np.full(V, 0.8), V), RNG.dirichlet(np.full(V, 0.8), V)
TARGET = tables.params(np.log(P))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Drafter):
    """Draws by a table of logits `[V, V]`, its weights, by the token before."""

    kind: str  # drawn, greedy, coupled, claims (greedy, but gives its model's law), silent (gives none)
    drops: int = -1  # the slot whose law is lost

    @property
    def name(self) -> str:
        return f"table_{self.kind}_k{self.proposals}"

    @property
    def draws(self) -> bool:
        return self.kind in ("drawn", "claims", "silent")

    def init(self, weights: Any, slots: int, capacity: int) -> Any:
        return ()

    def observe(self, weights: Any, state: Any, rows: Any) -> Any:
        return state

    def reset(self, state: Any, slot: Any) -> Any:
        return state

    def propose(self, weights, state, anchor, position, s):
        tokens, laws, last = [], [], anchor
        for ahead in range(1, self.proposals + 1):
            logits, at = weights[last][:, None], (position + ahead)[:, None]
            drawn, log_q = rejection.draw(logits, at, s)
            if self.kind in ("greedy", "claims"):
                drawn = sampling.first_largest(logits)
            if self.kind == "coupled":
                drawn = sampling.choose(logits, at, s)
            last = drawn[:, 0]
            tokens.append(last)
            laws.append(log_q[:, 0])
        log_q = jnp.stack(laws, axis=1)
        if self.drops >= 0:
            log_q = log_q.at[self.drops].set(jnp.nan)
        count = jnp.full(anchor.shape, self.proposals, jnp.int32)
        return Proposal(tokens=jnp.stack(tokens, axis=1), count=count, log_q=None if self.kind == "silent" else log_q)


def texts(drafter, table, rule, *, config=ENGINE, batches=BATCHES, **setting):
    """Counts of every text of two tokens `[V, V]`, and the share of proposals that were accepted."""
    lent = jnp.log(jnp.asarray(table, jnp.float32)) if table is not None else ()
    return count(config, drafter, TARGET, lent, tokens=2, batches=batches, rule=rule, **setting)


def joint(**setting):
    table = np.stack([reference.law(np.log(row), **{"temperature": 1.0} | setting) for row in P])
    return table[0][:, None] * table


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.6},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.25},
    {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
]
DRAWN = Table(proposals=2, kind="drawn")


@pytest.mark.parametrize("setting", FILTERS, ids=str)
@pytest.mark.parametrize("rule", ["choice", "rejection"])
def test_the_law_is_the_targets_under_every_filter(rule, setting):
    # VS-4: q very unlike p; VS-5 for the default rule.
    counts, share = texts(DRAWN, Q, rule, **setting)
    assert chi_square(counts, joint(**setting)) > LEVEL
    assert 0 < share < 0.9


@pytest.mark.parametrize("kind", ["greedy", "coupled"])
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=str)
def test_drafters_that_do_not_draw_are_lossless_too(kind, setting):
    counts, _ = texts(Table(proposals=2, kind=kind), Q, "rejection", **setting)
    assert chi_square(counts, joint(**setting)) > LEVEL


def test_without_a_drafter_every_token_is_a_bonus():
    counts, _ = texts(Plain(), None, "rejection")
    assert chi_square(counts, joint()) > LEVEL


@pytest.mark.parametrize("setting", [{}, {"top_p": 0.8}], ids=str)
def test_everything_is_accepted_where_q_is_p(setting):
    counts, share = texts(DRAWN, P, "rejection", **setting)
    assert share == 1
    assert chi_square(counts, joint(**setting)) > LEVEL


def test_the_share_accepted_is_the_overlap():
    # First proposals only: one proposal a round, at the first position.
    drafter = Table(proposals=1, kind="drawn")
    counts, share = texts(drafter, np.tile(Q[0], (V, 1)), "rejection")
    overlap = np.minimum(P, Q[0]).sum(axis=1)
    assert overlap.min() < share < overlap.max()
    assert chi_square(counts, joint()) > LEVEL


# --- Greedy, certain and lawless drafts ---


def decide(p, tokens, log_q, temperature, seeds=20_000):
    """Choices at the first row of blocks with one proposal each."""
    logits = np.broadcast_to(np.log(np.array(p, np.float32)), (seeds, 2, len(p)))
    block = tree.chain(jnp.zeros((seeds,), jnp.int32), tokens[:, None], jnp.ones((seeds,), jnp.int32), 2)
    s = sampling.greedy(seeds).replace(
        temperature=jnp.full((seeds,), temperature, jnp.float32),
        seed=jnp.stack([jnp.arange(seeds, dtype=jnp.uint32)] * 2, axis=1),
    )
    choice, lawful = jax.jit(rejection.choose)(logits, log_q, block, jnp.full((seeds, 2), 9, jnp.int32), s)
    assert np.asarray(lawful).all()
    return np.asarray(choice)[:, 0]


def test_a_certain_draft_is_accepted_by_its_probability():
    # DR-2: a fixed proposal of id 1; p = .7, .2, .1; accepted .2, residual .875, 0, .125.
    choice = decide([0.7, 0.2, 0.1], jnp.ones((20_000,), jnp.int32), None, 1.0)
    assert chi_square(np.bincount(choice, minlength=3), np.array([0.7, 0.2, 0.1])) > LEVEL
    refused = choice[choice != 1]
    assert chi_square(np.bincount(refused, minlength=3), np.array([0.875, 0, 0.125])) > LEVEL
    assert not NGram(proposals=3).draws


def test_greedy_passes_only_the_best():
    # VS-3: p = .3, .5, .2 and q = .4, .3, .3: draft token 0 is refused, always.
    log_q = jnp.broadcast_to(jnp.log(jnp.array([0.4, 0.3, 0.3])), (20_000, 1, 3))
    for temperature in (0.0, 1e-5):
        assert (decide([0.3, 0.5, 0.2], jnp.zeros((20_000,), jnp.int32), log_q, temperature) == 1).all()


def test_min_p_reaches_every_row():
    # VS-9 (b).
    table = np.tile([0.6, 0.25, 0.15, 1e-9, 1e-9], (V, 1))
    request = Request(prompt=(1,), max_tokens=3, min_p=0.5)
    engine = PAIR
    lent = jnp.log(jnp.asarray(Q, jnp.float32))
    for accept in ("choice", "rejection"):
        requests = [dataclasses.replace(request, seed=s) for s in range(100)]
        results = generate(engine, tables.params(np.log(table)), requests, drafter=DRAWN, weights=lent, accept=accept)
        assert {t for r in results for t in r.tokens} == {0}


def test_the_draw_fits_the_law_that_is_given():
    # DR-1: 16 of 1,000 logits within a bfloat16 step of each other; the law is that of the draw, in float32.
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(1000) * 0.3
    logits[:16] = 5 + rng.uniform(0, 0.03, 16)
    logits = jnp.asarray(logits, jnp.bfloat16).astype(jnp.float32)
    draw = jax.jit(rejection.draw)
    s = sampling.greedy(1).replace(temperature=jnp.ones((1,), jnp.float32))
    counts = np.zeros(1000, int)
    rows = jnp.broadcast_to(logits, (1, 4096, 1000))
    for batch in range(25):
        tokens, log_q = draw(rows, batch * 4096 + jnp.arange(4096, dtype=jnp.int32)[None], s)
        counts += np.bincount(np.asarray(tokens)[0], minlength=1000)
    assert log_q.dtype == jnp.float32
    assert chi_square(counts, np.exp(np.asarray(log_q)[0, 0], dtype=np.float64)) > LEVEL


def test_a_draft_without_its_law_is_an_error_that_names_the_request():
    # VS-7: two slots, the law of slot 1 is lost.
    engine = PAIR
    lent = jnp.log(jnp.asarray(Q, jnp.float32))
    requests = [Request(prompt=(1,), max_tokens=3, seed=s) for s in range(2)]
    drafter = Table(proposals=2, kind="drawn", drops=1)
    good, bad = generate(engine, TARGET, requests, drafter=drafter, weights=lent, accept="rejection")
    assert (good.finish, len(good.tokens)) == ("length", 3)
    assert (bad.finish, bad.tokens) == ("error", ())
    assert "request 1" in bad.error and "`table_drawn_k2`" in bad.error and "without a law" in bad.error
    # The default rule needs no law.
    assert {r.finish for r in generate(engine, TARGET, requests, drafter=drafter, weights=lent)} == {"length"}
    silent = Table(proposals=2, kind="silent")
    with pytest.raises(JspecError, match="`table_silent_k2` draws its tokens and gives no law"):
        generate(engine, TARGET, requests, drafter=silent, weights=lent, accept="rejection")
    with pytest.raises(JspecError, match="`accept` is `'typical'`"):
        list(decode(engine, TARGET, requests, accept="typical"))


# --- On the random target ---


@pytest.mark.parametrize("dtype", tiny.DTYPES)
def test_self_drafts_are_all_accepted(dtype):
    requests = tiny.requests([3, 17, 9, 5, 33], max_tokens=20, temperature=0.9, top_p=0.9)
    requests[1] = dataclasses.replace(requests[1], temperature=0.0)
    for sampled, accept in ((True, "rejection"), (False, "choice")):
        drafter = Self(proposals=7, engine=tiny.engine(3), sampled=sampled)
        weights = tiny.params(dtype)
        results = generate(tiny.engine(3), weights, requests, drafter=drafter, weights=weights, accept=accept)
        assert all(r.accepted == r.proposed > 0 for r in results)


def test_a_seed_gives_one_answer_with_and_without_neighbours():
    requests = tiny.requests([3, 17, 9, 5, 33], max_tokens=20, temperature=0.9)
    drafter = DraftModel(proposals=4, model=tiny.T, vocab=64, key_block=16, mode="sampled")

    def run(chosen):
        engine, weights, lent = tiny.engine(3), tiny.params(), tiny.params(seed=1)
        return generate(engine, weights, chosen, drafter=drafter, weights=lent, accept="rejection")

    together = run(requests)
    assert [run([r])[0] for r in requests] == together
    assert run(requests[::-1])[::-1] == together
    assert 0 < sum(r.accepted for r in together) < sum(r.proposed for r in together)


def test_the_law_function_keeps_what_the_choice_keeps():
    # Every token that `choose` can draw has a probability, and the others have none.
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((1, 64, 12)).astype(np.float32) * 2
    for setting in FILTERS:
        s = sampling.greedy(1).replace(
            **{
                k: jnp.full((1,), v, jnp.int32 if k == "top_k" else jnp.float32)
                for k, v in ({"temperature": 1.0} | setting).items()
            }
        )
        ours = np.exp(np.asarray(jax.jit(law.log_law)(logits, s))[0])
        theirs = np.stack([reference.law(row, **{"temperature": 1.0} | setting) for row in logits[0]])
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


# --- Planted faults, each in an engine of its own whose programs hold it ---


def test_a_residual_that_is_p_is_rejected(monkeypatch):
    monkeypatch.setattr(rejection, "SMALLEST_RESIDUAL", 9.0)
    counts, _ = texts(Table(proposals=2, kind="drawn", drops=-2), Q, "rejection", batches=3)
    assert chi_square(counts, joint()) < LEVEL


def test_a_search_that_claims_to_draw_is_rejected():
    counts, _ = texts(Table(proposals=2, kind="claims"), Q, "rejection", batches=3)
    assert chi_square(counts, joint()) < LEVEL


def test_noise_shared_with_the_residual_is_rejected(monkeypatch):
    monkeypatch.setattr(noise, "RESIDUAL", (0, 0))
    counts, _ = texts(Table(proposals=2, kind="coupled", drops=-2), Q, "rejection", batches=3)
    assert chi_square(counts, joint()) < LEVEL
