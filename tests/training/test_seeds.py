"""The prompts that jspec brings to train with: enough, each once, and apart from those that it measures with."""

import collections

import pytest

from jspec.errors import JspecError
from jspec.training import overlap, plan, prompts
from jspec.training.texts import Prompt

SEEDS = prompts.read(prompts.SEEDS)


def test_there_are_enough_of_each_kind():
    counted = collections.Counter(prompt.kind for prompt in SEEDS)
    assert counted["code"] + counted["chat"] >= 300 and min(counted.values()) >= 50
    assert any(len(prompt.turns) > 1 for prompt in SEEDS)


def test_each_is_there_once():
    assert len({prompt.id for prompt in SEEDS}) == len(SEEDS)
    said = [" ".join("\n".join(prompt.turns).lower().split()) for prompt in SEEDS]
    assert len(set(said)) == len(said)


def test_none_is_one_to_measure_with():
    mine = list(plan.built_in())
    found = [hit for prompt in SEEDS if (hit := overlap.Benchmarks(mine).find(prompt))]
    overlap.refuse(found)
    with pytest.raises(JspecError, match="1 prompts to train with"):  # a check that finds nothing finds this
        copied = Prompt(id="copied", kind="chat", turns=("Please answer.\n" + max(mine, key=str).turns[0],))
        overlap.refuse([overlap.Benchmarks(mine).find(copied)])
