"""Everything a borrowed GPU is asked, in one script of at most 10 minutes; each part's answer is kept as it comes.

    python bench/h200.py --out OUT.json           Qwen3-4B's shapes, random bfloat16 weights
    python bench/h200.py --out OUT.json --tiny    the same parts with a tiny target (a CPU, under a minute)

Parts: the probe and the bits of one verify in two processes; milliseconds of verify for N = 1 .. 32 against
N = 1, with XLA's attention and the kernel's; rounds looped on the device against rounds stepped by the
host; the table of `bench/kernels.py`. A part that fails says so and the next one runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the probe's processes share the device

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decoding import probe, tree
from jspec.decoding.state import RUNNING, DecodeState
from jspec.drafters.ngram import NGram
from jspec.engine import static
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from jspec.measure import hardware
from jspec.startup import configure_cache
from jspec.target import model
from jspec.target.config import TargetConfig
from pallas_kernels.tree_attention import shapes

QWEN3_4B = TargetConfig(
    family="qwen3",
    vocab_size=151_936,
    width=2560,
    layers=36,
    heads=32,
    kv_heads=8,
    head_width=128,
    ff_width=9728,
    max_positions=32_768,
    norm_eps=1e-6,
    qk_norm=True,
)
TINY = dataclasses.replace(
    QWEN3_4B, vocab_size=512, width=64, layers=2, heads=4, kv_heads=2, head_width=64, ff_width=128
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a run."""

    target: TargetConfig
    length: int  # tokens before the block
    slots: tuple[int, ...]
    rows: tuple[int, ...]
    repeats: int
    tiny: bool

    def engine(self, slots: int, rows: int, kernel: str = "auto") -> EngineConfig:
        """An engine with room for `length` tokens and as many again."""
        return EngineConfig(target=self.target, slots=slots, rows=rows, max_length=2 * self.length, kernel=kernel)


FULL = Plan(QWEN3_4B, 1024, (1, 8), (1, 2, 4, 8, 16, 32), 20, False)
SHORT = Plan(TINY, 40, (2,), (1, 4), 3, True)


def weights(plan: Plan) -> model.TargetParams:
    """Random weights, the same in every process."""
    return jax.jit(lambda: model.init(jax.random.key(0), plan.target, jnp.bfloat16))()


def running(plan: Plan, config: EngineConfig, params: model.TargetParams, drafter: NGram) -> DecodeState:
    """A state whose slots all stand behind `length` tokens."""
    state = static.init(config, drafter, params, None)
    full = jnp.full((config.slots,), plan.length, jnp.int32)
    return state.replace(
        cache=state.cache.replace(length=full - 1),
        length=full,
        limit=full + plan.length // 2,
        anchor=jnp.arange(config.slots, dtype=jnp.int32),
        finish=jnp.full((config.slots,), RUNNING, jnp.int32),
    )


def block(config: EngineConfig) -> tree.Block:
    """A full chain of different tokens."""
    slots, rows = config.slots, config.rows
    tokens = jnp.arange(slots * rows, dtype=jnp.int32).reshape(slots, rows) + 1
    return tree.chain(tokens[:, 0], tokens[:, 1:], jnp.full((slots,), rows - 1, jnp.int32), rows)


def probed(plan: Plan) -> dict[str, Any]:
    """In a process of its own: the probe, and a digest of the logits' bits of one verify."""
    params, config = weights(plan), plan.engine(plan.slots[-1], plan.rows[-1])
    found = probe.probe(config, params)
    cache = running(plan, config, params, NGram(proposals=1)).cache
    logits, *_ = static.verify(config, params, cache, block(config))
    digest = hashlib.sha256(np.asarray(logits).tobytes()).hexdigest()
    return {"probe": found.document(), "digest": digest, "fingerprint": config.fingerprint(jnp.bfloat16)}


def two_processes(plan: Plan) -> dict[str, Any]:
    """The same questions in two processes sharing what the compiler chose and made, and in one that keeps nothing."""
    command = [sys.executable, __file__, "--probe"] + (["--tiny"] if plan.tiny else [])
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for more in (["--cache", folder], ["--cache", folder], []):
            done = subprocess.run(command + more, capture_output=True, text=True, timeout=240, check=True)
            answers.append(json.loads(done.stdout.splitlines()[-1]))
    first, second, alone = answers
    same = {f"same_{key}": first[key] == second[key] for key in ("digest", "fingerprint")}
    return same | {"alone_same_digest": first["digest"] == alone["digest"]} | first


