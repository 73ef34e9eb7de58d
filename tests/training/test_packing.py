"""Batches: what stands in them, which texts they take, and that features come back from disk as they were."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.errors import JspecError
from jspec.training import packing
from jspec.training.features import Cached, Online
from jspec.training.packing import Shape, Stream
from jspec.training.texts import Text
from tests import tiny
from tests.training.test_forward import texts as seen_one_by_one

SHAPE = Shape(rows=2, length=32, anchors=5)


def target(dtype=jnp.float32):
    return types.SimpleNamespace(config=tiny.T, params=tiny.params(dtype), fingerprint="T", name="T")


def texts(lengths=(9, 30, 12, 20, 5, 17, 11), prompt=3):
    rng = np.random.default_rng(1)
    return [
        Text(id=str(i), kind="chat", tokens=rng.integers(0, 64, n).astype(np.int32), answers=((prompt, n),))
        for i, n in enumerate(lengths)
    ]


def stream(seed=0, **changes):
    mine = texts()
    return Stream(mine, Online(target(), (-1, 0), mine, rows=3, length=32), dataclasses.replace(SHAPE, **changes), seed)


@given(st.lists(st.integers(1, 20), max_size=30))
def test_packing_puts_every_text_once_where_there_is_room(lengths):
    rows = packing.pack(lengths, 20)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[i] for i in row) <= 20 for row in rows)
    # Best fit: two rows that would fit into one another are never left.
    sizes = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 20


def test_an_epoch_reads_every_text_once_and_the_next_in_another_order():
    it = stream()
    epochs = [[it.place(e * it.epoch + i)[1] for i in range(it.epoch)] for e in range(4)]
    for batches in epochs:
        assert sorted(i for rows in batches for row in rows for i in row) == list(range(7))
    assert any(batches != epochs[0] for batches in epochs)


def test_a_batch_is_a_function_of_seed_and_number():
    for number in (0, 5):
        same = jax.tree.map(np.array_equal, stream().batch(number), stream().batch(number))
        assert all(jax.tree.leaves(same))
    assert not np.array_equal(stream().batch(1).anchors, stream(seed=1).batch(1).anchors)


def test_what_stands_in_a_batch():
    it = stream(anchors=64)
    for number in range(it.epoch):
        batch, (_, rows) = it.batch(number), it.place(number)
        for r, row in enumerate(rows):
            at = 0
            wanted = []
            for place, i in enumerate(row):
                text = it.texts[i]
                part = slice(at, at + len(text.tokens))
                np.testing.assert_array_equal(batch.tokens[r, part], text.tokens)
                np.testing.assert_array_equal(batch.position[r, part], np.arange(len(text.tokens)))
                np.testing.assert_array_equal(batch.document[r, part], place)
                np.testing.assert_array_equal(batch.learned[r, part], text.loss_mask)
                # From the last token of the prompt to the last but one of the answer.
                wanted += range(at + 2, at + len(text.tokens) - 1)
                at = part.stop
            assert [a for a in batch.anchors[r].tolist() if a >= 0] == wanted
            assert (np.asarray(batch.document[r, at:]) == -1).all() and not np.asarray(batch.learned[r, at:]).any()


def test_few_anchors_are_drawn_among_all_places():
    it = stream()
    drawn = {int(a) for n in range(40) for a in it.batch(n * it.epoch).anchors.ravel()}
    assert len(drawn) > 15  # the first five alone would be told by this
    for n in range(5):
        for row in np.asarray(it.batch(n).anchors):
            real = row[row >= 0]
            assert (np.diff(real) > 0).all() and (row[len(real) :] == -1).all()


def test_features_are_those_of_the_text_alone():
    # Rows of a batch, and what pads them, change nothing of note; the stored halves of the mantissa are gone.
    given = seen_one_by_one()
    mine = [Text(id="", kind="chat", tokens=g[0].astype(np.int32), answers=((1, len(g[0])),)) for g in given]
    for seen, (_, taps, hidden, lse) in zip(Online(target(), (-1, 0), mine, length=32)([0, 1]), given, strict=True):
        np.testing.assert_allclose(seen.taps.astype(np.float32), taps, rtol=2**-8, atol=1e-5)
        np.testing.assert_allclose(seen.hidden.astype(np.float32), hidden, rtol=2**-8, atol=1e-5)
        np.testing.assert_allclose(seen.lse, lse, atol=2e-2)


def same(one, other):
    return all(np.array_equal(getattr(one, f), getattr(other, f)) for f in ("taps", "hidden", "lse"))


def test_a_cache_gives_back_what_was_computed_and_goes_on_where_it_stopped(tmp_path):
    mine = texts()
    source = Online(target(jnp.bfloat16), (-1, 0), mine, rows=2, length=32)
    calls = []

    class Killed(Exception):
        pass

    class Dying(Online):
        def __call__(self, numbers):
            calls.append(list(numbers))
            if len(calls) == 3:
                raise Killed
            return super().__call__(numbers)

    dying = Dying(target(jnp.bfloat16), (-1, 0), mine, rows=2, length=32)
    with pytest.raises(Killed):
        Cached(dying, tmp_path, budget=1 << 20, shard=2).fill()
    (tmp_path / "00003.rows.npy.partial").write_bytes(b"half")
    cached = Cached(dying, tmp_path, budget=1 << 20, shard=2)
    cached.fill()
    assert calls == [[0, 1], [2, 3], [4, 5], [4, 5], [6]]
    assert all(map(same, cached([6, 0, 3]), source([6, 0, 3])))
    assert same(*source([2, 2]))
    assert sum(file.stat().st_size for file in tmp_path.glob("*.npy")) == pytest.approx(cached.bytes, abs=8 * 128)


def test_a_cache_of_something_else_is_refused(tmp_path):
    mine = texts()
    Cached(Online(target(), (-1, 0), mine, length=32), tmp_path, budget=1 << 20).fill()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    changed = [dataclasses.replace(mine[0], tokens=mine[0].tokens[::-1].copy()), *mine[1:]]
    for name, source in {
        "taps": Online(target(), (0,), mine, length=32),
        "texts": Online(target(), (-1, 0), changed, length=32),
        "dtype": Online(target(jnp.bfloat16), (-1, 0), mine, length=32),
    }.items():
        with pytest.raises(JspecError, match=f"another .*{name}"):
            Cached(source, tmp_path, budget=1 << 20)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


def test_a_cache_keeps_to_its_budget_and_tells_of_damage(tmp_path):
    source = Online(target(), (-1, 0), texts(), length=32)
    with pytest.raises(JspecError, match="budget"):
        Cached(source, tmp_path / "small", budget=1000)
    assert not (tmp_path / "small").exists()
    cached = Cached(source, tmp_path, budget=1 << 20)
    with pytest.raises(JspecError, match="cannot be read"):
        cached([0])
    cached.fill()
    (tmp_path / "00000.rows.npy").write_bytes((tmp_path / "00000.rows.npy").read_bytes()[:200])
    with pytest.raises(JspecError, match="cannot be read"):
        Cached(source, tmp_path, budget=1 << 20)([0])


def test_long_texts_are_cut_or_refused():
    long = texts((50, 4))
    with pytest.raises(JspecError, match="50 tokens"):
        Online(target(), (0,), long, length=32)
    kept = packing.cut([*long, dataclasses.replace(long[0], answers=((32, 50),))], 32)
    assert [len(text.tokens) for text in kept] == [32, 4] and kept[0].answers == ((3, 32),)
    # An answer of one token at the text's beginning has nothing before it to begin a block at.
    assert packing.cut([Text(id="", kind="chat", tokens=np.zeros(3, np.int32), answers=((0, 1),))], 8) == []


def test_bad_shapes_and_no_texts_are_refused():
    for wrong in ({"rows": 0}, {"length": 1}, {"anchors": 2.5}, {"rows": True}):
        with pytest.raises(JspecError, match=next(iter(wrong))):
            Shape(**wrong)
    with pytest.raises(JspecError, match="no texts"):
        Stream([], lambda numbers: [], SHAPE, 0)
