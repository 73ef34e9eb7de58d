"""Settings that must stand before the first array, and the strictness of the whole suite."""

import os
from collections.abc import Iterator
from pathlib import Path

# Tests mean the CPU unless told otherwise, also where an accelerator's plugin is installed.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

from jspec.startup import configure_cache

# Silent promotion is where bits get lost: bfloat16 + float32, or [B] + [B, N] read as [1, B] + [B, N].
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling is most of a run; the second run reads its programs from the checkout. They give the same bits.
configure_cache(Path(__file__).parent.parent / ".cache" / "xla")

# The first example of a property compiles, the others do not: a deadline would measure the compiler.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True, scope="module")
def programs_are_dropped() -> Iterator[None]:
    """Every compiled program holds memory maps of its own, and Linux allows a process 65,530 of them: beyond that
    the compiler ends the process with a segmentation fault. What another module needs again comes from the files."""
    yield
    jax.clear_caches()
