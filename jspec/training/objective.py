"""What training minimises: a mix of terms, averaged over the tokens that count (drafters.md 3.6 and 4.4)."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax.numpy as jnp
import optax
from jax import Array

from jspec.errors import JspecError
from jspec.training import forward, losses, students
from jspec.training.forward import Batch, Config, Weights
from jspec.training.products import Contract

WEIGHTINGS = ("decay", "path")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """How much each term counts. DFlash: `entropy` alone; DSpark: 0.1, variation 1.8, confidence 1; EAGLE-3: entropy 0,
    divergence 1, `per_text`, and a gamma of 4.48 for its decay by 0.8 a step (DeepSpec).

    Args:
      entropy: cross entropy against the text's token.
      variation: total variation from the target, half of the L1 distance that DSpark's paper counts 0.9.
      divergence: Kullback-Leibler divergence from the target, over the draft vocabulary.
      confidence: of the confidence head against the probability of acceptance.
      weighting: `decay` by `exp(-j / gamma)`, or `path` (D-PACE, `losses.path_weights`).
      gamma: of the decay at the first epoch.
      growth: added to gamma with every epoch (DFlare).
      per_text: each text counts alike: its sum is divided by its length, not by the number of tokens that count,
        under which long texts decide (drafters.md 12, pitfall 44).
    """

    entropy: float = 1.0
    variation: float = 0.0
    divergence: float = 0.0
    confidence: float = 0.0
    weighting: str = "decay"
    gamma: float = 4.0
    growth: float = 0.0
    per_text: bool = False

    def __post_init__(self) -> None:
        for name in ("entropy", "variation", "divergence", "confidence", "growth"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e6:
                raise JspecError(f"`{name}` of the objective is `{value!r}`.", "a number of at least 0.", "correct it.")
        if not self.entropy + self.variation + self.divergence > 0:
            raise JspecError(
                "the objective has no term that teaches drafting.",
                "`entropy`, `variation` or `divergence` above 0.",
                "set one of them.",
            )
        if self.weighting not in WEIGHTINGS:
            raise JspecError(
                f"`weighting` of the objective is `{self.weighting!r}`.", ", ".join(WEIGHTINGS) + ".", "choose one."
            )
        if not isinstance(self.gamma, int | float) or not 0 < self.gamma < 1e6:
            raise JspecError(f"`gamma` of the objective is `{self.gamma!r}`.", "a number above 0.", "correct it.")


class Sums(flax.struct.PyTreeNode):
    """Sums over the tokens of a batch; batches add up, and the quotients are what is reported."""

    loss: Array  # [] float32, weighted terms
    weight: Array  # [] float32, weights, or texts where each counts alike
    entropy: Array  # [] float32, unweighted
    counted: Array  # [K] float32, tokens that count, by place in the block
    right: Array  # [K] float32, of these, the drafter's best token is the text's
    kept: Array  # [K] float32, sum of overlaps with the target


def evaluate(
    config: Config, weights: Weights, batch: Batch, objective: Objective, gamma: Array, contract: Contract
) -> Sums:
    """The terms of a batch. The gradient of `loss` over the `weight` of all batches is the step's."""
    said = students.drafts(config, weights, batch, contract)
    wanted = forward.labels(config, weights, batch, contract)
    counted = wanted.counted
    entropy = optax.losses.softmax_cross_entropy_with_integer_labels(said.logits, wanted.columns)
    kept = losses.overlap(said.logits, wanted.log_p)
    if objective.weighting == "path":
        weight = losses.path_weights(entropy, counted)
    else:
        weight = jnp.where(counted, losses.decay(config.longest, gamma).reshape(1, 1, -1), 0.0)
    total = jnp.sum(weight)
    if objective.per_text:
        share, texts = losses.text_shares(batch.document, jnp.maximum(batch.anchors, 0))
        weight, total = weight * share[..., None], texts
    terms = objective.entropy * entropy
    if objective.variation:
        terms = terms + objective.variation * (1.0 - kept)
    if objective.divergence:
        terms = terms + objective.divergence * losses.divergence(said.logits, wanted.log_p)
    if objective.confidence and said.sure is not None:
        terms = terms + objective.confidence * losses.confidence_error(said.sure, kept)

    def per_place(x: Array) -> Array:
        return jnp.sum(jnp.where(counted, x, 0.0), axis=(0, 1))

    return Sums(
        loss=jnp.sum(jnp.where(weight > 0, terms, 0.0) * weight),
        weight=total,
        entropy=jnp.sum(per_place(entropy)),
        counted=per_place(jnp.ones_like(kept)),
        right=per_place((jnp.argmax(said.logits, axis=-1) == wanted.columns).astype(jnp.float32)),
        kept=per_place(kept),
    )
