"""Rounds of the tiny target whose accepted lengths the test decides, and its features by the reference."""

import functools

import jax.numpy as jnp
import numpy as np

from jspec.decoding import tree
from jspec.decoding.generate import generate
from jspec.decoding.request import admission
from jspec.drafters.base import Rows
from jspec.engine import static
from tests import reference, tiny
from tests.drafters import blocks


def features_of(text, taps=(-1, 0)):
    """Tapped residuals of every token of a text, by the target's reference."""
    made = reference.forward(tiny.params(), tiny.T, np.asarray(text))
    held = [np.asarray(tiny.params().embed, np.float64)[np.asarray(text)], *made["residuals"]]
    return np.concatenate([held[t + 1] for t in taps], axis=-1)


def prefilled(config, chosen, weights, requests):
    state = static.init(config, chosen, tiny.params(), weights)
    for slot, request in enumerate(requests):
        state = prefill(config, chosen, weights, state, slot, request)
    return state


def prefill(config, chosen, weights, state, slot, request):
    state = static.reset(chosen, state, np.int32(slot))
    for tokens, start, count in static.chunks(config, np.asarray(request.prompt, np.int32)):
        features, _, cache = static.prefill(config, tiny.params(), state.cache, np.int32(slot), tokens, start, count)
        rows = Rows(slot=jnp.int32(slot), tokens=tokens[None], features=features, start=start[None], count=count[None])
        state = state.replace(cache=cache, drafter=static.observe(chosen, weights, state.drafter, rows))
    return static.admit(state, admission(config, request, slot))


@functools.cache
def texts():
    """Three prompts with their greedy continuations, and a fourth for a slot that is used again."""
    requests = tiny.requests([1, 13, 20, 7], max_tokens=30, temperature=0.0)
    results = generate(blocks.engine(3), tiny.params(), requests)
    return requests, [(*r.prompt, *made.tokens) for r, made in zip(requests, results, strict=True)]


def forced(state, whole, right):
    """A block that holds, for each slot, `right` tokens of the true continuation and a wrong one behind them."""
    drafts = np.zeros((len(whole), 7), np.int32)
    for slot, text in enumerate(whole):
        at = int(state.length[slot])
        ahead = list(text[at : at + 7]) + [0] * 7
        drafts[slot] = ahead[:7]
        if right[slot] < 7:
            drafts[slot, right[slot]] = (drafts[slot, right[slot]] + 1) % 64
    return tree.chain(state.anchor, jnp.asarray(drafts), jnp.full((len(whole),), 7, jnp.int32), 8)
