"""The loop: what a kill, a signal, an evaluation and a bad number leave behind. Known failures: TN-4 to TN-9."""

import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.training import loop, signals, step
from jspec.training.loop import Run
from jspec.training.optimizer import Optimizer
from jspec.training.saves import Saves
from tests.drafters import blocks
from tests.training import kills, tiny_run
from tests.training.tiny_run import bits, stream, train


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Ten steps in one go: the state, and what was logged."""
    folder = tmp_path_factory.mktemp("straight")
    return train(folder, 10), loop.read_metrics(folder)


def stop_after(count):
    seen = []

    def stop():
        seen.append(1)
        return len(seen) == count

    return stop


def learned(entry):
    """An entry without what the clock decides."""
    return {k: v for k, v in entry.items() if k not in ("tokens_per_second", "seconds_left", "memory_bytes")}


def test_schedule():
    # TN-4.
    optimizer = Optimizer(steps=100, rate=1e-3, warmup=10)
    rates = np.asarray([optimizer.schedule(i) for i in range(100)])
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) * 1e-4, rtol=1e-6)
    assert rates.max() == np.float32(1e-3) == rates[9] and (np.diff(rates[9:]) < 0).all() and rates[-1] < 1e-6
    np.testing.assert_allclose(rates[54], 0.5e-3 * (1 + np.cos(np.pi * 45 / 91)), rtol=1e-5)
    # What optax applies is what the schedule says of the step: a state begun at step 7 goes on from there.
    plain = Optimizer(steps=100, rate=1e-3, warmup=10, clip=1e8)
    state = step.start(plain, {"w": jnp.zeros((2, 2))})
    for i in range(12):
        old = np.asarray(state.params["w"])[0, 0]
        state, change = step.apply(plain, state, {"w": jnp.ones((2, 2))}, jnp.float32(1))
        np.testing.assert_allclose(old - np.asarray(state.params["w"])[0, 0], rates[i], rtol=1e-2)
        np.testing.assert_allclose(change.rate, rates[i], rtol=1e-6)


def test_a_run_learns(straight):
    _, entries = straight
    assert [entry["step"] for entry in entries] == list(range(1, 11))
    assert entries[-1]["loss"] < 0.9 * entries[0]["loss"]


def test_a_resumed_run_equals_one_that_never_stopped(straight, tmp_path):
    # TN-8: 5 steps, stop, 5 more; each batch is used once.
    state, entries = straight
    first = train(tmp_path, 10, stop=stop_after(5))
    assert int(first.step) == 5
    # An entry of a step that a kill then undid, and half a line.
    with open(tmp_path / loop.METRICS, "a") as file:
        file.write(json.dumps({"step": 6}) + '\n{"step": 7, "lo')
    batches, used = stream(), []
    make = batches.batch
    batches.batch = lambda number: used.append(number) or make(number)
    again = train(tmp_path, 10, batches=batches)
    assert used == [5, 6, 7, 8, 9] and int(again.step) == 10
    assert bits(again) == bits(state)
    assert [learned(e) for e in loop.read_metrics(tmp_path)] == [learned(e) for e in entries]
    # A finished run is left as it is.
    assert bits(train(tmp_path, 10)) == bits(state)


@pytest.mark.parametrize("fault", ["anchors", "average"])
def test_a_lost_part_of_the_state_shows(straight, tmp_path, fault):
    train(tmp_path, 10, stop=stop_after(5))
    if fault == "anchors":
        batches = stream()
        make = batches.batch
        batches.batch = lambda number: make(number - 1)  # resume that repeats a step
        again = train(tmp_path, 10, batches=batches)
    else:
        with Saves(tmp_path / "saves") as saves:
            like = step.start(Optimizer(steps=10, average=0.9), blocks.lent(tiny_run.KIND).params)
            like = jax.device_put(like, jax.devices()[0])
            found = saves.latest(like)
            saves.manager.delete(5)
            saves.save(found.replace(average=found.params))
        again = train(tmp_path, 10)
    assert bits(again) != bits(straight[0])


def test_kills(straight, tmp_path):
    # Also in the middle of a save: there is one after each of the steps. Ten kills: `python -m tests.training.kills`.
    assert kills.until_done(tmp_path, 10, kills=2, seed=0) == 2
    assert bits(train(tmp_path, 10)) == bits(straight[0])


def test_evaluation_leaves_no_trace_and_intervals_count_steps(straight, tmp_path):
    # TN-5; two batches a step.
    def run(folder, **settings):
        seen = []
        state = train(
            folder,
            6,
            run={"accumulate": 2, "save_every": 2, "keep": 9} | settings,
            evaluate=lambda params, at: seen.append(at) or {"length": float(jnp.sum(params.final_norm))},
        )
        return state, seen

    with_it, seen = run(tmp_path / "with", evaluate_every=2)
    without, none = run(tmp_path / "without")
    assert bits(with_it) == bits(without) and seen == [2, 4, 6] and none == []
    assert sorted(int(p.name) for p in (tmp_path / "with" / "saves").iterdir() if p.name.isdigit()) == [2, 4, 6]
    assert [e["step"] for e in loop.read_metrics(tmp_path / "with") if "evaluation" in e] == [2, 4, 6]


def test_accumulation_is_one_large_batch(tmp_path):
    # Four rows in one batch, or in two of two: the same rows, anchors and quotients.
    whole = stream(rows=4, anchors=64)
    halves = stream(rows=2, anchors=64)
    assert halves.epoch == 2 * whole.epoch
    one = train(tmp_path / "a", 1, batches=whole)
    two = train(tmp_path / "b", 1, batches=halves, run={"accumulate": 2})
    for a, b in zip(jax.tree.leaves(one.moments), jax.tree.leaves(two.moments), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_number_that_is_none_stops_the_run_and_is_never_saved(straight, tmp_path):
    # TN-6: a feature is infinite in step 3.
    batches = stream()
    make = batches.batch

    def poisoned(number):
        batch = make(number)
        return batch.replace(features=batch.features.at[0, 0].set(jnp.inf)) if number == 2 else batch

    batches.batch = poisoned
    with pytest.raises(JspecError, match=r"step 3 .*`\..*not finite") as told:
        train(tmp_path, 10, batches=batches)
    assert "step 2 is saved" in str(told.value)
    again = train(tmp_path, 10)  # with the cause gone it goes on, and nothing was spoilt
    assert bits(again) == bits(straight[0])


def test_leaving_waits_for_saves_and_half_a_save_is_not_restored(straight, tmp_path):
    # TN-7.
    state = train(tmp_path, 3)
    folder = tmp_path / "saves"
    assert (folder / "3").is_dir()
    half = folder / "4.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "default").mkdir()
    with Saves(folder) as saves:
        assert bits(saves.latest(state)) == bits(state)


def test_signals(tmp_path):
    def progress(entry):
        if entry["step"] == 3:  # `stop` is asked next behind the step after
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with signals.on_signal() as stop:
        state = train(tmp_path, 10, run={"save_every": 100}, progress=progress, stop=stop)
    assert int(state.step) == 4 and (tmp_path / "saves" / "4").is_dir()
    assert signal.getsignal(signal.SIGTERM) is before


def test_devices():
    # TN-9, and data parallel: fake devices need a process of their own.
    program = """
