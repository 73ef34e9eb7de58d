"""jspec: speculative decoding in pure JAX, one code path for TPU, GPU and CPU."""

# Short way.
from jspec.api import engine, generate, load, stream

# What requests and engines are made of.
from jspec.decoding.generate import Event, decode
from jspec.decoding.request import Request, Result
from jspec.drafters.base import Drafter, Plain, Proposal, Rows
from jspec.drafters.ngram import NGram
from jspec.engine.config import EngineConfig

# Errors.
from jspec.errors import JspecError

# Targets.
from jspec.target.checkpoint import Checkpoint
from jspec.target.config import TargetConfig

__all__ = [
    "Checkpoint",
    "Drafter",
    "EngineConfig",
    "Event",
    "JspecError",
    "NGram",
    "Plain",
    "Proposal",
    "Request",
    "Result",
    "Rows",
    "TargetConfig",
    "decode",
    "engine",
    "generate",
    "load",
    "stream",
]
