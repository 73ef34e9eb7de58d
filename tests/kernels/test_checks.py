"""The static checks find what they look for: each is shown a program with the fault and one without."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import checks

CACHE = jax.ShapeDtypeStruct((4, 2, 1024, 64), jnp.float32)  # 2 MiB
ROWS = jax.ShapeDtypeStruct((4, 2, 8, 64), jnp.float32)
START = jax.ShapeDtypeStruct((4,), jnp.int32)
ELEMENTS = 4 * 2 * 1024 * 64


def built(program, *args, **options):
    """Lowered and compiled."""
    lowered = jax.jit(program, **options).lower(*args)
    return lowered, lowered.compile()


def sliced(cache, rows, start):
    """The right update: one slice a slot."""
    for r in range(4):
        cache = lax.dynamic_update_slice(cache, rows[r : r + 1], (r, 0, start[r], 0))
    return cache


def batched(cache, rows, start):
    """The fault: a batched update, which becomes a scatter."""
    return jax.vmap(lambda c, r, s: lax.dynamic_update_slice(c, r, (0, s, 0)))(cache, rows, start)


def test_inexact_products():
    x, w = jnp.ones((8, 64)), jnp.ones((64, 64))
    exact, _ = built(lambda x, w: jnp.dot(x, w, precision="highest"), x, w)
    quick, _ = built(jnp.dot, x, w)
    half, _ = built(
        lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32), x.astype("bfloat16"), w.astype("bfloat16")
    )
    assert len(checks.inexact_dots(quick.as_text())) == 1
    assert checks.inexact_dots(exact.as_text()) == checks.inexact_dots(half.as_text()) == []


def test_copies_of_a_cache():
    _, moved = built(lambda c: jnp.swapaxes(c, 1, 2) + 0, CACHE)
    _, kept = built(lambda c: c + 1, CACHE)
    assert checks.large_copies(moved.as_text()) and not checks.large_copies(kept.as_text())


def test_donation():
    _, given = built(sliced, CACHE, ROWS, START, donate_argnums=0)
    _, lent = built(sliced, CACHE, ROWS, START)
    assert not checks.missing_donation(given, 4 * ELEMENTS)
    assert checks.missing_donation(lent, 4 * ELEMENTS)
    assert checks.large_copies(lent.as_text()) and not checks.large_copies(given.as_text())


def test_scatters():
    # As lowered text is turned into HLO, before a backend expands the scatter into a loop of its own.
    right, fault = (jax.jit(f).lower(CACHE, ROWS, START).as_text("hlo") for f in (sliced, batched))
    assert checks.scatters(fault, ELEMENTS) and not checks.scatters(right, ELEMENTS)


def test_sorts_over_the_vocabulary():
    logits = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
    _, fault = built(lambda x: jnp.sort(x, axis=-1), logits)
    _, right = built(lambda x: jnp.max(x, axis=-1), logits)
    assert checks.sorts(fault.as_text(), 4096) and not checks.sorts(right.as_text(), 4096)
