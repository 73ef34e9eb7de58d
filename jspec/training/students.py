"""What each kind of drafter says about a batch."""

from __future__ import annotations

from jspec.drafters.eagle3.config import EagleConfig
from jspec.drafters.eagle3.weights import EagleWeights
from jspec.training import forward, unrolled
from jspec.training.forward import Batch, Config, Drafts, Weights
from jspec.training.products import Contract


def drafts(config: Config, weights: Weights, batch: Batch, contract: Contract) -> Drafts:
    """The logits behind every anchor, drafts before them being the text's own tokens."""
    if isinstance(config, EagleConfig):
        assert isinstance(weights, EagleWeights)
        return unrolled.drafts(config, weights, batch, contract)
    assert not isinstance(weights, EagleWeights)
    return forward.drafts(config, weights, batch, contract)
