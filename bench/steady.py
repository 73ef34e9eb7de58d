"""2,000 requests whose settings are all drawn at random: does anything compile, does memory grow?

    python bench/steady.py                     about 15 seconds on 2 cores
    python bench/steady.py --requests 400

A tiny random target (64 tokens, 2 layers) behind a whole engine: every processor and filter, end ids,
stop strings, both kinds of log-probabilities, prompts of 1 to 90 tokens, prompt lookup, both rules. After
one warm-up, programs asked for, live arrays and resident memory are read every 100 requests. The last
line of output is JSON; the exit code is 1 if a program was compiled or memory grew.
"""

from __future__ import annotations

import argparse
import codecs
import gc
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decoding.generate import decode, warm_up
from jspec.decoding.request import Request
from jspec.drafters.ngram import NGram
from jspec.engine.config import EngineConfig
from jspec.startup import CompileCounter
from jspec.target import model
from jspec.target.config import TargetConfig

TARGET = TargetConfig(
    family="llama",
    vocab_size=64,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=8,
    ff_width=64,
    max_positions=256,
)


class Letters:
    """A detokeniser of one byte a token; the last 8 ids are bytes inside a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(48 + t if t < 56 else 160 + t for t in ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    @classmethod
    def stream(cls) -> Letters:
        return cls()


def requests(count: int, seed: int) -> Iterator[Request]:
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    for _ in range(count):
        most = int(rng.integers(1, 30))
        yield Request(
            prompt=tuple(rng.integers(0, 64, rng.integers(1, 90)).tolist()),
            max_tokens=most,
            min_tokens=int(rng.integers(0, most + 1)) if rng.integers(3) == 0 else 0,
            temperature=float(pick(0.0, 0.2, 0.8, 1.0, 1.7)),
            top_k=int(pick(0, 0, 1, 5, 40)),
            top_p=float(pick(1.0, 1.0, 0.9, 0.4)),
            min_p=float(pick(0.0, 0.0, 0.05, 0.3)),
            repetition_penalty=float(pick(1.0, 1.0, 1.2, 0.9)),
            presence_penalty=float(pick(0.0, 0.0, 0.7, -0.5)),
            frequency_penalty=float(pick(0.0, 0.0, 0.4, -0.2)),
            logit_bias={int(t): float(rng.normal()) for t in rng.integers(0, 64, pick(0, 0, 3, 60))},
            seed=pick(None, int(rng.integers(2**63))),
            choice_index=int(rng.integers(4)),
            end_ids=tuple(rng.integers(0, 64, rng.integers(0, 9)).tolist()),
            ignore_eos=bool(rng.integers(4) == 0),
            stop=tuple(
                "".join(chr(48 + int(t)) for t in rng.integers(0, 56, rng.integers(1, 4)))
                for _ in range(pick(0, 0, 1, 5))
            ),
            include_stop=bool(rng.integers(2)),
            logprobs=pick(None, None, 0, 3, 20),
            logprobs_kind=pick("raw", "processed"),
        )


def resident_mb() -> float:
    """Resident memory of this process, from /proc; 0 where there is none."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    config = EngineConfig(target=TARGET, slots=4, rows=8, max_length=128, chunk=32, key_block=32)
    params = jax.jit(lambda: model.init(jax.random.key(0), TARGET, jnp.bfloat16))()
    drafter, rules = NGram(proposals=7), ("choice", "rejection")
    begin = time.perf_counter()
    with CompileCounter() as warm:
        for rule in rules:
            warm_up(config, params, drafter=drafter, weights=(), accept=rule)
    print(f"warm-up {time.perf_counter() - begin:.1f} s, {warm}")
    samples, finishes, tokens, done = [], {}, 0, 0
    begin = time.perf_counter()
    with CompileCounter() as counter:
        for part, rule in enumerate(rules):
            share = options.requests * 3 // 4 if rule == "choice" else options.requests - options.requests * 3 // 4
            events = decode(
                config,
                params,
                requests(share, part),
                drafter=drafter,
                weights=(),
                tokenizer=Letters,
                accept=rule,
            )
            for event in events:
                if event.result is None:
                    continue
                done, tokens = done + 1, tokens + len(event.result.tokens)
                why = "stop string" if event.result.stop else event.result.finish
                finishes[why] = finishes.get(why, 0) + 1
                if done % 100 == 0:
                    gc.collect()
                    # Counted without keeping them: a list of live arrays would keep them alive.
                    sizes = [x.nbytes for x in jax.live_arrays()]
                    samples.append((done, len(sizes), sum(sizes), round(resident_mb(), 1)))
                    print(f"{done:5} requests  {samples[-1][1]} arrays  {samples[-1][2]} bytes  {samples[-1][3]} MB")
    bytes_live = [s[2] for s in samples]
    resident = [s[3] for s in samples]
    half = len(resident) // 2
    growth = resident[-1] / resident[half] - 1 if resident and resident[half] else 0.0
    flat = max(bytes_live) <= 1.01 * min(bytes_live) and growth < 0.01
    print(
        json.dumps(
            {
                "requests": done,
                "tokens": tokens,
                "seconds": round(time.perf_counter() - begin, 1),
                "finishes": finishes,
                "programs_after_warm_up": counter.programs,
                "names": counter.names,
                "live_bytes": [min(bytes_live), max(bytes_live)],
                "resident_mb": [resident[0], resident[half], resident[-1]],
                "resident_growth_second_half": round(growth, 4),
                "flat": flat,
            }
        )
    )
    return 0 if counter.programs == 0 and flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
