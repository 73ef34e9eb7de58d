"""`Checkpoint`: what every reader of model files returns."""

from __future__ import annotations

import dataclasses

from jspec.target.config import TargetConfig
from jspec.target.model import TargetParams
from jspec.target.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A target ready to run, and where it came from."""

    config: TargetConfig
    params: TargetParams
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]  # ids that end an answer, each inside the vocabulary; may be empty
    name: str
    fingerprint: str  # SHA-256 hex digest over the header and a sample of the weights: tells files apart
    license: str | None  # as the file states it
    source: str  # the file that was read
    dtype_rule: str  # the dtype of the linear weights, and what decided it
    notes: tuple[str, ...] = ()  # what the reader left aside or decided by itself, a line each
