"""Acceptance told from texts is the acceptance of decoding, round for round."""

import numpy as np
import pytest

from jspec.decoding.generate import generate
from jspec.drafters.block.drafter import BlockDrafter
from jspec.training import evaluate, loop
from jspec.training.features import Online
from jspec.training.optimizer import Optimizer
from jspec.training.packing import Shape, Stream
from jspec.training.texts import Text
from tests import tiny
from tests.drafters import blocks
from tests.training import test_packing, tiny_run

LENGTHS = [3, 7, 1, 5, 9, 4, 2, 6]
SHAPE = Shape(rows=3, length=64, anchors=20)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """T's greedy answers, and a drafter that has learned the most of them."""
    asked = tiny.requests(LENGTHS, max_tokens=40, temperature=0.0)
    results = generate(blocks.engine(3), tiny.params(), asked)
    texts = []
    for request, result in zip(asked, results, strict=True):
        tokens = np.asarray([*request.prompt, *result.tokens], np.int32)
        span = (len(request.prompt), len(tokens))
        texts.append(Text(id=str(len(texts)), kind="chat", tokens=tokens, answers=(span,)))
    look = Online(test_packing.target(), tiny_run.CONFIG.taps, texts, rows=3, length=64)
    stream = Stream(texts, look, Shape(rows=2, length=64, anchors=24), 0)
    folder = tmp_path_factory.mktemp("run")
    count = 60
    state = loop.train(
        tiny_run.CONFIG,
        blocks.lent(tiny_run.KIND),
        stream,
        tiny_run.GOAL,
        Optimizer(steps=count, rate=1e-2, warmup=5),
        loop.Run(dtype="float32", save_every=count),
        folder,
    )
    weights = blocks.lent(tiny_run.KIND).replace(params=state.params)
    return asked, texts, look, weights


def test_walks_are_rounds(trained):
    asked, texts, look, weights = trained
    found = evaluate.right(tiny_run.CONFIG, weights, texts, look, SHAPE, "float32")
    for proposals in (1, 3, 7):
        drafter = BlockDrafter(config=tiny_run.CONFIG, proposals=proposals, mode="greedy", key_block=16)
        results = generate(blocks.engine(3), tiny.params(), asked, drafter=drafter, weights=weights)
        for text, row, result in zip(texts, found, results, strict=True):
            walk = evaluate.walk([text], [row], proposals)
            assert (walk.rounds, walk.tokens) == (result.rounds, len(result.tokens))
        whole = evaluate.walk(texts, found, proposals)
        assert whole.length > (1.4 if proposals == 1 else 1.8)  # it has learned, so most of the walk is tried
        assert sum(whole.accepted) >= whole.tokens - whole.rounds


@pytest.mark.parametrize("fault", ["place", "tap"])
def test_a_shift_shows(trained, fault):
    asked, texts, look, weights = trained
    drafter = BlockDrafter(config=tiny_run.CONFIG, proposals=7, mode="greedy", key_block=16)
    rounds = sum(r.rounds for r in generate(blocks.engine(3), tiny.params(), asked, drafter=drafter, weights=weights))

    def shifted(numbers):
        seen = look(numbers)
        return [type(s)(np.roll(s.taps, 1, axis=0), s.hidden, s.lse) for s in seen] if fault == "tap" else seen

    found = evaluate.right(tiny_run.CONFIG, weights, texts, shifted, SHAPE, "float32")
    if fault == "place":
        found = [np.roll(row, 1) for row in found]
    assert evaluate.walk(texts, found, 7).rounds != rounds


def test_a_walk_by_hand():
    text = Text(id="", kind="chat", tokens=np.arange(12, dtype=np.int32), answers=((3, 12),))
    row = np.asarray([9, 9, 2, 0, 0, 1, 0, 3, 0, 9, 9, 0])
    # From 2: two right, on to 5; one right, on to 7; three right, on to 11, the last token.
    walk = evaluate.walk([text], [row], 7)
    assert (walk.rounds, walk.tokens, walk.accepted) == (3, 9, (3, 2, 1, 0, 0, 0, 0))
    assert walk.length == 3.0 and walk.rates[0] == 1.0
    # At most one draft: 2, 4, 5, 7, 9, 11.
    assert evaluate.walk([text], [row], 1).rounds == 5
    assert np.isnan(evaluate.walk([], [], 3).length)


def test_loop_free_texts():
    loop_of_four = np.tile(np.arange(4, dtype=np.int32), 5)
    texts = [
        Text(id="a", kind="chat", tokens=np.arange(20, dtype=np.int32), answers=((2, 20),)),
        Text(id="b", kind="chat", tokens=loop_of_four, answers=((2, 20),)),
    ]
    kept, rows = evaluate.loop_free(texts, [np.zeros(20, int), np.ones(20, int)])
    assert [text.id for text in kept] == ["a"] and len(rows) == 1 and not rows[0].any()
