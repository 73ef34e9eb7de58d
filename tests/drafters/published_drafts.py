"""Drafts of a loaded drafter beside those of the plain reader of its format."""

import numpy as np

from jspec.drafters.block import weights as block
from tests.drafters import block_reference as plain
from tests.drafters import published, published_reference
from tests.drafters.published import read

LENGTH = 13  # tokens of context: more than the window of 9


def states_of(seed=0):
    """Hidden states of a text, `[L + 1, s, D]`: of no real text, which is all the same to a drafter."""
    return np.random.default_rng(seed).normal(size=(7, LENGTH, 32)).astype(np.float32)


def lent(saved, target):
    return block.lend(saved.config, saved.params, saved.ids, target.params, target.config)


def tapped(saved, states):
    return np.concatenate([states[tap + 1] for tap in saved.config.taps], axis=1)


def drafted(saved, target, states, anchor):
    """Greedy drafts of a loaded drafter, their logits and confidence logits.

    By the plain version of block drafters that `test_block.py` holds the compiled one against: to compile each of
    the variants would take minutes.
    """
    c, weights = saved.config, lent(saved, target)
    rows = plain.hidden(saved.params, c, weights.embed, tapped(saved, states), anchor)[c.first :]
    before = [anchor]
    for k in range(len(rows)):
        z, sure = plain.corrected(saved.params, c, weights, rows[: k + 1], before)
        before.append(int(np.argmax(z[k])) if saved.ids is None else int(saved.ids[np.argmax(z[k])]))
    return np.array(before[1:]), z, sure


def compare(folder, name, variant, damage=None):
    found, config, tensors = read(folder, name, variant, damage)
    assert found.format.name == name
    target, states, anchor = published.target(), states_of(), 7
    wanted, z, sure = published_reference.draft(
        name, config, tensors, states, anchor, target.params.embed, target.params.head
    )
    tokens, mine, confidence = drafted(found.saved, target, states, anchor)
    assert len(tokens) == len(wanted)
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_allclose(mine, z, atol=1e-4)
    if len(sure):
        np.testing.assert_allclose(plain.sigmoid(confidence), sure, atol=1e-5)
    return found
