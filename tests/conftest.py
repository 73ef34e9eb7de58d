"""Settings that must stand before the first test imports JAX, and the strictness of the whole suite."""

import os

# Tests mean the CPU unless told otherwise, also where an accelerator's plugin is installed.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax

# Silent promotion is where bits get lost: bfloat16 + float32, or [B] + [B, N] read as [1, B] + [B, N].
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles, the others do not: a deadline would measure the compiler.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
