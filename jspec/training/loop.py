"""The loop of training: batches, steps, saves, what is told on the way.

Batch, rate and noise of a step are functions of its number, and the state is saved whole; so a run that was killed
at any moment goes on from its last save and ends with the very weights of a run that was not (on one device, bit
for bit).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jspec.drafters.block.config import BlockConfig
from jspec.drafters.block.weights import BlockParams, BlockWeights
from jspec.errors import JspecError
from jspec.training import step as steps
from jspec.training.objective import Objective, Sums
from jspec.training.optimizer import Optimizer
from jspec.training.packing import Stream
from jspec.training.saves import Saves
from jspec.training.step import State

METRICS = "metrics.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run does besides learning. All intervals count optimizer steps."""

    accumulate: int = 1  # batches of a step
    save_every: int = 200
    log_every: int = 10
    evaluate_every: int = 0  # 0: never
    keep: int = 2  # saves
    dtype: str = "bfloat16"  # of the operands of products; weights, sums and gradients are float32

    def __post_init__(self) -> None:
        for name, least in (("accumulate", 1), ("save_every", 1), ("log_every", 1), ("evaluate_every", 0), ("keep", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise JspecError(
                    f"`{name}` of the run is `{value!r}`.", f"a whole number of at least {least}.", "correct it."
                )
        if self.dtype not in ("bfloat16", "float32"):
            raise JspecError(f"`dtype` of the run is `{self.dtype!r}`.", "bfloat16 or float32.", "choose one.")


# The weights to judge and the step, to figures for the metrics.
Evaluate = Callable[[BlockParams, int], Mapping[str, Any]]
Progress = Callable[[Mapping[str, Any]], None]


def train(
    config: BlockConfig,
    lent: BlockWeights,
    stream: Stream,
    goal: Objective,
    optimizer: Optimizer,
    run: Run,
    folder: Path,
    *,
    evaluate: Evaluate = lambda params, step: {},
    progress: Progress = lambda entry: None,
    stop: Callable[[], bool] = lambda: False,
    devices: Sequence[jax.Device] | None = None,
) -> State:
    """Trains to the optimizer's last step, from the last save in `folder` if there is one.

    Args:
      lent: the drafter's first weights, and what the target lends.
      folder: takes `metrics.jsonl` (an entry a line), the saves and `run.json`, which says what they belong to.
      stop: asked after each step; once it is true the state is saved and returned as it is.
      devices: over which the rows of a batch are spread; None is the first one alone.

    Raises:
      JspecError: the folder belongs to another run; a gradient or weight is not finite (the last good
        state is saved); rows that the devices do not divide.
    """
    devices = jax.devices()[:1] if devices is None else list(devices)
    if stream.shape.rows % len(devices):
        raise JspecError(
            f"batches of {stream.shape.rows} rows are to be spread over {len(devices)} devices.",
            "a number of rows that the devices divide.",
            "change the rows of a batch, or use fewer devices.",
        )
    mesh = Mesh(np.asarray(devices), ("data",))
    everywhere, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    _claim(folder, _about(config, lent, stream, goal, optimizer, run))
    lent = jax.device_put(lent, everywhere)
    first = jax.device_put(steps.start(optimizer, lent.params), everywhere)
    with Saves(folder / "saves", run.keep) as saves:
        state = saves.latest(first) or first
        done = int(state.step)
        log = _Log(folder / METRICS, done)
        meter = _Meter(optimizer.steps, done)
        while done < optimizer.steps:
            grads = sums = None
            for part in range(done * run.accumulate, (done + 1) * run.accumulate):
                gamma = jnp.float32(goal.gamma + goal.growth * (part // stream.epoch))
                batch = jax.device_put(stream.batch(part), spread)
                found = steps.gradient(config, goal, run.dtype, state.params, lent, batch, gamma)
                grads, sums = found if grads is None else steps.add((grads, sums), found)
            assert grads is not None and sums is not None
            state, change = steps.apply(optimizer, state, grads, sums.weight)
            if names := steps.broken(state.params, change):
                saves.save(state)
                raise JspecError(
                    f"in step {done + 1} the gradient or new value of `{'`, `'.join(names[:3])}` is not finite"
                    + (f" (and of {len(names) - 3} more)." if len(names) > 3 else "."),
                    "finite numbers only: a step that makes others is not taken, and never saved.",
                    f"look at batch {done * run.accumulate} and what is behind it, or lower the learning rate; "
                    f"the state after step {done} is saved.",
                )
            done += 1
            meter.count(sums)
            stopping = stop()
            last = done == optimizer.steps or stopping
            if done % run.log_every == 0 or last:
                epoch = done * run.accumulate / stream.epoch
                entry = {"step": done, "epoch": round(epoch, 4)} | meter.report(done)
                entry |= {"rate": float(change.rate), "gradient_norm": float(change.norm)}
                log.add(entry)
                progress(entry)
            if run.evaluate_every and (done % run.evaluate_every == 0 or done == optimizer.steps):
                params = state.params if state.average is None else state.average
                entry = {"step": done, "evaluation": dict(evaluate(params, done))}
                log.add(entry)
                progress(entry)
            if done % run.save_every == 0 or last:
                saves.save(state)
            if stopping:
                break
    return state


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run so far; a last line that was cut off by a kill is left out."""
    path, out = folder / METRICS, []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            out.append(json.loads(line))
    return out


class _Log:
    """Entries, a line each. What was told behind the state that a run goes on from is told again, so it goes."""

    def __init__(self, path: Path, done: int) -> None:
        self.path = path
        kept = [entry for entry in read_metrics(path.parent) if entry["step"] <= done]
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        os.replace(partial, path)

    def add(self, entry: Mapping[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")


class _Meter:
    """Averages since the last report, and how fast it goes."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.first = total, done
        self.begun = self.since = time.monotonic()
        self.sums: Sums | None = None

    def count(self, sums: Sums) -> None:
        self.sums = sums if self.sums is None else jax.tree.map(jnp.add, self.sums, sums)

    def report(self, done: int) -> dict[str, Any]:
        assert self.sums is not None
        sums = jax.tree.map(np.asarray, self.sums)
        now = time.monotonic()
        counted = np.maximum(sums.counted, 1e-9)
        left = (self.total - done) * (now - self.begun) / (done - self.first)
        entry = {
            "loss": float(sums.loss / max(sums.weight, 1e-9)),
            "entropy": float(sums.entropy / counted.sum()),
            "right": [round(float(x), 4) for x in sums.right / counted],
            "kept": [round(float(x), 4) for x in sums.kept / counted],
            "tokens_per_second": float(sums.counted.sum() / max(now - self.since, 1e-9)),
            "seconds_left": round(left, 1),
            "memory_bytes": _memory(),
        }
        self.sums, self.since = None, now
        return entry


def _memory() -> int | None:
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return int(stats.get("peak_bytes_in_use", 0))
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _about(
    config: BlockConfig, lent: BlockWeights, stream: Stream, goal: Objective, optimizer: Optimizer, run: Run
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(lent):
        digest.update(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8).data)
    texts = hashlib.sha256()
    for text in stream.texts:
        texts.update(np.asarray([len(text.tokens), *text.tokens, *np.ravel(text.answers)], np.int32).tobytes())
    settings: dict[str, Any] = {"drafter": config, "objective": goal, "optimizer": optimizer, "shape": stream.shape}
    about: dict[str, Any] = {name: dataclasses.asdict(value) for name, value in settings.items()}
    # How often a run is saved, told or judged does not change what it learns.
    about["run"] = {"accumulate": run.accumulate, "dtype": run.dtype}
    about |= {"seed": stream.seed, "texts": texts.hexdigest(), "weights": digest.hexdigest()}
    return json.loads(json.dumps(about))


def _claim(folder: Path, about: Mapping[str, Any]) -> None:
    """Notes whose folder it is, or refuses that of another run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    if path.exists():
        found = json.loads(path.read_text())
        if differing := sorted(key for key in about if found.get(key) != about[key]):
            raise JspecError(
                f"`{folder}` holds a run with another {', '.join(differing)}.",
                "the very run, to go on with it.",
                "name another folder, or remove this one to begin anew.",
            )
        return
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")
    os.replace(partial, path)
