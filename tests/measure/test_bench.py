"""The plan of a benchmark: engines large enough for its prompts, and what is left out of a comparison."""

import contextlib
import dataclasses
import io
import json
import subprocess

import jax
import pytest

from jspec import cli
from jspec.decoding.generate import RoundTimes
from jspec.errors import JspecError
from jspec.measure import bench, conversations, reference
from jspec.measure.bench import Group, Plan
from jspec.measure.conversations import Settings
from jspec.measure.suites import Prompt
from jspec.measure.trace import Round, Trace
from tests import tiny
from tests.hostile import LETTERS, checkpoint
from tests.words import tokenizer


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


# --- A whole run ---


@pytest.fixture
def tiny_machine(monkeypatch):
    """Everything of a run but the target, the bandwidth and the second process, which is made a call."""
    altered = []

    def process(_, *, input, **__):
        out = io.StringIO()
        monkeypatch.setattr("sys.stdin", io.StringIO(input))
        with contextlib.redirect_stdout(out):
            reference.main()
        answers = json.loads(out.getvalue())
        for change in altered:
            change(answers)
        return subprocess.CompletedProcess([], 0, stdout=json.dumps(answers), stderr="")

    monkeypatch.setattr(bench.hardware, "read_bandwidth", lambda: 10.0)
    monkeypatch.setattr(reference, "configure_cache", lambda _: None)
    monkeypatch.setattr(reference.loading, "load", lambda **_: checkpoint())
    monkeypatch.setattr(subprocess, "run", process)
    return altered


def rows(wanted):
    return {row["run"]: row for row in bench.run(wanted, checkpoint()).rows}


RUNS = ("baseline", "baseline_native", "ngram_k3")


def test_shapes_are_warm_before_the_window(tiny_machine, monkeypatch):
    # BM-6: three lengths of prompts.
    wanted = plan(("a",), ("b" * 9,), ("c" * 40,), runs=RUNS)
    made = rows(dataclasses.replace(wanted, check_exact=False))
    assert [made[name]["compiles_in_window"] for name in RUNS] == [0, 0, 0]
    assert made["ngram_k3"]["compile_s"] > 0
    monkeypatch.setattr(bench, "_warm_up", lambda *_: 0.0)  # the fault, on an engine that nobody has warmed
    cold = rows(dataclasses.replace(wanted, check_exact=False, rows=6))
    assert cold["baseline"]["compiles_in_window"] > 0


def test_the_text_is_that_of_a_process_without_a_drafter(tiny_machine):
    # BM-9: ids are compared with another process; the ratio names the plain path it divides by.
    wanted = plan(("abc",), ("ba" * 9,), runs=RUNS)
    made = rows(wanted)
    assert made["ngram_k3"]["exact_match"] == 1.0 and made["baseline"]["exact_match"] is None
    base = max(("baseline", "baseline_native"), key=lambda name: made[name]["output_throughput_tps"])
    assert {row["speedup_base"] for row in made.values()} == {base}
    tiny_machine.append(lambda answers: answers[0][0][0].append(1))
    assert rows(wanted)["ngram_k3"]["exact_match"] == 0.5


def test_template_switches_reach_the_prompt_and_the_record():
    # BM-8: on, off and unset.
    letters = ["!", *LETTERS[1:]]
    target = dataclasses.replace(checkpoint(), tokenizer=tokenizer(letters, end_ids=(62,), chat=True))

    def ids(**switches):
        settings = Settings(max_tokens=4, switches=switches)
        return conversations.request(target, Prompt("custom", 0, ("a",)), (), settings).prompt

    assert ids(loud=True) != ids(loud=False) == ids()
    read = cli._parser().parse_args
    told = [cli._switches(read(["bench", *flags])) for flags in ([], ["--enable-thinking"], ["--no-enable-thinking"])]
    assert told == [{}, {"enable_thinking": True}, {"enable_thinking": False}]
    assert cli._switches(read(["bench", "--template-switch", "loud=true"])) == {"loud": True}
    assert cli._recorded(Settings(max_tokens=4))["switches"] == "template default"
    assert cli._recorded(Settings(max_tokens=4, switches={"loud": True}))["switches"] == {"loud": True}
