"""Acceptance: the marked path is the one that the target would have written, found here by walking down.

Known failures covered: BM-2 (it stops at the first refusal), TR-3 (only the target's own token is
followed), VS-5 and VS-3 (nothing but equality decides). And the rule of what commits: rows in one line
with the root, since only those saw their ancestors where a chain has them.
"""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.decoding import accept, tree
from jspec.decoding.tree import Block
from tests import reference

mark = jax.jit(accept.accept)
commit = jax.jit(accept.committed)


def block_of(tokens, parents, valid=None):
    """One block for each row of `tokens`, all of the tree `parents`."""
    tokens = np.asarray(tokens, np.int32)
    slots, rows = tokens.shape
    wide = lambda x: np.broadcast_to(np.asarray(x), (slots, *np.shape(x)))  # noqa: E731
    return Block(
        tokens=tokens,
        parents=wide(np.asarray(parents, np.int32)),
        depth=wide(reference.depths(parents)),
        valid=np.ones((slots, rows), bool) if valid is None else np.asarray(valid),
        ancestors=wide(reference.packed(reference.ancestors(parents))),
    )


def walked(tokens, parents, valid, choice):
    """The path from the root: at each row follow the child that carries the row's choice."""
    path = [0]
    while True:
        here = path[-1]
        children = [j for j in range(1, len(tokens)) if parents[j] == here and valid[j] and tokens[j] == choice[here]]
        if not children:
            return path
        path.append(children[0])


@st.composite
def verified(draw, rows=8, vocab=3):
    """A tree whose siblings carry different tokens, with the target's choices; agreement is common."""
    parents, tokens, taken = [0], [draw(st.integers(0, vocab - 1))], {}
    for j in range(1, rows):
        free = [u for u in range(j) if len(taken.get(u, ())) < vocab]
        parent = draw(st.sampled_from(free))
        token = draw(st.sampled_from([t for t in range(vocab) if t not in taken.get(parent, ())]))
        taken.setdefault(parent, set()).add(token)
        parents.append(parent)
        tokens.append(token)
    valid = [True, *draw(st.lists(st.sampled_from([True, True, True, False]), min_size=rows - 1, max_size=rows - 1))]
    choice = draw(st.lists(st.integers(0, vocab - 1), min_size=rows, max_size=rows))
    return np.array(tokens), np.array(parents), np.array(valid), np.array(choice)


@given(verified())
@settings(max_examples=200)
def test_the_marked_path_is_the_walked_one(case):
    tokens, parents, valid, choice = case
    block = block_of(tokens[None], parents, valid[None])
    marked = np.asarray(mark(block, choice[None].astype(np.int32)))[0]
    path = walked(tokens, parents, valid, choice)
    assert np.flatnonzero(marked).tolist() == sorted(path)
    # What commits: the leading rows that lie on that path and hang each under the row before.
    line = 1
    while line < 8 and line in path and parents[line] == line - 1:
        line += 1
    assert commit(block, marked[None]).tolist() == [line]


@pytest.mark.parametrize(("match", "accepted"), [([1, 0, 1, 1], 1), ([1, 1, 1, 1], 4), ([0, 1, 1, 1], 0)])
def test_acceptance_stops_at_the_first_refusal(match, accepted):
    # BM-2. Emitted is one more: the target's own token behind the last accepted row.
    choice = np.array([[1, 2, 3, 4, 5]], np.int32)
    proposals = np.where(np.array(match) == 1, choice[:, :4], 9)
    block = tree.chain(np.array([0], np.int32), proposals.astype(np.int32), np.array([4], np.int32), 5)
    marked = mark(block, choice)
    assert np.asarray(marked).sum() == accepted + 1
    assert commit(block, marked).tolist() == [accepted + 1]


def test_rows_without_a_proposal_are_never_accepted():
    # Their token is 0; a target that chooses 0 must not take that for agreement.
    block = tree.chain(np.array([3], np.int32), np.zeros((1, 4), np.int32), np.array([2], np.int32), 8)
    assert commit(block, mark(block, np.zeros((1, 8), np.int32))).tolist() == [3]


@given(st.lists(st.integers(0, 1), min_size=8, max_size=8), st.lists(st.integers(0, 1), min_size=8, max_size=8))
def test_a_chain_is_a_tree_of_width_one(tokens, choice):
    choice = np.array([choice], np.int32)
    chain = tree.chain(np.array(tokens[:1], np.int32), np.array([tokens[1:]], np.int32), np.array([7], np.int32), 8)
    as_tree = block_of([tokens], np.maximum(np.arange(8) - 1, 0))
    np.testing.assert_array_equal(mark(chain, choice), mark(as_tree, choice))
    assert commit(chain, mark(chain, choice)) == np.asarray(mark(chain, choice)).sum()


def test_a_tree_follows_only_the_targets_own_token():
    # TR-3: children 20, 30, 40 of the root; the target wants 10, then 40.
    parents = np.array([0, 0, 0, 0, 3])
    block = block_of([[1, 20, 30, 40, 50]] * 3, parents)
    choice = np.array([[10, 0, 0, 0, 0], [40, 0, 0, 50, 0], [20, 0, 0, 50, 0]], np.int32)
    marked = np.asarray(mark(block, choice))
    assert [np.flatnonzero(m).tolist() for m in marked] == [[0], [0, 3, 4], [0, 1]]
    # The last child's branch is provisional: of it only the root commits; the first child is in line.
    assert commit(block, marked).tolist() == [1, 1, 2]
