"""Blocks: packed ancestors equal the walk up the parents, and a chain is the tree of width one."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.decoding import tree
from tests import reference

make = jax.jit(tree.chain, static_argnums=3)


def test_the_drawn_example():
    rows = reference.ancestors(np.array([0, 0, 0, 1]))
    np.testing.assert_array_equal(rows, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]])
    np.testing.assert_array_equal(reference.packed(rows)[:, 0], [0b0001, 0b0011, 0b0101, 0b1011])


@pytest.mark.parametrize("rows", [1, 2, 8, 31, 32, 33, 64, 65, 128])
def test_chain_bits_are_the_ancestors_of_a_chain(rows):
    bits = tree.chain_bits(rows)
    assert (bits.shape, bits.dtype) == ((rows, -(-rows // 32)), np.uint32)
    np.testing.assert_array_equal(bits, reference.packed(np.tril(np.ones((rows, rows), bool))))
    parents = np.maximum(np.arange(rows) - 1, 0)
    np.testing.assert_array_equal(bits, reference.packed(reference.ancestors(parents)))


@pytest.mark.parametrize(("rows", "words"), [(1, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_words(rows, words):
    assert tree.words(rows) == words


@given(
    st.lists(st.integers(0, 99), min_size=3, max_size=3),
    st.lists(st.integers(0, 99), min_size=12, max_size=12),
    st.lists(st.integers(0, 6), min_size=3, max_size=3),
)
def test_a_chain_holds_anchor_and_proposals(anchor, proposals, count):
    anchor, count = np.array(anchor, np.int32), np.array(count, np.int32)
    proposals = np.array(proposals, np.int32).reshape(3, 4)
    block = make(anchor, proposals, count, 8)
    for slot in range(3):
        held = min(count[slot], 4)
        expected = [anchor[slot], *proposals[slot, :held]] + [0] * (7 - held)
        np.testing.assert_array_equal(block.tokens[slot], expected)
        np.testing.assert_array_equal(block.valid[slot], np.arange(8) <= held)
        np.testing.assert_array_equal(block.parents[slot], [0, 0, 1, 2, 3, 4, 5, 6])
        np.testing.assert_array_equal(block.depth[slot], reference.depths(np.asarray(block.parents[slot])))
        np.testing.assert_array_equal(block.ancestors[slot], tree.chain_bits(8))
    assert block.rows == 8
    assert {str(x.dtype) for x in (block.tokens, block.parents, block.depth)} == {"int32"}


@pytest.mark.parametrize("rows", [1, 8])
def test_an_empty_proposal_is_the_same_block(rows):
    # Plain decoding: whatever the drafter's width, and however wrong its tokens, nothing of it is left.
    plain = make(np.array([5], np.int32), np.zeros((1, 0), np.int32), np.array([0], np.int32), rows)
    for width in range(rows):
        other = make(np.array([5], np.int32), np.full((1, width), 9, np.int32), np.array([0], np.int32), rows)
        jax.tree.map(np.testing.assert_array_equal, plain, other)
    assert np.asarray(plain.valid).sum() == 1
