"""The plan of a benchmark: engines large enough for its prompts, and what is left out of a comparison."""

import dataclasses
import json
import subprocess

import jax
import pytest

from jspec.decoding.generate import RoundTimes
from jspec.errors import JspecError
from jspec.measure import bench, conversations, reference
from jspec.measure.bench import Group, Plan
from jspec.measure.conversations import Settings
from jspec.measure.suites import Prompt
from jspec.measure.trace import Round, Trace
from tests import tiny
from tests.hostile import checkpoint


def plan(*conversations, max_tokens=8, runs=("baseline", "ngram_k3")):
    prompts = tuple(Prompt("custom", i, turns) for i, turns in enumerate(conversations))
    return Plan(datasets=(("custom", prompts),), runs=runs, settings=Settings(max_tokens=max_tokens), rows=4)


def wide():
    """The tiny target, made for long texts."""
    return dataclasses.replace(checkpoint(), config=dataclasses.replace(tiny.T, max_positions=4096))


def test_the_engine_has_room_for_a_long_later_turn():
    target = wide()
    wanted = plan(("a", "b" * 1500))
    engine = bench.contenders(wanted, target)[0].engine
    prompt = wanted.datasets[0][1][0]
    later = conversations.request(target, prompt, ("c" * 8,), wanted.settings)
    assert len(later.prompt) > 1500
    assert len(later.prompt) + wanted.settings.max_tokens <= engine.max_length


def test_a_prompt_beyond_the_target_is_named_before_anything_runs():
    with pytest.raises(JspecError, match="conversation 1 of `custom`: the prompt has `301` tokens"):
        bench.contenders(plan(("a",), ("b" * 300,)), checkpoint())


def test_a_failed_answer_is_in_no_ratio():
    def answered(seconds):
        rounds = (Round(seconds, 2), Round(2 * seconds, 2))
        return [[Trace(start=0.0, prefill_end=0.0, rounds=rounds, prompt_tokens=3, tokens=(1,) * 4, finish="length")]]

    failed = [[Trace(start=0.0, prefill_end=0.0, rounds=(), prompt_tokens=3, tokens=(), finish="error")]]
    wanted = plan(("a",), ("b",), ("c",))
    racers = bench.contenders(wanted, checkpoint())
    groups = []
    for ngram in (answered(1.0), failed, answered(1.0)):
        group = Group("custom", wanted.datasets[0][1][:1])
        group.traces = {"baseline": answered(2.0), "ngram_k3": ngram}
        group.wall = {"baseline": 4.0, "ngram_k3": 2.0}
        group.times = {name: RoundTimes() for name in wanted.runs}
        groups.append(group)
    row = bench._rows("custom", racers, groups, wanted)[1]
    assert row["failed_requests"] == 1
    assert (row["decode_speedup_low"], row["decode_speedup_high"]) == (2.0, 2.0)


def test_the_process_without_a_drafter_uses_the_same_compile_cache(monkeypatch):
    jobs = []

    def run(_, *, input, **__):
        jobs.append(json.loads(input))
        return subprocess.CompletedProcess([], 0, stdout="[]\n", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", "/somewhere/else")
        reference.tokens({"source": None}, tiny.engine(), [], Settings(max_tokens=1))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert jobs[0]["cache"] == "/somewhere/else"
