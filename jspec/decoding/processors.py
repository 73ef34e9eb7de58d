"""Processors: what the text so far does to the logits, before temperature and filters.

In this order, which is that of transformers' processors of the same effect:

    bias        logits[id] + value                                       for the ids that are named
    repetition  logits / r where positive, logits * r where negative     tokens of prompt and output
    frequency   logits - f * (times in the output)
    presence    logits - p                                               tokens of the output
    minimum     -inf at end tokens while fewer than `min_tokens` are out

The repetition penalty is that of CTRL (Keskar et al., 2019, section 4.1), the other two those of
OpenAI's API. Row j of a block counts the committed text plus the tokens on its own path, so a row
sees what plain decoding would have seen at its position, whatever was proposed beside it.

Settings and counts are arrays over slots. A batch in which no running slot asks for anything skips
the work at run time; a slot that asks for nothing keeps its logits bit for bit beside one that does.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import Array, lax

from jspec.decoding.tree import Block

BIASES = 256  # tokens that a request may bias


class Processors(flax.struct.PyTreeNode):
    """Settings of `B` slots."""

    repetition: Array  # [B] float32, 1 is off
    frequency: Array  # [B] float32, 0 is off
    presence: Array  # [B] float32, 0 is off
    min_length: Array  # [B] int32, text length (prompt included) from which an end token may follow
    bias_ids: Array  # [B, M] int32, -1 where unused
    bias_values: Array  # [B, M] float32, 0 where unused


class Occurrences(flax.struct.PyTreeNode):
    """Which tokens the text of each slot holds."""

    prompt: Array  # [B, V] bool; kept only where a repetition penalty reads it
    output: Array  # [B, V] int32, times each token was emitted


def off(slots: int) -> Processors:
    """Settings that change nothing."""
    return Processors(
        repetition=jnp.ones((slots,), jnp.float32),
        frequency=jnp.zeros((slots,), jnp.float32),
        presence=jnp.zeros((slots,), jnp.float32),
        min_length=jnp.zeros((slots,), jnp.int32),
        bias_ids=jnp.full((slots, BIASES), -1, jnp.int32),
        bias_values=jnp.zeros((slots, BIASES), jnp.float32),
    )


def nothing(slots: int, vocab: int) -> Occurrences:
    """The counts of empty slots."""
    return Occurrences(prompt=jnp.zeros((slots, vocab), bool), output=jnp.zeros((slots, vocab), jnp.int32))


def count(seen: Occurrences, tokens: Array, emitted: Array) -> Occurrences:
    """Adds `tokens [B, N]` int32, of each slot the first `emitted [B]`."""
    slots, rows = tokens.shape
    fresh = jnp.arange(rows, dtype=jnp.int32)[None] < emitted[:, None]
    return seen.replace(output=seen.output.at[_rows(slots), tokens].add(fresh.astype(jnp.int32), mode="drop"))


def apply(
    logits: Array, block: Block, length: Array, end_ids: Array, running: Array, settings: Processors, seen: Occurrences
) -> Array:
    """Processed logits, `[B, N, V]` float32.

    Args:
      logits: `[B, N, V]` float32, as the target gave them.
      block: the rows they belong to; row 0 is committed and already counted.
      length: `[B]` int32, committed tokens, so that row j chooses the token at `length + depth[j]`.
      end_ids: `[B, E]` int32, -1 where unused.
      running: `[B]` bool; the others' logits are returned as they are.
    """
    wanted = running & (
        (settings.repetition != 1)
        | (settings.frequency != 0)
        | (settings.presence != 0)
        | jnp.any(settings.bias_values != 0, axis=-1)
        | (length < settings.min_length)
    )
    return lax.cond(
        jnp.any(wanted),
        lambda: jnp.where(wanted[:, None, None], _processed(logits, block, length, end_ids, settings, seen), logits),
        lambda: logits,
    )


def _processed(
    logits: Array, block: Block, length: Array, end_ids: Array, settings: Processors, seen: Occurrences
) -> Array:
    slots, rows, vocab = logits.shape
    slot = _rows(slots)

    def wide(setting: Array) -> Array:
        return setting[:, None, None]

    # An id of -1 must not wrap around to the last token: it is sent out of range and dropped.
    ids = jnp.where(settings.bias_ids < 0, vocab, settings.bias_ids)
    bias = jnp.zeros((slots, vocab), jnp.float32).at[slot, ids].add(settings.bias_values, mode="drop")
    x = logits + bias[:, None]

    # counts[b, j, v]: committed output, and the rows from 1 to j on j's path.
    row = jnp.arange(rows, dtype=jnp.uint32)
    path = (block.ancestors[:, :, row >> 5] >> (row & 31)[None, None]) & jnp.uint32(1)  # [B, N, N]
    path = jnp.where(block.valid[:, None, :], path, 0).at[:, :, 0].set(0).astype(jnp.int32)
    shape = (slots, rows, rows)
    index = lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)
    tokens = jnp.broadcast_to(block.tokens[:, None], shape)
    tokens = jnp.where(tokens < 0, vocab, tokens)
    counts = jnp.broadcast_to(seen.output[:, None], logits.shape).at[*index, tokens].add(path, mode="drop")

    r = wide(settings.repetition)
    x = jnp.where((counts > 0) | seen.prompt[:, None], jnp.where(x > 0, x / r, x * r), x)
    x = x - wide(settings.frequency) * counts.astype(jnp.float32)
    x = x - jnp.where(counts > 0, wide(settings.presence), 0.0)

    ends = jnp.zeros((slots, vocab), bool).at[slot, jnp.where(end_ids < 0, vocab, end_ids)].set(True, mode="drop")
    early = length[:, None] + block.depth < settings.min_length[:, None]
    return jnp.where(early[..., None] & ends[:, None], -jnp.inf, x)


def _rows(slots: int) -> Array:
    return jnp.arange(slots, dtype=jnp.int32)[:, None]
