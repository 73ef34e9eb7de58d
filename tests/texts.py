"""Texts of a few tokens, counted over very many seeds: the joint law of what an engine writes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decoding import state as states
from jspec.drafters.base import Drafter
from jspec.engine import static
from jspec.engine.config import EngineConfig
from jspec.target.model import TargetParams

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@functools.partial(jax.jit, static_argnums=3)
def _begin(state: states.DecodeState, first: Any, setting: dict[str, Any], tokens: int) -> states.DecodeState:
    """All slots at a prompt of the one token 0, each with a seed of its own from `first` on."""
    one = jnp.ones_like(state.length)
    low = first + jnp.arange(len(one), dtype=jnp.uint32)
    return state.replace(
        cache=state.cache.replace(length=one - 1),
        anchor=one - 1,
        length=one,
        limit=one + tokens,
        finish=jnp.full_like(one, states.RUNNING),
        sampling=state.sampling.replace(
            **{name: jnp.full(one.shape, value) for name, value in setting.items()},
            seed=jnp.stack([low, jnp.full_like(low, 77)], axis=1),
        ),
        seen=jax.tree.map(jnp.zeros_like, state.seen),
    )


def count(
    engine: EngineConfig,
    drafter: Drafter,
    params: TargetParams,
    lent: Any,
    *,
    tokens: int,
    batches: int,
    rule: str = "choice",
    **setting: float,
) -> tuple[np.ndarray, float]:
    """Counts of every text, `tokens` axes of length V, and the share of proposals that were accepted."""
    kinds = {"top_k": np.int32}
    given = {name: kinds.get(name, np.float32)(value) for name, value in (OFF | setting).items()}
    state = static.init(engine, drafter, params, lent)
    counts, proposed, accepted = np.zeros((engine.target.vocab_size,) * tokens, int), 0, 0
    for batch in range(batches):
        state = _begin(state, np.uint32(batch * engine.slots), given, tokens)
        text, held = np.zeros((engine.slots, tokens), int), np.zeros((engine.slots,), int)
        while (held < tokens).any():
            state, info = static.step(engine, drafter, params, lent, state, rule=rule)
            info = jax.device_get(info)
            assert not (info.finish >= states.ERROR).any()
            for row in range(tokens):
                fresh = row < info.count
                text[fresh, held[fresh] + row] = info.tokens[fresh, row]
            held += info.count
            proposed, accepted = proposed + info.proposed.sum(), accepted + info.accepted.sum()
        np.add.at(counts, tuple(text.T), 1)
    return counts, accepted / max(proposed, 1)
