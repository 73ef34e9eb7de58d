"""One step of training: gradients of one or more batches, summed, and what they change.

Losses are quotients of sums over the tokens that count, whose number varies from batch to batch; so batches add up
their sums and their gradients, and the division comes last, over all of them (drafters.md 9.5).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jspec.drafters.block.config import BlockConfig
from jspec.drafters.block.weights import BlockParams, BlockWeights
from jspec.training import objective, products
from jspec.training.forward import Batch
from jspec.training.objective import Objective, Sums
from jspec.training.optimizer import Optimizer


class State(flax.struct.PyTreeNode):
    """All that changes in training."""

    step: Array  # [] int32, optimizer steps done
    params: BlockParams  # float32 masters
    moments: Any  # of optax
    average: BlockParams | None


class Change(flax.struct.PyTreeNode):
    """What a step did."""

    norm: Array  # [] float32, of the gradient before the clip
    rate: Array  # [] float32
    finite: Array  # [leaves of params] bool, of gradients and of the new weights


def start(optimizer: Optimizer, params: BlockParams) -> State:
    """A state before its first step. Weights become float32."""
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    average = jax.tree.map(jnp.array, params) if optimizer.average else None
    moments = optimizer.transform().init(params)
    return State(step=jnp.zeros((), jnp.int32), params=params, moments=moments, average=average)


@partial(jax.jit, static_argnums=(0, 1, 2))
def gradient(
    config: BlockConfig,
    goal: Objective,
    dtype: str,
    params: BlockParams,
    lent: BlockWeights,
    batch: Batch,
    gamma: Array,
) -> tuple[BlockParams, Sums]:
    """Gradient of the summed loss of a batch, and its sums.

    Args:
      dtype: of the operands of products.
      lent: whose `params` are not read.
    """

    def loss(params: BlockParams) -> tuple[Array, Sums]:
        weights = lent.replace(params=params)
        sums = objective.evaluate(config, weights, batch, goal, gamma, products.contraction(jnp.dtype(dtype)))
        return sums.loss, sums

    grads, sums = jax.grad(loss, has_aux=True)(params)
    return grads, sums


@partial(jax.jit, donate_argnums=(0,))
def add(one: Any, other: Any) -> Any:
    """Sums of two batches."""
    return jax.tree.map(jnp.add, one, other)


@partial(jax.jit, static_argnums=(0,), donate_argnums=(1,))
def apply(optimizer: Optimizer, state: State, grads: BlockParams, weight: Array) -> tuple[State, Change]:
    """Takes the step, unless a gradient or a new weight is not finite: then the state stays as it was.

    Args:
      weight: by which the gradients are divided.
    """
    grads = jax.tree.map(lambda g: g / jnp.maximum(weight, 1e-6), grads)
    with jax.numpy_dtype_promotion("standard"):  # optax raises float32 to the power of an int32
        updates, moments = optimizer.transform().update(grads, state.moments, state.params)
    params = optax.apply_updates(state.params, updates)
    finite = jnp.stack(
        [
            jnp.all(jnp.isfinite(g)) & jnp.all(jnp.isfinite(p))
            for g, p in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)
        ]
    )
    average = state.average
    if average is not None:
        # The average begins with the first steps' own weights, not with those drawn at random.
        count = state.step.astype(jnp.float32)
        keep = jnp.minimum(jnp.float32(optimizer.average), (1.0 + count) / (10.0 + count))
        average = jax.tree.map(lambda a, p: keep * a + (1.0 - keep) * p, average, params)
    norm = jnp.sqrt(sum((jnp.sum(g * g) for g in jax.tree.leaves(grads)), start=jnp.float32(0.0)))
    change = Change(norm=norm, rate=optimizer.schedule(state.step), finite=finite)
    new = State(step=state.step + 1, params=params, moments=moments, average=average)
    good = jnp.all(finite)
    return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, state), change


def broken(params: BlockParams, change: Change) -> list[str]:
    """Names of the tensors whose gradient or new value was not finite."""
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    return [name for name, good in zip(names, np.asarray(change.finite), strict=True) if not good]
