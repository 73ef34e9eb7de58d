"""Compiles for TPUs and GPUs that are not there: the kernel's shape table and whole rounds of Qwen3-4B.

    python bench/aot.py kernels --chips v5e v6e
    python bench/aot.py kernels --chips sm_90a
    python bench/aot.py rounds --chips v5e v6e --kernels tpu xla
    python bench/aot.py rounds --layers 2 --slots 1 --rows 8          a quick look

Needs the extra `aot` (`make aot`). Weights are shapes only. Of each program: seconds to compile, memory,
the bytes a call must read over the chip's bandwidth (the floor of its time), and the static checks of
`pallas_kernels/checks.py`. One libtpu process at a time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_LOG_DIR", "disabled")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jspec.decoding import round as rounds
from jspec.decoding import state as states
from jspec.drafters.ngram import NGram
from jspec.engine.config import EngineConfig
from jspec.target import model
from jspec.target.products import Products
from pallas_kernels import checks
from pallas_kernels.tree_attention import api, shapes

sys.path.insert(0, str(Path(__file__).parent))
from h200 import QWEN3_4B

# Topology, bytes of HBM a second (the makers' data sheets).
CHIPS = {
    "v4": ("v4:2x2x1", 1228e9),
    "v5e": ("v5e:2x2", 819e9),
    "v5p": ("v5p:2x2x1", 2765e9),
    "v6e": ("v6e:2x2", 1640e9),
    "v7x": ("tpu7x:2x2x1", 7370e9),
    "sm_90a": ("", 4800e9),
}
H200 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 } runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H200"
"""


class Chip:
    """A device that exists as a description only."""

    def __init__(self, name: str) -> None:
        topology, self.bandwidth = CHIPS[name]
        self.gpu = name.startswith("sm_")
        if self.gpu:
            found = topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=H200)
        else:
            found = topologies.get_topology_desc(topology, platform="tpu")
        self.device = found.devices[0]
        self.sharding = SingleDeviceSharding(self.device)

    def place(self, tree):
        """Shapes of arrays that live on it."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding), tree)

    def lower(self, program, *args):
        """Lowers a jitted program for it."""
        abstract = jax.sharding.AbstractDevice(
            device_kind=self.device.device_kind,
            num_cores=None if self.gpu else 1,
            platform="gpu" if self.gpu else "tpu",
        )
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=abstract)):
            return program.lower(*(self.place(a) for a in args))


def kernel_arguments(s: shapes.Shape):
    """Shapes of one call of tree attention."""
    struct = jax.ShapeDtypeStruct
    cache = struct((s.slots, s.groups, s.capacity, s.width), jnp.dtype(s.dtype))
    rows = api.Rows(
        slot=struct((), jnp.int32),
        start=struct((s.slots,), jnp.int32),
        ancestors=struct((s.slots, s.rows, s.words), jnp.uint32),
        positions=struct((s.slots, s.rows), jnp.int32) if s.window else None,
        window=s.window,
    )
    return struct((s.slots, s.rows, s.heads, s.width), jnp.float32), cache, cache, rows


def compile_kernel(chip: Chip, name: str, shape: shapes.Shape):
    """Lowered and compiled program of one implementation."""
    run = jax.jit(functools.partial(api.attend, name, key_block=shape.key_block, cap=shape.cap))
    lowered = chip.lower(run, *kernel_arguments(shape))
    return lowered, lowered.compile()


def round_arguments(config: EngineConfig, drafter: NGram):
    """Shapes of parameters and state of a whole round, cache and products as an accelerator has them."""
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), config.target, jnp.bfloat16))
    params = params.replace(products=Products())
    state = jax.eval_shape(lambda: states.init(config, jnp.bfloat16, drafter.init(None, config.slots, config.capacity)))
    t = config.target
    layer = jax.ShapeDtypeStruct((config.slots, t.kv_heads, config.capacity, t.head_width), jnp.bfloat16)
    cache = state.cache.replace(keys=(layer,) * t.layers, values=(layer,) * t.layers)
    return params, state.replace(cache=cache)


def compile_round(chip: Chip, config: EngineConfig, *, donate: bool = True):
    """Lowered and compiled `round` of an engine with prompt lookup, and its cache's bytes."""
    drafter = NGram(proposals=config.rows - 1)
    params, state = round_arguments(config, drafter)

    def whole(params, state):
        return rounds.round(config, drafter, params, None, state)

    lowered = chip.lower(jax.jit(whole, donate_argnums=(1,) if donate else ()), params, state)
    cache = sum(x.size * x.dtype.itemsize for x in (*state.cache.keys, *state.cache.values))
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    return lowered, lowered.compile(), cache, weights


