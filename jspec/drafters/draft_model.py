"""A smaller model of the same vocabulary as drafter: `K` autoregressive passes of one row each.

The draft model reads every committed row once more than the target (in `observe`), so at the start of
each round its cache holds every committed token but the last, whatever was accepted (known-failures
KV-3), and its own passes work on a copy that is dropped with the round.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jspec.decoding import tree
from jspec.decoding.sampling import Sampling
from jspec.drafters import modes
from jspec.drafters.base import Drafter, Proposal, Rows
from jspec.errors import JspecError
from jspec.target import attention, model
from jspec.target import cache as kv
from jspec.target.cache import KVCache
from jspec.target.checkpoint import Checkpoint
from jspec.target.config import TargetConfig
from jspec.target.model import TargetParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel(Drafter):
    """A draft model; made, with its weights, by `draft_model`."""

    model: TargetConfig
    vocab: int  # V of the target; ids beyond it are never proposed, ids that the draft lacks neither
    mode: str = "coupled"
    key_block: int = 64

    def __post_init__(self) -> None:
        modes.check(self.mode)
        if not isinstance(self.proposals, int) or isinstance(self.proposals, bool) or self.proposals < 1:
            raise JspecError(
                f"the draft model was asked for `{self.proposals!r}` proposals.",
                "a whole number of at least 1.",
                "set `proposals`; for none, decode without a drafter.",
            )

    @property
    def name(self) -> str:
        return f"draft_model_k{self.proposals}"

    @property
    def draws(self) -> bool:
        return self.mode == "sampled"

    def weights(self, target: TargetParams, config: TargetConfig) -> TargetParams:
        raise JspecError(
            f"`{self.name}` was given without its weights.",
            "the pair of drafter and weights that `draft_model` returns.",
            "pass the pair as `drafter=`, or its second part as `weights=`.",
        )

    def init(self, weights: TargetParams, slots: int, capacity: int) -> KVCache:
        held = -(-capacity // self.key_block) * self.key_block
        return kv.init(self.model, slots, held, weights.dtype)

    def observe(self, weights: TargetParams, state: KVCache, rows: Rows) -> KVCache:
        _, cache = self._forward(weights, state, rows.slot, rows.tokens, rows.start)
        held = lax.dynamic_slice_in_dim(state.length, rows.slot, rows.count.shape[0])
        held = jnp.where(rows.count > 0, rows.start + rows.count, held)
        return cache.replace(length=lax.dynamic_update_slice(state.length, held, (rows.slot,)))

    def reset(self, state: KVCache, slot: Array) -> KVCache:
        return state.replace(length=state.length.at[slot].set(0))

    def propose(
        self, weights: TargetParams, state: KVCache, anchor: Array, position: Array, sampling: Sampling
    ) -> Proposal:
        slots = anchor.shape[0]

        def extend(step: Array, carry: tuple[Array, Array, Any, KVCache]) -> tuple[Array, Array, Any, KVCache]:
            last, tokens, law, cache = carry
            at = position + step
            logits, cache = self._forward(weights, cache, jnp.int32(0), last[:, None], at)
            ahead = (at + 1)[:, None]
            chosen, log_q = modes.pick(self.mode, logits, ahead, sampling)
            if log_q is not None:
                law = lax.dynamic_update_slice(law, log_q, (0, step, 0))
            return chosen[:, 0], lax.dynamic_update_slice(tokens, chosen, (0, step)), law, cache

        tokens = jnp.zeros((slots, self.proposals), jnp.int32)
        law = jnp.zeros((slots, self.proposals, self.vocab), jnp.float32) if self.draws else None
        _, tokens, law, _ = lax.fori_loop(0, self.proposals, extend, (anchor, tokens, law, state))
        return Proposal(tokens=tokens, count=jnp.full((slots,), self.proposals, jnp.int32), log_q=law)

    def _forward(
        self, weights: TargetParams, cache: KVCache, slot: Array, tokens: Array, start: Array
    ) -> tuple[Array, KVCache]:
        """A chain of rows `tokens [R, N]` from positions `start [R]` on: logits `[R, N, V]` and the cache.

        A token that the draft model lacks is read as its token 0: a poor context, no fault.
        """
        count, width = tokens.shape
        tokens = jnp.where((tokens >= 0) & (tokens < self.model.vocab_size), tokens, 0)
        bits = jnp.broadcast_to(jnp.asarray(tree.chain_bits(width)), (count, width, tree.words(width)))
        columns = attention.columns(slot, start, bits, cache.capacity, self.key_block)
        positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        hidden, _, _, cache = model.forward(weights, self.model, cache, tokens, positions, columns)
        logits = model.logits(weights, hidden)
        if self.model.vocab_size > self.vocab:
            return logits[..., : self.vocab], cache
        missing = self.vocab - self.model.vocab_size
        return jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf), cache


def draft_model(
    draft: Checkpoint, target: Checkpoint, *, proposals: int = 4, mode: str = "coupled"
) -> tuple[DraftModel, TargetParams]:
    """Makes a drafter of a checkpoint, for a target with the same tokenizer.

    A draft vocabulary that is padded further than the target's, or less far, is handled; one whose
    tokens mean something else is refused.

    Args:
      proposals: K, tokens drafted a round.
      mode: `greedy`, `coupled` or `sampled` (`drafters/modes.py`).

    Returns:
      the drafter and its weights, as `drafter=` of `jspec.generate` takes them.

    Raises:
      JspecError: the tokenizers differ, with the first token in which they do.
    """
    shared = min(draft.tokenizer.vocab_size, target.tokenizer.vocab_size)
    for token in range(shared):
        ours, theirs = target.tokenizer.token_bytes(token), draft.tokenizer.token_bytes(token)
        if ours != theirs:
            raise JspecError(
                f"the draft model `{draft.name}` has another vocabulary than the target `{target.name}`: "
                f"token {token} is `{theirs!r}` there and `{ours!r}` here.",
                "a draft model with the target's own tokenizer.",
                "choose a smaller model of the same family.",
            )
    made = DraftModel(proposals=proposals, model=draft.config, vocab=target.config.vocab_size, mode=mode)
    return made, draft.params
