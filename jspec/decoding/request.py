"""`Request` and `Result`: one text to continue, and what came of it."""

from __future__ import annotations

import dataclasses
import math
import secrets

import jax.numpy as jnp
import numpy as np

from jspec.decoding.sampling import Sampling, seed_words
from jspec.decoding.state import END_IDS
from jspec.engine.config import EngineConfig
from jspec.engine.static import Admission
from jspec.errors import JspecError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    `temperature` 0 is greedy and nothing else is: a tiny temperature is sampled. `seed` may be any
    whole number from 0 to 2**64 - 1; when left out one is drawn, and `Result.seed` records it.
    """

    prompt: tuple[int, ...]  # token ids, at least one
    max_tokens: int = 256  # capped by the room the engine has left
    temperature: float = 1.0
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    seed: int | None = None
    choice_index: int = 0  # which of several answers to the same prompt and seed
    end_ids: tuple[int, ...] = ()  # at most END_IDS; an emitted one ends the text and is kept

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 1e6)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_whole("top_k", self.top_k, 0, 2**31 - 1)
        _check_whole("choice_index", self.choice_index, 0, 2**31 - 1)
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, 2**64 - 1)
        if len(self.end_ids) > END_IDS:
            raise JspecError(
                f"`end_ids` has `{len(self.end_ids)}` entries.",
                f"at most {END_IDS}.",
                "name fewer end tokens.",
            )
        if len(self.prompt) == 0:
            raise JspecError(
                "the prompt has no token.",
                "at least one token; the first output token follows the last of them.",
                "put a beginning-of-text token or any text into the prompt.",
            )

    def with_seed(self) -> Request:
        """The same request with a seed, drawn from the operating system if it had none."""
        return self if self.seed is not None else dataclasses.replace(self, seed=secrets.randbits(64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a request."""

    tokens: tuple[int, ...]
    finish: str  # "stop", "length" or "error"
    error: str | None  # why, when `finish` is "error"
    seed: int  # used if temperature > 0
    max_tokens: int  # after capping
    rounds: int
    proposed: int  # drafted tokens that were verified
    accepted: int  # of them accepted


def admission(config: EngineConfig, request: Request, slot: int) -> Admission:
    """The request as arrays of one slot; checks that it fits the engine first.

    Raises:
      JspecError: a prompt or id that the engine cannot take. Too large a `max_tokens` is capped.
    """
    check(config, request)
    assert request.seed is not None, "a request gets its seed before it is admitted"
    length = len(request.prompt)
    ends = np.full((END_IDS,), -1, np.int32)
    ends[: len(request.end_ids)] = request.end_ids
    sampling = Sampling(
        temperature=jnp.asarray([request.temperature], jnp.float32),
        top_k=jnp.asarray([request.top_k], jnp.int32),
        top_p=jnp.asarray([request.top_p], jnp.float32),
        min_p=jnp.asarray([request.min_p], jnp.float32),
        seed=jnp.asarray(seed_words(request.seed)[None]),
        choice_index=jnp.asarray([request.choice_index], jnp.int32),
    )
    return Admission(
        slot=jnp.int32(slot),
        anchor=jnp.int32(request.prompt[-1]),
        length=jnp.int32(length),
        limit=jnp.int32(length + capped(config, request)),
        end_ids=jnp.asarray(ends),
        sampling=sampling,
    )


def capped(config: EngineConfig, request: Request) -> int:
    """`max_tokens` as the engine's `max_length` allows it."""
    return min(request.max_tokens, config.max_length - len(request.prompt))


def check(config: EngineConfig, request: Request) -> None:
    """Refuses what the engine cannot take, before anything of it is touched."""
    if len(request.prompt) >= config.max_length:
        raise JspecError(
            f"the prompt has `{len(request.prompt)}` tokens.",
            f"at most {config.max_length - 1}: the engine holds {config.max_length} tokens of prompt and output.",
            "shorten the prompt, or build the engine with a larger `max_length`.",
        )
    vocab = config.target.vocab_size
    for name, ids in (("prompt", request.prompt), ("end_ids", request.end_ids)):
        for place, token in enumerate(ids):
            if not isinstance(token, (int, np.integer)) or isinstance(token, bool) or not 0 <= token < vocab:
                raise JspecError(
                    f"`{name}[{place}]` is `{token!r}`.",
                    f"token ids from 0 to {vocab - 1}.",
                    "tokenize with the target's own tokenizer.",
                )


def _check_number(name: str, value: float, low: float, high: float) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:
        raise JspecError(f"`{name}` is `{value!r}`.", f"a number from {low:g} to {high:g}.", f"correct `{name}`.")


def _check_whole(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not low <= value <= high:
        raise JspecError(f"`{name}` is `{value!r}`.", f"a whole number from {low} to {high}.", f"correct `{name}`.")
