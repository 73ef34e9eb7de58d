"""Log-probabilities of emitted tokens and of their rivals, read from the verify program's own logits.

Two kinds, chosen by each request:

    raw        log softmax of the target's logits, before anything is done to them
    processed  the law that the token was drawn from: after penalties, bias, temperature and filters.
               At temperature 0, where all of it lies on one token, the log softmax of the processed
               logits, as in vLLM

They are programs of their own, run only in rounds in which some slot asks, so that nobody else pays.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.decoding import law
from jspec.decoding.sampling import Sampling

MOST = 20  # rivals that a request may ask for
KINDS = ("raw", "processed")


class Scores(flax.struct.PyTreeNode):
    """Log-probabilities behind each row of a block; `R` is 20, or the vocabulary if that is smaller."""

    chosen: Array  # [B, N] float32, of the emitted token
    rank: Array  # [B, N] int32, 1 for the most likely; tokens of equal probability share the better rank
    ids: Array  # [B, N, R] int32, most likely first, the lower id first where equal
    values: Array  # [B, N, R] float32


def table(settings: Sampling, logits: Array, shaped: Array, processed: Array) -> Array:
    """Log-probabilities of every token behind every row, `[B, N, V]` float32.

    Args:
      settings: of the `B` slots.
      logits: `[B, N, V]` float32, the verify program's.
      shaped: the same behind the processors (`decoding.round.process`).
      processed: `[B]` bool, which kind each slot gets.
    """
    greedy = (settings.temperature == 0)[:, None, None]
    plain = jnp.where(processed[:, None, None], shaped, logits)
    return jnp.where(
        processed[:, None, None] & ~greedy, law.log_law(shaped, settings), jax.nn.log_softmax(plain, axis=-1)
    )


def score(table: Array, tokens: Array) -> Scores:
    """Looks up the emitted `tokens [B, N]` int32 and the most likely ones."""
    chosen = jnp.take_along_axis(table, tokens[..., None], axis=-1)
    values, ids = lax.top_k(table, min(MOST, table.shape[-1]))
    rank = 1 + jnp.sum(table > chosen, axis=-1, dtype=jnp.int32)
    return Scores(chosen=chosen[..., 0], rank=rank, ids=ids.astype(jnp.int32), values=values)
