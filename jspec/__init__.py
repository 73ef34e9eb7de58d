"""jspec: speculative decoding in pure JAX, one code path for TPU, GPU and CPU."""

# Short way.
from jspec.answers import Acceptance, Answer, Chunk, Usage
from jspec.api import engine, generate, load, stream, stream_async, stream_batch

# What requests and engines are made of.
from jspec.decoding.generate import Event, decode, warm_up
from jspec.decoding.request import Request, Result, TokenLogprob
from jspec.drafters.base import Drafter, Plain, Proposal, Rows
from jspec.drafters.draft_model import DraftModel, draft_model
from jspec.drafters.ngram import NGram
from jspec.engine.config import EngineConfig

# Errors.
from jspec.errors import JspecError

# The pure layer, for loops of one's own.
from jspec.pure import DecodeState, RoundInfo, admission, init, prefill, round, start

# Targets.
from jspec.target.checkpoint import Checkpoint
from jspec.target.config import TargetConfig

__all__ = [
    "Acceptance",
    "Answer",
    "Checkpoint",
    "Chunk",
    "DecodeState",
    "DraftModel",
    "Drafter",
    "EngineConfig",
    "Event",
    "JspecError",
    "NGram",
    "Plain",
    "Proposal",
    "Request",
    "Result",
    "RoundInfo",
    "Rows",
    "TargetConfig",
    "TokenLogprob",
    "Usage",
    "admission",
    "decode",
    "draft_model",
    "engine",
    "generate",
    "init",
    "load",
    "prefill",
    "round",
    "start",
    "stream",
    "stream_async",
    "stream_batch",
    "warm_up",
]
