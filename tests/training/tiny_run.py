"""A tiny run of training, for the tests of the loop and as a program that can be killed:

python -m tests.training.tiny_run FOLDER STEPS
"""

import sys
from pathlib import Path

import jax
import numpy as np

from jspec.training import loop
from jspec.training.features import Online
from jspec.training.objective import Objective
from jspec.training.optimizer import Optimizer
from jspec.training.packing import Shape, Stream
from tests.drafters import blocks
from tests.training import test_packing

KIND = "dspark"
CONFIG = blocks.KINDS[KIND]
GOAL = Objective(entropy=0.5, variation=1.0, confidence=1.0, growth=0.5)


def stream(seed=3, look=None, **shape):
    mine = test_packing.texts()
    look = look or Online(test_packing.target(), CONFIG.taps, mine, rows=3, length=32)
    return Stream(mine, look, Shape(**{"rows": 2, "length": 32, "anchors": 6} | shape), seed)


def train(folder, count, *, batches=None, optimizer=None, run=None, **options):
    optimizer = optimizer or Optimizer(steps=count, rate=3e-3, warmup=min(3, count), average=0.9)
    run = loop.Run(**{"dtype": "float32", "save_every": 1, "log_every": 1} | (run or {}))
    return loop.train(
        CONFIG, blocks.lent(KIND), stream() if batches is None else batches, GOAL, optimizer, run, folder, **options
    )


def bits(state):
    """Everything that a state holds, as bytes."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    train(target, int(sys.argv[2]))