def memory(compiled) -> dict[str, float]:
    """MiB of arguments, outputs updated in place, and temporaries."""
    m = compiled.memory_analysis()
    mib = {"arguments": m.argument_size_in_bytes, "in_place": m.alias_size_in_bytes, "temporary": m.temp_size_in_bytes}
    return {k: round(v / checks.MIB, 1) for k, v in mib.items()}


def run_kernels(options) -> list[dict]:
    """The table of `shapes.REAL`, one row a chip and shape."""
    found = []
    for name in options.chips:
        chip = Chip(name)
        kernel = "gpu" if chip.gpu else "tpu"
        for shape in map(shapes.for_gpu, shapes.REAL) if chip.gpu else shapes.REAL:
            row = {"chip": name, "kernel": kernel, "shape": shape.name()}
            why = api.module(kernel).refuses(shape)
            if why is not None:
                found.append(row | {"refused": why})
                continue
            before = time.perf_counter()
            _, compiled = compile_kernel(chip, kernel, shape)
            row["compile_s"] = round(time.perf_counter() - before, 2)
            row["floor_us"] = round(shape.cache_bytes / chip.bandwidth * 1e6, 1)
            row |= memory(compiled) | {"copies": checks.large_copies(compiled.as_text())}
            found.append(row)
            print(row, flush=True)
    return found


def run_rounds(options) -> list[dict]:
    """Whole rounds of Qwen3-4B, one row a chip, kernel, B and N."""
    found = []
    target = dataclasses.replace(QWEN3_4B, layers=options.layers)
    for name in options.chips:
        chip = Chip(name)
        for kernel in options.kernels:
            for slots in options.slots:
                for rows in options.rows:
                    config = EngineConfig(
                        target=target, slots=slots, rows=rows, max_length=2016, key_block=256, kernel=kernel
                    )
                    row = {"chip": name, "kernel": kernel, "slots": slots, "rows": rows, "layers": target.layers}
                    before = time.perf_counter()
                    lowered, compiled, cache, weights = compile_round(chip, config)
                    row["compile_s"] = round(time.perf_counter() - before, 1)
                    row["floor_ms"] = round((weights + cache) / chip.bandwidth * 1e3, 2)
                    row |= memory(compiled)
                    row["checks"] = checks.check(
                        lowered,
                        compiled,
                        cache_bytes=cache,
                        layer_elements=slots * target.kv_heads * config.capacity * target.head_width,
                        vocabulary=target.vocab_size,
                    )
                    found.append(row)
                    print({**row, "checks": {k: (len(v), v[:2]) for k, v in row["checks"].items()}}, flush=True)
    return found


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kernels", "rounds"])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=["v5e", "v6e"])
    parser.add_argument("--kernels", nargs="+", choices=["tpu", "gpu", "xla"], default=["tpu"])
    parser.add_argument("--slots", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--layers", type=int, default=36)
    options = parser.parse_args()
    rows = (run_kernels if options.what == "kernels" else run_rounds)(options)
    print(json.dumps({"schema": 1, "jax": jax.__version__, "command": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
