"""Kills a run of training at random moments until it is done, and compares it with one that was left alone:

python -m tests.training.kills [KILLS]
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jspec.training import loop
from tests.training.tiny_run import bits, train


def until_done(folder, count, kills, seed):
    """Runs the tiny run as a program and kills it at random moments; the number of kills that hit it alive."""
    rng, hits = random.Random(seed), 0
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    for attempt in range(kills + 20):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.tiny_run", str(folder), str(count)], env=environment
        )
        if hits < kills:
            # From the first step on: starting and compiling change nothing on disk.
            before = loop.read_metrics(folder)
            while process.poll() is None and len(loop.read_metrics(folder)) <= (len(before) if attempt else 0):
                time.sleep(0.002)
            time.sleep(rng.random() * 0.15)
            if process.poll() is None:
                hits += 1
            process.kill()
            process.wait()
        elif process.wait() == 0:
            return hits
        else:
            raise AssertionError("the run failed by itself")
    raise AssertionError("the run was never alive long enough")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
        length = 3 * count
        hits = until_done(Path(name) / "killed", length, count, seed=1)
        same = bits(train(Path(name) / "killed", length)) == bits(train(Path(name) / "straight", length))
        print(f"{hits} kills in {length} steps with a save after each; equal to the last bit: {same}")
        sys.exit(not same)
