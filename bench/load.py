"""Seconds and memory that loading a checkpoint takes, beside the size of its weights.

    python bench/load.py                     weights as stored, bfloat16
    python bench/load.py --dtype float32     widened while they are read
    python bench/load.py --layers 2          a small one, to try the script

The checkpoint is random and has the shape of SmolLM2-1.7B: 3.4 GB in two shards, in a folder under
`--place` that is removed at the end. It is written by one process and loaded by two fresh ones, so that
nothing but the reader is in their memory: the first finds the files on the disk, where the system lets
go of its cache when asked, the second in the system's cache.

`before` is the resident memory of the process when JAX has started and nothing is read, `peak` the
largest it ever was (VmHWM, which a fresh process has not used up). The goal: (peak - before) / weights
below 1.2. The last line of output is JSON; the exit code is 1 above the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any

GOAL = 1.2
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49_152,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 130_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
STEP = 1 << 22  # values drawn at a time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--place", type=pathlib.Path, default=None, help="where to write; the system's folder for such")
    parser.add_argument("--write", type=pathlib.Path, help=argparse.SUPPRESS)  # what the two processes are told
    parser.add_argument("--read", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write is not None:
        write(args.write, CONFIG | {"num_hidden_layers": args.layers})
        return 0
    if args.read is not None:
        print(json.dumps(read(args.read, args.dtype)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.place) as name:
        me = [sys.executable, __file__, "--dtype", args.dtype, "--layers", str(args.layers)]
        subprocess.run([*me, "--write", name], check=True)
        rows = []
        for state in ("from the disk", "from the system's cache"):
            if not rows:
                forget(pathlib.Path(name))
            done = subprocess.run([*me, "--read", name], check=True, stdout=subprocess.PIPE, text=True)
            row = {"files": state, **json.loads(done.stdout.splitlines()[-1])}
            rows.append(row)
            print(
                f"{state:24} {row['seconds']:6.1f} s  weights {row['weights_mb']:,.0f} MB"
                f"  before {row['before_mb']:,.0f}  peak {row['peak_mb']:,.0f}"
                f"  (peak - before) / weights {row['added_ratio']:.3f}  peak / weights {row['peak_ratio']:.3f}",
                flush=True,
            )
    met = all(row["added_ratio"] < GOAL for row in rows)
    print(json.dumps({"dtype": args.dtype, "layers": args.layers, "goal": GOAL, "met": met, "runs": rows}))
    return 0 if met else 1


# --- Writing -------------------------------------------------------------------------------------


def write(folder: pathlib.Path, config: dict[str, Any]) -> None:
    """The checkpoint: configuration, two indexed shards, and a tokenizer with a piece for every row."""
    from tests.target import folders

    (folder / "config.json").write_text(json.dumps(config))
    shapes = folders.shapes(config)
    names = list(shapes)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    where = {}
    for n, mine in enumerate(halves, 1):
        file = f"model-0000{n}-of-00002.safetensors"
        write_shard(folder / file, {name: shapes[name] for name in mine})
        where |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    model = folders.tokenizer()["model"]
    model["vocab"] |= folders.SPECIAL_IDS  # ids without gaps
    model["vocab"] |= {f"<unused{i}>": i for i in range(folders.V, config["vocab_size"])}
    folders.write_tokenizer(folder, changes={"model": model})


def write_shard(path: pathlib.Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Normal values, a few million at a time: the whole would not fit beside the rest of a small machine."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        left = at // 2
        while left:
            values = rng.standard_normal(min(left, STEP), np.float32) * np.float32(0.02)
            f.write(values.astype(ml_dtypes.bfloat16).tobytes())
            left -= values.size
        f.flush()
        os.fsync(f.fileno())  # only what is on the disk can be forgotten


def forget(folder: pathlib.Path) -> None:
    """Asks the system to drop the files from its cache."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- Reading -------------------------------------------------------------------------------------


def read(folder: pathlib.Path, dtype: str) -> dict[str, float]:
    """Loads the checkpoint in this process."""
    import jax
    import jax.numpy as jnp

    from jspec.target import loading

    jnp.zeros(1).block_until_ready()  # the backend is up
    before = status("VmRSS")
    begin = time.perf_counter()
    checkpoint = loading.load(folder, dtype=dtype)
    seconds = time.perf_counter() - begin
    peak, after = status("VmHWM"), status("VmRSS")
    weights = sum(array.nbytes for array in jax.tree.leaves(checkpoint.params))
    return {
        "seconds": round(seconds, 2),
        "gb_per_s": round(weights / seconds / 1e9, 2),
        "weights_mb": round(weights / 1e6, 1),
        "before_mb": round(before / 1e6, 1),
        "after_mb": round(after / 1e6, 1),
        "peak_mb": round(peak / 1e6, 1),
        "added_ratio": round((peak - before) / weights, 4),
        "peak_ratio": round(peak / weights, 4),
    }


def status(key: str) -> int:
    """A line of this process's `/proc/self/status`, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: this measurement needs Linux.")


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # for `tests`, which is not installed
    sys.exit(main())
