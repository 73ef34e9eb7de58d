"""Penalties, bias and min_tokens: every row sees what plain decoding would have seen at its position.

The processed logits are compared with float64 arithmetic that walks up each row's path; whole answers with a
loop that knows nothing of blocks. Known failures covered: VS-8, VS-9 (a), VS-13.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decoding import processors, tree
from jspec.decoding.generate import generate
from jspec.decoding.processors import BIASES, Occurrences, Processors
from jspec.decoding.request import Request
from jspec.decoding.tree import Block
from jspec.engine.config import EngineConfig
from tests import reference, tables
from tests.scripted import Scripted, script

V, END = 12, 11
ENGINE = EngineConfig(target=tables.config(V), slots=2, rows=4, max_length=32, chunk=8, key_block=8)
DRAFTER = Scripted(proposals=3)


def processed(logits, prompt, output, s, ends=()):
    """`[V]` logits after the processors, by the definition; `s` is a `Request`."""
    x = np.array(logits, np.float64)
    for token, value in s.logit_bias.items():
        x[token] += value
    for token in {*prompt, *output}:
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(output):
        x[token] -= s.frequency_penalty * list(output).count(token) + s.presence_penalty
    if len(output) < s.min_tokens:
        x[list(ends)] = -np.inf
    return x


# --- The rows of a block ---

B, N, WIDE = 4, 6, 10
apply = jax.jit(processors.apply)
TREES = [(0, 0, 1, 2, 3, 4), (0, 0, 0, 1, 1, 2), (0, 0, 1, 1, 0, 4)]


def settings_of(requests):
    column = lambda name: jnp.array([getattr(r, name) for r in requests], jnp.float32)  # noqa: E731
    ids, values = np.full((B, BIASES), -1, np.int32), np.zeros((B, BIASES), np.float32)
    for b, r in enumerate(requests):
        ids[b, : len(r.logit_bias)], values[b, : len(r.logit_bias)] = list(r.logit_bias), list(r.logit_bias.values())
    return Processors(
        repetition=column("repetition_penalty"),
        frequency=column("frequency_penalty"),
        presence=column("presence_penalty"),
        min_length=jnp.array([len(r.prompt) + r.min_tokens if r.min_tokens else 0 for r in requests], jnp.int32),
        bias_ids=jnp.asarray(ids),
        bias_values=jnp.asarray(values),
    )


@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_every_row_counts_its_own_path(parents, seed):
    rng = np.random.default_rng(seed)
    requests = [
        Request(
            prompt=tuple(rng.integers(0, WIDE, rng.integers(1, 5)).tolist()),
            repetition_penalty=float(rng.choice([1.0, 1.3, 0.7])),
            frequency_penalty=float(rng.choice([0.0, 0.5, -0.5])),
            presence_penalty=float(rng.choice([0.0, 1.0, -1.0])),
            logit_bias={} if rng.integers(2) else {int(rng.integers(WIDE)): 2.5, WIDE - 1: -3.0},
            min_tokens=int(rng.choice([0, 3, 5])),
        )
        for _ in range(B - 1)
    ]
    requests.append(Request(prompt=(1,)))  # asks for nothing, and must keep its bits
    outputs = [rng.integers(0, WIDE, rng.integers(0, 4)).tolist() for _ in range(B)]
    tokens = rng.integers(0, WIDE, (B, N)).astype(np.int32)
    logits = rng.standard_normal((B, N, WIDE)).astype(np.float32) * 3
    ends = np.full((B, 8), -1, np.int32)
    ends[:, :2] = [3, 7]
    block = Block(
        tokens=tokens,
        parents=np.broadcast_to(np.array(parents, np.int32), (B, N)),
        depth=np.broadcast_to(reference.depths(np.array(parents)), (B, N)),
        valid=np.ones((B, N), bool),
        ancestors=np.broadcast_to(reference.packed(reference.ancestors(np.array(parents))), (B, N, 1)),
    )
    seen = Occurrences(prompt=np.zeros((B, WIDE), bool), output=np.zeros((B, WIDE), np.int32))
    for b, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        seen.prompt[b, list(request.prompt)] = True
        np.add.at(seen.output[b], output, 1)
    length = np.array([len(r.prompt) + len(o) for r, o in zip(requests, outputs, strict=True)], np.int32)
    out = np.asarray(apply(logits, block, length, ends, np.ones((B,), bool), settings_of(requests), seen))
    for b in range(B):
        for row in range(N):
            path, node = [], row
            while node:
                path, node = [int(tokens[b, node]), *path], parents[node]
            expected = processed(logits[b, row], requests[b].prompt, [*outputs[b], *path], requests[b], (3, 7))
            np.testing.assert_allclose(out[b, row], expected, atol=1e-5)
    np.testing.assert_array_equal(out[-1].view(np.uint32), logits[-1].view(np.uint32))


def test_slots_that_are_done_ask_for_nothing():
    logits = np.ones((B, N, WIDE), np.float32)
    block = tree.chain(jnp.zeros((B,), jnp.int32), jnp.zeros((B, N - 1), jnp.int32), jnp.full((B,), N - 1), N)
    settings = settings_of([Request(prompt=(1,), frequency_penalty=1.0)] * B)
    seen = Occurrences(prompt=np.zeros((B, WIDE), bool), output=np.ones((B, WIDE), np.int32))
    ends, length = np.full((B, 8), -1, np.int32), np.full((B,), 3, np.int32)
    running = np.array([True, False, False, True])
    out = np.asarray(apply(logits, block, length, ends, running, settings, seen))
    assert [bool((x != 1).any()) for x in out] == running.tolist()


# --- Whole answers ---


def by_hand(table, request):
    """Greedy decoding of a table target, one token at a time."""
    output, last = [], request.prompt[-1]
    ends = () if request.ignore_eos else request.end_ids
    while len(output) < min(request.max_tokens, ENGINE.max_length - len(request.prompt)):
        last = int(np.argmax(processed(table[last], request.prompt, output, request, ends)))
        output.append(last)
        if last in ends:
            break
    return tuple(output)


def ways(table, requests):
    """The answers by plain decoding, by an oracle's drafts and by wrong ones; all must be equal."""
    weights = tables.params(table)
    quiet = script(requests, [()] * len(requests), counts=0)
    plain = [r.tokens for r in generate(ENGINE, weights, requests, drafter=DRAFTER, weights=quiet)]
    for right in (True, False, [True, True, False]):
        lent = script(requests, plain, right=right)
        assert [r.tokens for r in generate(ENGINE, weights, requests, drafter=DRAFTER, weights=lent)] == plain
    return plain


