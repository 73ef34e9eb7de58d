"""The compile cache and the counting of programs (known-failures SV-2)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jspec.startup import CacheReport, CompileCounter, configure_cache

# A process that configures the cache (after a first array, if told so), compiles, and reports.
CHILD = """
import dataclasses, hashlib, json, sys
import jax, jax.numpy as jnp, numpy as np
from jspec.startup import CompileCounter, configure_cache

path, early = json.loads(sys.argv[1])
if early:
    jnp.zeros(3)
report = configure_cache(path)

@jax.jit
def step(x):
    for _ in range(8):
        x = jnp.tanh(x @ x) + jnp.sin(x)
    return x

with CompileCounter() as counter:
    y = step(jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64))
print(json.dumps({
    "report": dataclasses.asdict(report),
    "programs": counter.programs, "compiled": counter.compiled, "loaded": counter.loaded, "stored": counter.stored,
    "seconds": counter.compile_s + counter.load_s, "names": counter.names,
    "digest": hashlib.sha256(np.asarray(y).tobytes()).hexdigest(),
}))
"""


def start(cwd: Path, path: str | None = None, *, early: bool = False, **env: str) -> tuple[dict, str]:
    """One cold process in folder `cwd`: its report, and what it wrote to stderr."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "JSPEC_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([path, early])],
        cwd=cwd,
        env=clean | {"JAX_PLATFORMS": "cpu", "HOME": str(cwd)} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def starts_twice(cwd: Path, path: str | None = None, *, early: bool = False, **env: str) -> list[dict]:
    """Two cold processes one after the other; the second must find all that the first compiled."""
    (first, _), (second, stderr) = (start(cwd, path, early=early, **env) for _ in range(2))
    # jaxlib 0.10.0 and 0.10.1 complain here about CPU features that are none (jax-ml/jax#38445), and load the program.
    assert [line for line in stderr.splitlines() if "cpu_aot_loader.cc" not in line] == []
    assert first["report"]["entries"] == 0
    assert first["loaded"] == 0
    assert first["compiled"] == first["stored"] == first["programs"] > 0
    assert second["report"]["entries"] == first["stored"]
    assert second["compiled"] == second["stored"] == 0
    assert second["loaded"] == second["programs"] == first["programs"]
    assert second["names"] == first["names"]
    assert "jit(step)" in first["names"]
    assert second["digest"] == first["digest"]
    return [first, second]


def test_second_start_loads_what_the_first_compiled(tmp_path):
    first, second = starts_twice(tmp_path, str(tmp_path / "a" / "b"))
    assert second["report"]["path"] == str(tmp_path / "a" / "b")
    assert second["seconds"] < first["seconds"]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0, "others could run code through it"


def test_cache_works_even_after_the_first_array(tmp_path):
    starts_twice(tmp_path, str(tmp_path / "cache"), early=True)


def test_relative_folder_from_the_environment_becomes_absolute(tmp_path):
    _, second = starts_twice(tmp_path, JSPEC_CACHE_DIR="cache")
    assert second["report"]["path"] == str(tmp_path / "cache")


def test_default_folder_is_in_the_home(tmp_path):
    report, _ = start(tmp_path)
    assert report["report"]["path"] == str(tmp_path / ".cache/jspec/xla")
    assert report["stored"] > 0


def test_impossible_folder_warns_and_goes_on(tmp_path):
    (tmp_path / "file").touch()
    report, stderr = start(tmp_path, JSPEC_CACHE_DIR="file/cache")
    assert report["report"]["path"] is None
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith(f"jspec: warning: compile cache: `{tmp_path}/file/cache` cannot be written")
    assert "JSPEC_CACHE_DIR" in stderr
    assert report["compiled"] == report["programs"] > 0
    assert report["stored"] == report["loaded"] == 0


def test_damaged_entry_costs_a_compilation_and_nothing_else(tmp_path):
    first, _ = start(tmp_path, "cache")
    for entry in (tmp_path / "cache").glob("jit_step-*-cache"):
        entry.write_bytes(entry.read_bytes()[:100])
    second, _ = start(tmp_path, "cache")
    assert second["compiled"] == 1
    assert second["loaded"] == first["programs"] - 1
    assert second["digest"] == first["digest"]


@pytest.fixture
def untouched_config():
    """Puts JAX's cache settings back as they were."""
    names = (
        "jax_enable_compilation_cache",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: jax.config.values[name] for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_choice_of_folder(tmp_path, monkeypatch, untouched_config):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("JSPEC_CACHE_DIR", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    assert configure_cache().path == str(tmp_path / "xdg/jspec/xla")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    assert configure_cache().path == str(tmp_path / "jax")
    monkeypatch.setenv("JSPEC_CACHE_DIR", str(tmp_path / "env"))
    assert configure_cache().path == str(tmp_path / "env")
    assert configure_cache(tmp_path / "argument").path == str(tmp_path / "argument")
    assert configure_cache("gs://bucket/cache") == CacheReport("gs://bucket/cache", None, None)


def test_folder_without_write_permission_warns(tmp_path, monkeypatch, capsys, untouched_config):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # permissions do not bind root, who may run this
    report = configure_cache(tmp_path)
    assert report.path is None
    assert "Permission denied" in report.reason
    assert jax.config.values["jax_compilation_cache_dir"] is None, "JAX would warn again at every program"
    assert report.reason in capsys.readouterr().err


def test_without_a_home_folder_warns(monkeypatch, capsys, untouched_config):
    def no_home(self):
        raise RuntimeError("Could not determine home directory.")

    for name in ("JSPEC_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert configure_cache().path is None
    assert "~/.cache/jspec/xla" in capsys.readouterr().err


def test_switched_off_by_jax_is_said_not_overruled(tmp_path, untouched_config):
    jax.config.update("jax_enable_compilation_cache", False)
    report = configure_cache(tmp_path / "cache")
    assert report.path is None
    assert "jax_enable_compilation_cache" in str(report)
    assert not (tmp_path / "cache").exists()


def test_counter_counts_programs_not_calls():
    step = jax.jit(lambda x: x * 2)
    small, large = np.ones(3, np.float32), np.ones(5, np.float32)
    with CompileCounter() as whole:
        with CompileCounter() as cold:
            step(small)
        with CompileCounter() as warm:
            for _ in range(3):
                step(small)
        with CompileCounter() as reshaped:
            step(large)
        with CompileCounter() as ahead:
            jax.jit(jnp.cos).lower(small).compile()
        with CompileCounter() as eager:
            jnp.add(jnp.arctan(small), 1)
    step(np.ones(7, np.float32))  # after the block: not counted
    assert [c.programs for c in (cold, warm, reshaped, ahead)] == [1, 0, 1, 1]
    assert eager.programs >= 2
    assert whole.programs == 3 + eager.programs
    assert whole.names[:2] == cold.names + reshaped.names
    assert ahead.names == ["jit(cos)"]
    assert "0 programs" in str(warm)


def test_counter_stops_when_the_block_fails():
    step = jax.jit(lambda x: x - 1)
    with pytest.raises(KeyError), CompileCounter() as counter:
        raise KeyError
    step(np.ones(3, np.float32))
    assert counter.programs == 0
