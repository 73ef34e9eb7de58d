"""True acceptance: held-out prompts are decoded with the drafter as it stands, beside what was told from their texts.

Decoding rounds the drafter's weights to the target's dtype and runs other programs than training does, so this is
also the check that nothing was lost on the way (drafters.md 13.4, on the whole).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jspec.decoding.generate import generate
from jspec.decoding.request import Request
from jspec.drafters.block import weights as block
from jspec.drafters.block.config import BlockConfig
from jspec.drafters.block.drafter import BlockDrafter
from jspec.drafters.block.weights import BlockParams
from jspec.engine.config import EngineConfig
from jspec.target.checkpoint import Checkpoint
from jspec.training.evaluate import Walk
from jspec.training.texts import Text

SLOTS = 8


def walk(
    config: BlockConfig,
    params: BlockParams,
    ids: np.ndarray | None,
    target: Checkpoint,
    texts: Sequence[Text],
    proposals: int,
    max_length: int,
) -> Walk:
    """Decodes the last answer of each text anew, greedily, and counts as `evaluate.walk` does.

    Args:
      ids: the tokens of the draft vocabulary.
      max_length: of the engine; no text may be longer.

    Returns:
      rounds and tokens; `accepted` holds the sum over all places alone.
    """
    cast = jax.tree.map(lambda x: x.astype(target.params.dtype) if x.ndim > 1 else x, params)
    lent = block.lend(config, cast, ids, target.params, target.config)
    engine = EngineConfig(
        target=target.config,
        slots=min(SLOTS, len(texts)),
        rows=proposals + 1,
        max_length=max_length,
        taps=config.taps,
    )
    requests = [
        Request(
            prompt=tuple(text.tokens[:start].tolist()),
            max_tokens=end - start,
            temperature=0.0,
            end_ids=target.end_ids,
        )
        for text in texts
        for start, end in text.answers[-1:]
    ]
    drafter = BlockDrafter(config=config, proposals=proposals, mode="greedy")
    results = generate(engine, target.params, requests, drafter=drafter, weights=lent)
    return Walk(
        rounds=sum(result.rounds for result in results),
        tokens=sum(len(result.tokens) for result in results),
        accepted=(sum(result.accepted for result in results),),
    )