def cases():
    """30 requests on one random table, each with other settings."""
    rng = np.random.default_rng(7)
    table = rng.standard_normal((V, V)) * 2
    requests = []
    for number in range(30):
        requests.append(
            Request(
                prompt=(number % 12, *rng.integers(0, V, rng.integers(0, 4)).tolist()),
                max_tokens=int(rng.integers(4, 20)),
                min_tokens=int(rng.choice([0, 0, 2, 4])),
                temperature=0.0,
                repetition_penalty=float(rng.choice([1.0, 1.2, 2.0, 0.8])),
                frequency_penalty=float(rng.choice([0.0, 0.3, 1.5, -0.4])),
                presence_penalty=float(rng.choice([0.0, 0.7, -0.6])),
                logit_bias={int(t): float(rng.normal()) for t in rng.integers(0, V, rng.integers(0, 4))},
                end_ids=(END, 4)[: int(rng.integers(0, 3))],
                ignore_eos=bool(rng.integers(4) == 0),
                seed=0,
            )
        )
    return table, requests


def test_thirty_answers_equal_those_by_hand():
    table, requests = cases()
    expected = [by_hand(table, r) for r in requests]
    assert len(set(expected)) > 20
    for first in range(0, 30, 12):  # the scripted drafter tells requests apart by their first token
        assert ways(table, requests[first : first + 12]) == expected[first : first + 12]


def constant(values, rest=-5.0):
    """The same logits after every token."""
    table = np.full((V, V), rest)
    for token, value in values.items():
        table[:, token] = value
    return table


def test_penalties_act_on_every_verified_row():
    # VS-8.
    table = constant({5: 1.0, 6: 0.9, 7: 0.8})
    request = Request(prompt=(1,), max_tokens=8, temperature=0.0)
    up, down = (dataclasses.replace(request, frequency_penalty=f) for f in (2.0, -2.0))
    assert ways(table, [up]) == [(5, 6, 7, 5, 6, 7, 5, 6)]
    assert ways(table, [down]) == [(5,) * 8]
    both = ways(table, [up, dataclasses.replace(down, prompt=(2,))])
    assert both == [(5, 6, 7, 5, 6, 7, 5, 6), (5,) * 8]


def test_a_bias_reaches_every_row():
    # VS-9 (a), with a wrong drafter.
    request = Request(prompt=(1,), max_tokens=12, temperature=0.0, logit_bias={9: 100.0})
    assert ways(constant({5: 1.0}), [request]) == [(9,) * 12]
    banned = dataclasses.replace(request, logit_bias={5: -100.0})
    assert 5 not in ways(constant({5: 9.0, 6: 0.0}), [banned])[0]


@pytest.mark.parametrize(
    ("least", "most", "tokens"), [(3, 10, (4, 4, 4, END)), (0, 10, (END,)), (3, 3, (4, 4, 4)), (1, 10, (4, END))]
)
def test_min_tokens_masks_end_tokens_row_by_row(least, most, tokens):
    # VS-13.
    request = Request(prompt=(1,), max_tokens=most, min_tokens=least, temperature=0.0, end_ids=(END, 10))
    assert ways(constant({END: 2.0, 4: 1.0, 10: 1.5}), [request]) == [tokens]


def test_ignore_eos_goes_on():
    request = Request(prompt=(1,), max_tokens=6, temperature=0.0, end_ids=(END,), ignore_eos=True)
    assert ways(constant({END: 2.0}), [request]) == [(END,) * 6]


def test_a_slots_next_user_starts_from_nothing():
    # The counts and prompt of the one before must not be seen.
    table = constant({5: 1.0, 6: 0.9, 7: 0.8})
    request = Request(prompt=(1, 5, 6), max_tokens=5, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5)
    alone = ways(table, [request])
    assert ways(table, [request, request, request, request, request]) == alone * 5