def verify(plan: Plan) -> list[dict[str, Any]]:
    """Milliseconds of verify by N, the kernels in turn; `ratio` is to N = 1 of the same kernel and slots."""
    params, out = weights(plan), []
    for slots in plan.slots:
        single: dict[str, float] = {}
        for rows in plan.rows:
            for kernel in ("xla", "gpu" if jax.default_backend() == "gpu" else "auto"):
                config = plan.engine(slots, rows, kernel)
                row: dict[str, Any] = {"slots": slots, "rows": rows, "kernel": kernel}
                try:
                    row["kernel"] = config.check_runs(jnp.bfloat16).name
                except JspecError as e:
                    out.append(row | {"refused": e.given})
                    continue
                if any(r["kernel"] == row["kernel"] and r["slots"] == slots and r["rows"] == rows for r in out):
                    continue  # here `auto` is xla
                cache, chain, seconds = running(plan, config, params, NGram(proposals=1)).cache, block(config), []
                for _ in range(plan.repeats + 1):
                    begin = time.perf_counter()
                    logits, _, _, cache = static.verify(config, params, cache, chain)
                    logits.block_until_ready()
                    seconds.append(time.perf_counter() - begin)
                median = statistics.median(seconds[1:])
                single.setdefault(row["kernel"], median)
                row |= {"ms": round(median * 1e3, 3), "ratio": round(median / single[row["kernel"]], 3)}
                out.append(row)
                print(row, flush=True)
    return out


def loops(plan: Plan) -> list[dict[str, Any]]:
    """Milliseconds a round, looped on the device and stepped by the host, and whether their bits agree."""
    params, out = weights(plan), []
    for slots in plan.slots:
        config, drafter = plan.engine(slots, plan.rows[-1]), NGram(proposals=plan.rows[-1] - 1)
        equal = probe.device_loop(config, params, drafter, None, running(plan, config, params, drafter))
        state = running(plan, config, params, drafter)
        begin, rounds = time.perf_counter(), 0
        while bool(np.any(np.asarray(state.running))):
            state, _ = static.step(config, drafter, params, None, state)
            rounds += 1
        stepped = (time.perf_counter() - begin) / rounds
        state = running(plan, config, params, drafter)
        begin = time.perf_counter()
        _, transcript = static.run(config, drafter, params, None, state)
        count = int(transcript.rounds)
        looped = (time.perf_counter() - begin) / count
        row = {"slots": slots, "rounds": count, "step_ms": round(stepped * 1e3, 3), "loop_ms": round(looped * 1e3, 3)}
        out.append(row | {"equal": equal.holds, "reason": equal.reason})
        print(out[-1], flush=True)
    return out


def kernels(plan: Plan) -> dict[str, Any]:
    """The table of `bench/kernels.py`."""
    sys.path.insert(0, str(Path(__file__).parent))
    from kernels import table

    return table(shapes.SMALL[:2], 3, 2) if plan.tiny else table(shapes.REAL, 7, 10)


PARTS: tuple[Callable[[Plan], Any], ...] = (two_processes, verify, loops, kernels)


def main() -> None:
    """Runs the parts and writes what each found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="written after every part")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--probe", action="store_true", help="only the probe, for a process of its own")
    parser.add_argument("--cache", type=Path, help="of that process: where compiled programs and choices are kept")
    options = parser.parse_args()
    if options.cache:
        configure_cache(options.cache)
    plan = SHORT if options.tiny else FULL
    if options.probe:
        print(json.dumps(probed(plan), default=str))
        return
    record: dict[str, Any] = {"schema": 1, "device": hardware.device(), "versions": hardware.versions()}
    for part in PARTS:
        begin = time.perf_counter()
        try:
            found = part(plan)
        except Exception as e:
            traceback.print_exc()
            found = {"failed": f"{type(e).__name__}: {e}"[:2000]}
        record[part.__name__] = {"seconds": round(time.perf_counter() - begin, 1), "found": found}
        print(f"{part.__name__}: {record[part.__name__]['seconds']} s", flush=True)
        if options.out:
            options.out.write_text(json.dumps(record, default=str) + "\n")
    print(json.dumps(record, default=str))


if __name__ == "__main__":
    main()