import sys, jax, numpy as np
from pathlib import Path
from jspec.training import step
from jspec.training.optimizer import Optimizer
from jspec.training.saves import Saves
from tests.drafters import blocks
from tests.training.tiny_run import KIND, bits, stream, train
import tempfile
folder = Path(tempfile.mkdtemp())
many = stream(rows=8, anchors=6)
state = train(folder / "8", 3, batches=many, devices=jax.devices())
assert len(state.params.final_norm.sharding.device_set) == 8
one = train(folder / "1", 3, batches=many, devices=jax.devices()[:1])
for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(one.params)):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-4)
for count in (1, 4):
    again = train(folder / "8", 3, batches=many, devices=jax.devices()[:count])
    assert bits(again) == bits(state) and len(again.params.final_norm.sharding.device_set) == count
from jspec.errors import JspecError
try:
    train(folder / "3", 3, batches=many, devices=jax.devices()[:3])
except JspecError as error:
    assert "3 devices" in str(error)
else:
    raise AssertionError
print("fine")
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert out.stdout.strip() == "fine", out.stderr


def test_a_folder_of_another_run_is_refused(tmp_path):
    train(tmp_path, 2)
    for name, options in {
        "optimizer": {"optimizer": Optimizer(steps=2)},
        "seed": {"batches": stream(seed=4)},
        "shape": {"batches": stream(rows=1)},
        "run": {"run": {"accumulate": 3}},
    }.items():
        with pytest.raises(JspecError, match=f"another .*{name}"):
            train(tmp_path, 2, **options)


def test_bad_settings_are_refused():
    for wrong in ({"steps": 0}, {"warmup": 11}, {"rate": 0}, {"rate": float("nan")}, {"average": 1.0}, {"clip": -1}):
        with pytest.raises(JspecError, match=next(iter(wrong))):
            Optimizer(**{"steps": 10} | wrong)
    for wrong in ({"accumulate": 0}, {"save_every": 1.5}, {"dtype": "float16"}):
        with pytest.raises(JspecError, match=next(iter(wrong))):
            Run(**wrong)
