"""The pure layer: the example of docs/pure.md is run as it stands, on a small engine."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jspec
from jspec.drafters.draft_model import DraftModel
from tests import tiny
from tests.hostile import checkpoint

PAGE = Path(__file__).parent.parent / "docs" / "pure.md"


@pytest.fixture(scope="module")
def example():
    """What the page defines, without the lines at its end that load the embedded model."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1]
    names = {}
    exec(compile(code[: code.index("\ntarget = jspec.load()")], str(PAGE), "exec"), names)
    return names


def requests():
    return [
        dataclasses.replace(r, **how)
        for r, how in zip(
            tiny.requests([1, 19, 40], max_tokens=20),
            [
                {"temperature": 0.0, "frequency_penalty": 0.5},
                {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3},
                {"min_tokens": 5, "end_ids": tuple(range(8)), "logit_bias": {9: 2.0}},
            ],
            strict=True,
        )
    ]


@pytest.mark.parametrize("dtype", tiny.DTYPES)
@pytest.mark.parametrize("kind", ["ngram", "draft model"])
def test_whole_generations_on_the_device(example, kind, dtype):
    drafter, weights = jspec.NGram(proposals=5), ()
    if kind == "draft model":
        drafter = DraftModel(proposals=3, model=tiny.T, vocab=64, key_block=16)
        weights = tiny.params(dtype, 1)
    config = tiny.engine(3)
    texts = example["generate_on_device"](config, drafter, tiny.params(dtype), weights, requests())
    stepped = tiny.decode(config, tiny.params(dtype), requests())
    assert texts == [t.tokens for t in stepped]


def test_the_last_lines_of_the_example(example):
    # The same calls with the tiny target in place of the embedded one.
    code = PAGE.read_text(encoding="utf-8")
    tail = re.search(r"target = jspec.load\(\)\n(.*?)```", code, re.S)[1].replace("print(", "shown = (")
    names = dict(example) | {"target": checkpoint()}
    exec(compile(tail.replace("max_length=256", "max_length=64"), str(PAGE), "exec"), names)
    assert [len(text) for text in names["shown"]][1] == 30


def test_every_public_name_is_documented():
    for name in jspec.__all__:
        assert getattr(jspec, name).__doc__
    assert not set(jspec.__all__) - set(dir(jspec))


def test_state_holds_no_python_object():
    state = jspec.init(tiny.engine(3), jspec.Plain(), tiny.params(), ())
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert np.asarray(state.finish).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"stop": ("a",)}, "`stop` of the request"),
        ({"logprobs": 0}, "`logprobs` of the request"),
        ({"seed": None}, "seed"),
    ],
)
def test_what_a_round_cannot_honour_is_refused(how, told):
    request = jspec.Request(**{"prompt": (1, 2), "seed": 1} | how)
    with pytest.raises(jspec.JspecError, match=told):
        jspec.admission(tiny.engine(3), request, 0)
