"""The sampled rule has the target's law, with any drafter: the joint law of three tokens by 200,000 seeds.

On a target of three tokens every text of three can be counted. Known failures covered: VS-4 and VS-5 (q very
unlike p; a mismatch emits the very draw that was compared), TR-2's laws for chains. The same test rejects
planted faults: a draft that is emitted though the target chose otherwise, noise reused across positions,
and a ratio test without its residual.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jspec.decoding import accept, noise, sampling
from jspec.drafters.base import Drafter, Plain, Proposal, Rows
from jspec.engine.config import EngineConfig
from tests import tables
from tests.reference import LEVEL, chi_square, law
from tests.texts import count

V, SLOTS, BATCHES = 3, 4096, 49
ENGINE = EngineConfig(target=tables.config(V), slots=SLOTS, rows=4, max_length=4, chunk=4, key_block=4)
P = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.05, 0.9, 0.05]])
Q = np.array([[0.1, 0.2, 0.7], [0.8, 0.1, 0.1], [0.5, 0.01, 0.49]])  # very unlike
TARGET = tables.params(np.log(P))


class Law(flax.struct.PyTreeNode):
    """How a `Coupled` drafter draws."""

    log_q: Array  # [V, V] float32, by the token before
    salt: Array  # [] uint32, mixed into the seed: with 0 the target's own noise is used
    shift: Array  # [] int32, added to what was drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coupled(Drafter):
    """Draws each proposal from a table, by noise at the position that it is proposed for."""

    label: str = ""  # programs are kept by drafter: one with a planted fault needs a drafter of its own

    @property
    def name(self) -> str:
        return f"coupled_k{self.proposals}"

    def init(self, weights: Law, slots: int, capacity: int) -> Any:
        return ()

    def observe(self, weights: Law, state: Any, rows: Rows) -> Any:
        return state

    def reset(self, state: Any, slot: Array) -> Any:
        return state

    def propose(self, weights: Law, state: Any, anchor: Array, position: Array, sampling_: Any) -> Proposal:
        settings = sampling_.replace(seed=sampling_.seed ^ weights.salt)
        tokens, last = [], anchor
        for ahead in range(1, self.proposals + 1):
            at = (position + ahead)[:, None]
            drawn = sampling.choose(weights.log_q[last][:, None], at, settings)[:, 0]
            last = (drawn + weights.shift) % V
            tokens.append(last)
        return Proposal(tokens=jnp.stack(tokens, axis=1), count=jnp.full(anchor.shape, self.proposals, jnp.int32))


DRAFTER = Coupled(proposals=3)


def drawing(q, *, salt=0, shift=0):
    return Law(log_q=jnp.asarray(np.log(q), jnp.float32), salt=jnp.uint32(salt), shift=jnp.int32(shift))


def texts(lent, *, config=ENGINE, drafter=DRAFTER, batches=BATCHES):
    """Counts of every text of three tokens `[V, V, V]`, and the share of proposals that were accepted."""
    return count(config, drafter, TARGET, lent, tokens=3, batches=batches)


def joint(table):
    """P(a, b, c) after token 0."""
    first, second, third = table[0], table, table
    return first[:, None, None] * second[:, :, None] * third[None]


def test_plain_decoding_has_the_law():
    counts = texts_of_plain()
    assert counts.sum() > 200_000
    assert chi_square(counts, joint(P)) > LEVEL
    assert chi_square(counts, joint(Q)) < LEVEL


@pytest.mark.parametrize(
    ("lent", "low", "high"),
    [
        pytest.param(drawing(P), 1, 1, id="oracle"),
        pytest.param(drawing(P, shift=1), 0, 0, id="always-wrong"),
        pytest.param(drawing(Q), 0.1, 0.9, id="coupled-q-unlike-p"),
        pytest.param(drawing(P, salt=1 << 20), 0.3, 0.6, id="own-noise"),
        pytest.param(drawing(Q, salt=1 << 20), 0.05, 0.5, id="own-noise-q-unlike-p"),
        pytest.param(drawing(np.eye(V)[[2, 2, 2]] + 1e-9), 0.0, 0.9, id="one-token-only"),
    ],
)
def test_the_law_is_the_targets_with_any_drafter(lent, low, high):
    counts, share = texts(lent)
    assert chi_square(counts, joint(P)) > LEVEL
    assert low <= share <= high
    np.testing.assert_array_equal(counts, texts_of_plain())  # and not only in law


@functools.cache
def texts_of_plain():
    return texts((), drafter=Plain())[0]


@pytest.mark.parametrize("setting", [{"temperature": 0.5}, {"top_p": 0.8}], ids=str)
def test_the_law_under_other_settings_differs(setting):
    # The check is sharp enough to tell settings apart: their laws are not plain sampling's.
    table = np.stack([law(np.log(row), **{"temperature": 1.0} | setting) for row in P])
    assert chi_square(texts_of_plain(), joint(table)) < LEVEL


# --- Planted faults ---


def test_accepting_what_the_target_did_not_choose_is_rejected(monkeypatch):
    # What is emitted stays the target's choice, but the next one is conditioned on another token.
    def lenient(block, choice):
        return strict(block, choice).at[:, 1].set(block.valid[:, 1])

    strict = accept.accept
    monkeypatch.setattr(accept, "accept", lenient)
    counts, share = texts(drawing(Q), drafter=Coupled(proposals=3, label="lenient"), batches=12)
    assert share > 0.3
    assert chi_square(counts, joint(P)) < LEVEL


def test_noise_reused_across_positions_is_rejected(monkeypatch):
    def stuck(seed, choice_index, position, vocab, ids=None):
        return keyed(seed, choice_index, jnp.zeros_like(position), vocab, ids)

    keyed = noise.gumbel
    monkeypatch.setattr(noise, "gumbel", stuck)
    counts, _ = texts(drawing(P), drafter=Coupled(proposals=3, label="stuck"), batches=12)
    assert chi_square(counts.sum(axis=(1, 2)), P[0]) > LEVEL, "one token alone does not show it"
    assert chi_square(counts, joint(P)) < LEVEL


def test_a_ratio_test_without_its_residual_is_rejected():
    # VS-4's fault, by enumeration: accept with min(1, p/q), else draw from p itself.
    pass_ = np.minimum(1, P[0] / Q[0])
    wrong = Q[0] * pass_ + (1 - (Q[0] * pass_).sum()) * P[0]
    assert abs(wrong - P[0]).max() > 0.05
    assert chi_square(texts_of_plain().sum(axis=(1, 2)), wrong) < LEVEL
