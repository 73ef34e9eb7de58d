"""A smaller model as drafter: its cache, its modes, and vocabularies that differ.

Known failures covered: KV-3, LD-2.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding.generate import generate
from jspec.decoding.request import admission
from jspec.drafters.base import Rows
from jspec.drafters.draft_model import DraftModel, draft_model
from jspec.engine import static
from jspec.errors import JspecError
from tests import tiny
from tests.words import tokenizer


def drafter(mode="coupled", proposals=4, **changes):
    return DraftModel(
        proposals=proposals, model=dataclasses.replace(tiny.T, **changes), vocab=64, mode=mode, key_block=16
    )


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_the_targets_own_weights_are_all_accepted(mode):
    requests = tiny.requests([3, 17, 9, 33], max_tokens=20, temperature=0.0 if mode == "greedy" else 0.8)
    results = generate(tiny.engine(3), tiny.params(), requests, drafter=drafter(mode), weights=tiny.params())
    assert all(r.accepted == r.proposed > 0 for r in results)
    assert [r.rounds for r in results] == [4] * 4  # 5 tokens a round: KV-3, no decay after full accepts


def test_the_draft_cache_holds_every_committed_token_but_the_last():
    # KV-3, over accepted lengths from 0 to all: a perturbed target as draft agrees now and then.
    noisy = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) * (1 + 0.25 * np.sin(np.arange(x.size).reshape(x.shape))), x.dtype),
        tiny.params(),
    )
    config, chosen = tiny.engine(2), drafter("coupled")
    state = static.init(config, chosen, tiny.params(), noisy)
    requests = tiny.requests([1, 13], max_tokens=40, temperature=0.5)
    for slot, request in enumerate(requests):
        state = static.reset(chosen, state, np.int32(slot))
        for tokens, start, count in static.chunks(config, np.asarray(request.prompt, np.int32)):
            features, _, cache = static.prefill(
                config, tiny.params(), state.cache, np.int32(slot), tokens, start, count
            )
            rows = Rows(
                slot=jnp.int32(slot), tokens=tokens[None], features=features, start=start[None], count=count[None]
            )
            state = state.replace(cache=cache, drafter=static.observe(chosen, noisy, state.drafter, rows))
        state = static.admit(state, admission(config, request, slot))
    lengths, seen = set(), []
    while np.asarray(state.running).any():
        np.testing.assert_array_equal(state.drafter.length, state.length - 1)
        state, info = static.step(config, chosen, tiny.params(), noisy, state)
        lengths |= set(np.asarray(info.accepted)[np.asarray(info.count) > 0].tolist())
        seen.append(np.asarray(info.tokens)[1, : int(info.count[1])])
    assert {0, 4} <= lengths
    # And it holds what reading the whole text at once holds.
    text = np.concatenate([requests[1].prompt, *seen]).astype(np.int32)[:-1]
    fresh = chosen.init(noisy, 2, config.capacity)
    _, cache = jax.jit(chosen._forward)(noisy, fresh, jnp.int32(1), jnp.asarray(text)[None], jnp.zeros((1,), jnp.int32))
    for a, b in zip(state.drafter.keys, cache.keys, strict=True):
        np.testing.assert_allclose(a[1, :, : len(text)], b[1, :, : len(text)], atol=2e-5)


@pytest.mark.parametrize("vocab", [72, 40])
@pytest.mark.parametrize("mode", ["greedy", "coupled", "sampled"])
def test_padded_and_smaller_vocabularies_draft_only_what_both_have(vocab, mode):
    # LD-2: a head of 72 rows whose best is an id that the target lacks; one of 40 rows.
    chosen = drafter(mode, vocab_size=vocab)
    weights = tiny.params(seed=3)
    best = jnp.tile(9.0 * weights.head[:1], (8, 1))  # ids that the target lacks, and likely
    embed, head = (jnp.concatenate([x, best])[:vocab] for x in (weights.embed, weights.head))
    weights = weights.replace(embed=embed, head=head)
    requests = tiny.requests([3, 9, 17], max_tokens=12, temperature=0.8)
    state = static.init(tiny.engine(3), chosen, tiny.params(), weights)
    state = state.replace(
        finish=jnp.zeros((3,), jnp.int32), limit=jnp.full((3,), 30, jnp.int32), anchor=jnp.array([1, 63, 50], jnp.int32)
    )
    block, _, log_q = static.draft_with_law(tiny.engine(3), chosen, weights, state)
    drafted = np.asarray(block.tokens)[:, 1:5]
    assert (drafted >= 0).all() and (drafted < min(vocab, 64)).all()
    if mode == "sampled":
        assert log_q.shape == (3, 4, 64) and np.isneginf(np.asarray(log_q)[:, :, vocab:]).all()
    plain = generate(tiny.engine(3), tiny.params(), requests)
    drafted = generate(tiny.engine(3), tiny.params(), requests, drafter=chosen, weights=weights)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]


@dataclasses.dataclass
class Held:
    """As much of a checkpoint as a draft model reads."""

    config: object
    params: object
    tokenizer: object
    name: str = "held"


def test_another_vocabulary_is_refused_by_name():
    letters = [chr(48 + i) for i in range(64)]
    ours = Held(tiny.T, tiny.params(), tokenizer(letters), "large")
    made, weights = draft_model(Held(tiny.T, tiny.params(), tokenizer([*letters, "<pad>"])), ours, proposals=3)
    assert (made.name, made.vocab) == ("draft_model_k3", 64) and weights is tiny.params()
    swapped = Held(tiny.T, tiny.params(), tokenizer([*letters[:7], "é", *letters[8:]]), "small")
    with pytest.raises(JspecError, match="`small` has another vocabulary than the target `large`: token 7"):
        draft_model(swapped, ours)
    with pytest.raises(JspecError, match="`mode` of the drafter is `'beam'`"):
        draft_model(ours, ours, mode="beam")
    with pytest.raises(JspecError, match="asked for `0` proposals"):
        draft_model(ours, ours, proposals=0)
    with pytest.raises(JspecError, match="given without its weights"):
        made.weights(tiny.params(), tiny.T)
