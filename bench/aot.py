"""Compiles for TPUs and GPUs that are not there: the kernel's shape table and whole rounds of Qwen3-4B.

    python bench/aot.py kernels --chips v5e v6e
    python bench/aot.py kernels --chips v5e --key-blocks 128 256 512 1024
    python bench/aot.py kernels --chips sm_90a
    python bench/aot.py rounds --chips v5e v6e --kernels tpu xla
    python bench/aot.py rounds --chips sm_90a --kernels gpu
    python bench/aot.py rounds --layers 2 --slots 1 --rows 8          a quick look

Needs the extra `aot` (`make aot`). Weights are shapes only. Of each program: seconds to compile (of the clock,
and of all threads), memory, the bytes a call must read over the chip's bandwidth (the floor of its time), those
that the compiler counts, the kernel's bundles by grid steps and its VMEM, or its registers and spills, and the
static checks of `pallas_kernels/checks.py`. One libtpu process at a time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_LOG_DIR", "disabled")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("MOSAIC_GPU_DUMP_PTXAS", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jspec.decoding import round as rounds
from jspec.decoding import state as states
from jspec.drafters.ngram import NGram
from jspec.engine import tuning
from jspec.engine.config import EngineConfig
from jspec.startup import configure_cache
from jspec.target import model
from jspec.target.products import Products
from pallas_kernels import checks
from pallas_kernels.tree_attention import api, gpu, shapes

sys.path.insert(0, str(Path(__file__).parent))
import compiler_reports
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


def lower_round(chip: Chip, config: EngineConfig, *, donate: bool = True):
    """Lowered `round` of an engine with prompt lookup, its cache's bytes, and its weights'."""
    drafter = NGram(proposals=config.rows - 1)
    params, state = round_arguments(config, drafter)

    def whole(params, state):
        return rounds.round(config, drafter, params, None, state)

    lowered = chip.lower(jax.jit(whole, donate_argnums=(1,) if donate else ()), params, state)
    cache = sum(x.size * x.dtype.itemsize for x in (*state.cache.keys, *state.cache.values))
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    return lowered, cache, weights


def check_round(lowered, compiled, config: EngineConfig, cache_bytes: int) -> dict[str, list[str]]:
    """The static checks of a whole round."""
    t = config.target
    return checks.check(
        lowered,
        compiled,
        cache_bytes=cache_bytes,
        layer_elements=config.slots * t.kv_heads * config.capacity * t.head_width,
        vocabulary=t.vocab_size,
        kept=tuning.store() is not None,
    )


def memory(compiled) -> dict[str, float]:
    """MiB of arguments, outputs updated in place, and temporaries."""
    m = compiled.memory_analysis()
    mib = {"arguments": m.argument_size_in_bytes, "in_place": m.alias_size_in_bytes, "temporary": m.temp_size_in_bytes}
    return {k: round(v / checks.MIB, 1) for k, v in mib.items()}


def schedules(chips: Sequence[str], asked: Sequence[shapes.Shape]) -> dict[tuple[str, str], compiler_reports.Bundles]:
    """Bundles of the TPU kernel, by chip and name of the shape.

    In a process of its own: libtpu is told once, when it is loaded, to write its schedules, and compiles three
    times as long while it does.
    """
    chips = [name for name in chips if not name.startswith("sm_")]
    asked = [shape for shape in asked if api.module("tpu").refuses(shape) is None]
    if not chips or not asked:
        return {}
    command = [sys.executable, __file__, "schedules", "--chips", *chips]
    given = json.dumps([dataclasses.asdict(shape) for shape in asked])
    beside = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # this process may have loaded it
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True, env=beside)
    found = json.loads(done.stdout.splitlines()[-1])
    return {(row["chip"], row["shape"]): compiler_reports.Bundles(row["step"], row["around"]) for row in found}


def run_schedules(chips: Sequence[str], asked: Sequence[shapes.Shape]) -> list[dict]:
    """The process behind `schedules`."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        compiler_reports.dump_to(folder)
        for name in chips:
            chip = Chip(name)
            for shape in asked:
                compile_kernel(chip, "tpu", shape)
                counted = compiler_reports.read_bundles(Path(folder), "tree_attention")
                found.append({"chip": name, "shape": shape.name(), **dataclasses.asdict(counted)})
    return found


class Clock:
    """Seconds of the clock, and of the processor on all threads, since it was made."""

    def __init__(self) -> None:
        self.began = time.perf_counter(), time.process_time()

    def row(self) -> dict[str, float]:
        wall, busy = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        return {"compile_s": round(wall, 2), "compile_cpu_s": round(busy, 2)}


def kernel_row(counted: compiler_reports.Bundles | None, shape: shapes.Shape, calls: int = 1) -> dict[str, int]:
    """Bundles by grid steps of the TPU kernel at full length, over all its calls in a program."""
    if counted is None:
        return {}
    steps = shape.slots * shape.groups * shape.capacity // shape.key_block
    return {"step_bundles": counted.step, "grid_steps": steps, "bundles": calls * counted.of(steps)}


