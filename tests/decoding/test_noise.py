"""The position-keyed noise is even, independent in every direction, and of the Gumbel law.

Each statistic is also run on a planted weak hash, which it must catch; a statistic that nothing fails
proves nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jspec.decoding import noise
from jspec.decoding.sampling import seed_words
from tests.reference import LEVEL

N, V = 512, 512


def words(seeds=(0,), index=0, positions=range(N), hasher=noise.bits, vocab=V):
    """Random bits `[len(seeds), len(positions), vocab]` of `hasher`, on the host."""
    seed = np.stack([seed_words(s) for s in seeds])
    choice = np.full((len(seeds),), index, np.int32)
    position = np.broadcast_to(np.asarray(positions, np.int32), (len(seeds), len(positions)))
    return np.asarray(jax.jit(hasher, static_argnums=3)(seed, choice, position, vocab))


def weak(seed, choice_index, position, vocab):
    """The planted fault: one multiplication, as a linear congruential step has it; nothing is scrambled."""
    ids = jnp.arange(vocab, dtype=jnp.uint32)[None, None]
    key = seed[:, 0, None] + position.astype(jnp.uint32)
    return (ids + key[..., None]) * jnp.uint32(0x9E3779B9) + seed[:, 1, None, None]


def evenness(x):
    """p-value that the words fill 256 bins evenly, by their high and by their low byte; the smaller."""
    parts = [np.bincount((x.ravel() >> shift) & 255, minlength=256) for shift in (24, 0)]
    return min(stats.chisquare(c).pvalue for c in parts)


def independence(a, b):
    """p-value that the high 4 bits of `a` tell nothing of those of `b`: 256 cells, evenly filled."""
    pairs = ((a >> 28) << 4 | (b >> 28)).ravel()
    return stats.chisquare(np.bincount(pairs, minlength=256)).pvalue


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param({}, id="ids-and-positions"),
        pytest.param({"seeds": range(N), "positions": [7]}, id="seeds-low-word"),
        pytest.param({"seeds": [s << 32 for s in range(N)], "positions": [7]}, id="seeds-high-word"),
        pytest.param({"seeds": [7 * 2**60], "positions": range(100_000, 100_000 + N)}, id="far-out"),
    ],
)
def test_every_direction_is_even_and_independent(sample):
    x = words(**sample).reshape(N, V)
    assert evenness(x) > LEVEL
    assert independence(x[:, :-1], x[:, 1:]) > LEVEL  # neighbouring ids
    assert independence(x[:-1], x[1:]) > LEVEL  # neighbouring positions or seeds
    assert independence(x[:-1, 1:], x[1:, :-1]) > LEVEL  # id up as position goes down
    for column in (0, V // 2):
        assert evenness(words(**sample, vocab=V * 16).reshape(N, -1)[:, column::V]) > LEVEL


def test_a_weak_hash_is_caught():
    x = words(hasher=weak)[0]
    assert independence(x[:, :-1], x[:, 1:]) < LEVEL
    assert independence(x[:-1, 1:], x[1:, :-1]) < LEVEL, "it only depends on id + position"


def test_every_word_of_the_key_counts():
    base = words(positions=range(8))
    for other in (
        words(seeds=[1], positions=range(8)),
        words(seeds=[1 << 31], positions=range(8)),
        words(seeds=[1 << 32], positions=range(8)),
        words(seeds=[1 << 63], positions=range(8)),
        words(index=1, positions=range(8)),
        words(positions=range(8, 16)),
    ):
        assert (other == base).mean() < 1e-3
        assert independence(base, other) > LEVEL
        # Not the same words in another order, as would be with keys that only shift the ids.
        assert len(np.intersect1d(base, other)) < 5
    assert not (words(seeds=[1], index=0) == words(seeds=[0], index=1)).all()
    np.testing.assert_array_equal(words(positions=range(1, 9))[:, :-1], base[:, 1:])


def test_the_words_do_not_depend_on_the_vocabulary_nor_on_the_batch():
    base = words(seeds=[5, 6], positions=range(4))
    np.testing.assert_array_equal(words(seeds=[6], positions=[2], vocab=64)[0, 0], base[1, 2, :64])


def test_flipping_any_bit_of_the_key_flips_half_of_the_word():
    seeds = [0, *(1 << b for b in range(64))]
    x = words(seeds=seeds, positions=[3], vocab=4096)[:, 0]
    flips = np.bitwise_count(x[1:] ^ x[:1]).mean(axis=-1)
    # 4096 words of 32 bits: the mean of 16 has a standard error of 0.044.
    np.testing.assert_allclose(flips, 16, atol=0.25)
    y = words(seeds=seeds, positions=[3], vocab=4096, hasher=weak)[:, 0]
    assert np.abs(np.bitwise_count(y[1:] ^ y[:1]).mean(axis=-1) - 16).max() > 1


def test_gumbel_has_its_mean_and_variance_and_law():
    g = words(hasher=noise.gumbel).astype(np.float64).ravel()
    error = np.pi / np.sqrt(6 * g.size)
    assert abs(g.mean() - np.euler_gamma) < 4 * error
    assert abs(g.var() - np.pi**2 / 6) < 0.03
    assert stats.kstest(g[::3], stats.gumbel_r.cdf).pvalue > LEVEL
    # The check would notice noise of another scale.
    assert stats.kstest(g[::3] * 1.02, stats.gumbel_r.cdf).pvalue < LEVEL


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 1])
def test_gumbel_is_finite_for_every_word(monkeypatch, word):
    monkeypatch.setattr(
        noise, "bits", lambda seed, index, position, vocab, ids: jnp.full((1, 1, vocab), word, jnp.uint32)
    )
    g = noise.gumbel(jnp.zeros((1, 2), jnp.uint32), jnp.zeros((1,), jnp.int32), jnp.zeros((1, 1), jnp.int32), 2)
    assert g.dtype == jnp.float32
    u = min((word + 0.5) / 2**32, 1 - 2**-24)
    np.testing.assert_allclose(g, -np.log(-np.log1p(-u)), atol=3e-4)
