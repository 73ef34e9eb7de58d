"""Does anything compile after warm-up, and what does a cold process cost?

    python bench/warmth.py                 100 requests of mixed lengths and settings: programs compiled
    python bench/warmth.py --cold          first text of a fresh process, without and with the compile cache

The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from jspec.decoding.generate import decode, generate
from jspec.decoding.request import Request
from jspec.drafters.ngram import NGram
from jspec.engine.config import EngineConfig
from jspec.startup import CompileCounter, configure_cache
from jspec.target import loading


def mixed(vocab: int, count: int, seed: int) -> list[Request]:
    """Requests whose lengths and settings all differ."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            prompt=tuple(int(t) for t in rng.integers(0, vocab, rng.integers(1, 300))),
            max_tokens=int(rng.integers(1, 24)),
            temperature=float(rng.choice([0.0, 0.3, 0.8, 1.5])),
            top_k=int(rng.choice([0, 1, 40])),
            top_p=float(rng.choice([0.5, 0.95, 1.0])),
            min_p=float(rng.choice([0.0, 0.05])),
            seed=int(rng.integers(0, 2**63)),
            end_ids=tuple(int(t) for t in rng.integers(0, vocab, rng.integers(0, 4))),
        )
        for _ in range(count)
    ]


def warm(count: int) -> dict[str, object]:
    """Serves mixed requests after one warm-up request; counts programs and live arrays."""
    configure_cache()
    checkpoint = loading.load()
    config = EngineConfig(target=checkpoint.config, slots=4, rows=8, max_length=512)
    drafter = NGram(proposals=7)
    with CompileCounter() as first:
        generate(config, checkpoint.params, mixed(checkpoint.config.vocab_size, 1, 0), drafter=drafter)
    done, arrays = 0, []
    with CompileCounter() as after:
        for event in decode(config, checkpoint.params, mixed(checkpoint.config.vocab_size, count, 1), drafter=drafter):
            if event.kind == "done":
                done += 1
                if done % 20 == 0:
                    arrays.append(len(jax.live_arrays()))
    return {
        "requests": done,
        "programs_in_warm_up": first.programs,
        "programs_after": after.programs,
        "names_after": after.names,
        "live_arrays": arrays,
    }


def cold() -> list[dict[str, object]]:
    """Starts `jspec generate` in fresh processes with an empty, then a filled cache."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for what in ("empty cache", "filled cache", "filled cache"):
            command = [sys.executable, "-m", "jspec.cli", "generate", "Name a colour.", "--max-tokens", "8", "--stats"]
            begin = time.perf_counter()
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"JSPEC_CACHE_DIR": folder}
            )
            assert process.stdout is not None and process.stderr is not None
            process.stdout.read(1)
            first = time.perf_counter() - begin
            process.stdout.read()
            note = process.stderr.read().decode().strip().splitlines()[-1]
            process.wait()
            rows.append({"start": what, "first_text_s": round(first, 2), "note": note})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Runs one of the two measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--requests", type=int, default=100)
    args = parser.parse_args()
    print(json.dumps({"cold": cold()} if args.cold else warm(args.requests)))


if __name__ == "__main__":
    main()
