"""Products of training: operands in bfloat16, sums and gradients in float32, over float32 master weights.

JAX's own derivative of such a product would round the gradient to the operands' dtype, and so lose the small updates
that master weights are kept for. Here the gradient of a weight is float32 like the weight itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

# a [..., M, K] and b [..., N, K] to [..., M, N] float32
Contract = Callable[[Array, Array], Array]


def contraction(dtype: jnp.dtype) -> Contract:
    """`a [..., M, K]` times `b [..., N, K]` over K, operands rounded to `dtype`, sums and gradients in float32."""
    return partial(_contract, jnp.dtype(dtype))


def linear(contract: Contract, x: Array, weight: Array) -> Array:
    """`x [..., in]` times `weight [out, in]` to `[..., out]` float32, as `primitives.linear`."""
    rows = contract(x.reshape(-1, x.shape[-1]), weight)
    return rows.reshape(*x.shape[:-1], weight.shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(dtype: jnp.dtype, a: Array, b: Array) -> Array:
    return _dot(dtype, a, b, -1, -1)


def _forward(dtype: jnp.dtype, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return _contract(dtype, a, b), (a, b)


def _backward(dtype: jnp.dtype, kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    a, b = kept
    da, db = _dot(dtype, g, b, -1, -2), _dot(dtype, g, a, -2, -2)
    return da.astype(a.dtype), db.astype(b.dtype)


_contract.defvjp(_forward, _backward)


def _dot(dtype: jnp.dtype, a: Array, b: Array, along_a: int, along_b: int) -> Array:
    batch = tuple(range(a.ndim - 2))
    dims = (((a.ndim + along_a,), (b.ndim + along_b,)), (batch, batch))
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return lax.dot_general(
        a.astype(dtype), b.astype(dtype), dims, precision=precision, preferred_element_type=jnp.float32
    )