def traffic(chip: Chip, compiled) -> dict[str, float]:
    """What the compiler counts as read and written, and the time that takes at the chip's bandwidth."""
    size = compiler_reports.hbm_bytes(compiled)
    if not size:
        return {}  # XLA's GPU compiler does not say
    return {"hbm_mib": round(size / checks.MIB, 1), "hbm_us": round(size / chip.bandwidth * 1e6, 1)}


def kernel_shapes(options, gpu: bool) -> list[shapes.Shape]:
    """The table of `shapes.REAL`, in the key blocks that were asked for."""
    found = [dataclasses.replace(s, key_block=k) for k in options.key_blocks for s in shapes.REAL] or list(shapes.REAL)
    return [shapes.for_gpu(s) for s in found] if gpu else found


def run_kernels(options) -> list[dict]:
    """One row a chip and shape."""
    found = []
    counted = schedules(options.chips, kernel_shapes(options, False))
    for name in options.chips:
        chip = Chip(name)
        kernel = "gpu" if chip.gpu else "tpu"
        for shape in kernel_shapes(options, chip.gpu):
            row = {"chip": name, "kernel": kernel, "shape": shape.name()}
            why = api.module(kernel).refuses(shape)
            if why is not None:
                found.append(row | {"refused": why})
                continue
            with compiler_reports.said() as said:
                clock = Clock()
                _, compiled = compile_kernel(chip, kernel, shape)
                row |= clock.row()
            row["floor_us"] = round(shape.cache_bytes / chip.bandwidth * 1e6, 1)
            row |= traffic(chip, compiled) | memory(compiled) | {"copies": checks.large_copies(compiled.as_text())}
            if chip.gpu:
                row |= compiler_reports.assembled(said[0]) | {"shared_kib": gpu.shared_bytes(shape) >> 10}
            else:
                row |= kernel_row(counted.get((name, shape.name())), shape)
                row["vmem_kib"] = compiler_reports.vmem(compiled.as_text()) >> 10
            found.append(row)
            print(row, flush=True)
    return found


def round_config(options, chip: str, kernel: str, slots: int, rows: int) -> EngineConfig:
    """An engine of Qwen3-4B for 2,016 tokens."""
    target = dataclasses.replace(QWEN3_4B, layers=options.layers)
    block = 128 if chip.startswith("sm_") else 256
    return EngineConfig(target=target, slots=slots, rows=rows, max_length=2016, key_block=block, kernel=kernel)


def run_rounds(options) -> list[dict]:
    """Whole rounds of Qwen3-4B, one row a chip, kernel, B and N."""
    found = []
    asked = [
        (name, round_config(options, name, kernel, slots, rows))
        for name in options.chips
        for kernel in options.kernels
        for slots in options.slots
        for rows in options.rows
    ]

    def shape_of(config: EngineConfig) -> shapes.Shape:
        return dataclasses.replace(config.shape(jnp.bfloat16), rows=config.rows)

    counted = schedules(options.chips, list({shape_of(c): None for _, c in asked if c.kernel == "tpu"}))
    chips = {name: Chip(name) for name in options.chips}
    for name, config in asked:
        chip, target = chips[name], config.target
        row = {"chip": name, "kernel": config.kernel, "slots": config.slots, "rows": config.rows}
        row |= {"layers": target.layers}
        with compiler_reports.said() as said:
            clock = Clock()
            lowered, cache, weights = lower_round(chip, config)
            compiled = lowered.compile()
            row |= clock.row()
        row["floor_ms"] = round((weights + cache) / chip.bandwidth * 1e3, 2)
        row |= traffic(chip, compiled) | memory(compiled)
        if config.kernel == "tpu":
            row |= kernel_row(counted.get((name, shape_of(config).name())), shape_of(config), target.layers)
            row["vmem_kib"] = compiler_reports.vmem(compiled.as_text()) >> 10
        elif config.kernel == "gpu":
            row |= compiler_reports.assembled(said[0]) | {"shared_kib": gpu.shared_bytes(shape_of(config)) >> 10}
        row["checks"] = check_round(lowered, compiled, config, cache)
        found.append(row)
        print({**row, "checks": {k: (len(v), v[:2]) for k, v in row["checks"].items()}}, flush=True)
    return found


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kernels", "rounds", "schedules"], help="schedules: a part of the others")
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=["v5e", "v6e"])
    parser.add_argument("--kernels", nargs="+", choices=["tpu", "gpu", "xla"], default=["tpu"])
    parser.add_argument("--slots", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--key-blocks", nargs="+", type=int, default=[], help="of the kernels' shapes")
    options = parser.parse_args()
    if options.what == "schedules":
        print(json.dumps(run_schedules(options.chips, [shapes.Shape(**s) for s in json.load(sys.stdin)])))
        return
    with tempfile.TemporaryDirectory() as folder:
        configure_cache(folder)  # as an engine does, and as empty as it was before
        rows = (run_kernels if options.what == "kernels" else run_rounds)(options)
    print(json.dumps({"schema": 1, "jax": jax.__version__, "command": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
