"""What the parts of the forward pass share: products, norms, activations, caps. All in and out in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.target import products
from jspec.target.products import Products


def linear(x: Array, weight: Array, form: Products | None = None) -> Array:
    """`x [..., in]` times `weight [out, in]`, accumulated and returned in float32 `[..., out]`.

    Args:
      form: how it is laid out; `products.default` if left out.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    y = products.multiply(rows, weight, products.default(weight.dtype) if form is None else form)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def rounded(x: Array, dtype: jnp.dtype) -> Array:
    """Float32 `x` with the digits that `dtype` keeps, still float32.

    A conversion there and back would say the same, and XLA may leave it out: on a GPU it does.
    """
    kept = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=kept.nexp, mantissa_bits=kept.nmant)


def add_bias(x: Array, bias: Array | None) -> Array:
    """`x [..., n]` plus `bias [n]`, or as it is without one."""
    return x if bias is None else x + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, in float32 (Zhang and Sennrich, 2019)."""
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * lax.rsqrt(variance + jnp.float32(eps)) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def gated(gate_up: Array, activation: str) -> Array:
    """`[..., 2 F]` to `[..., F]`: the first half, activated, times the second (Shazeer, 2020)."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)) * up


def capped(x: Array, cap: float | None) -> Array:
    """`x` bent smoothly into -cap .. cap, or as it is without a cap."""
    return x if cap is None else jnp.float32(cap) * jnp.tanh(x / jnp.float32(cap))
