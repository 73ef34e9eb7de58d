"""`Request` and `Result`: one text to continue, and what came of it."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.decoding import logprobs
from jspec.decoding.processors import BIASES, Processors
from jspec.decoding.sampling import Sampling, seed_words
from jspec.decoding.state import END_IDS
from jspec.engine.config import EngineConfig
from jspec.engine.static import Admission
from jspec.errors import JspecError

STOPS, STOP_LENGTH = 64, 1024  # stop strings of a request, and characters of each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    `temperature` 0 is greedy and nothing else is: a tiny temperature is sampled. `seed` may be any
    whole number from 0 to 2**64 - 1; when left out one is drawn, and `Result.seed` records it. What
    the penalties do: `decoding/processors.py`; stop strings: `decoding/stops.py`; log-probabilities:
    `decoding/logprobs.py`. Every setting holds for every token, drafted or not.

    Raises:
      JspecError: a setting of the wrong type or out of range, or two that contradict each other.
    """

    prompt: tuple[int, ...]  # token ids, at least one
    max_tokens: int = 256  # capped by the room the engine has left
    min_tokens: int = 0  # no end token or stop string ends the text before so many are out
    temperature: float = 1.0
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off; of tokens in prompt and output
    presence_penalty: float = 0.0  # 0 is off; of tokens in the output
    frequency_penalty: float = 0.0  # 0 is off; of tokens in the output, for each time
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)  # at most BIASES ids
    seed: int | None = None
    choice_index: int = 0  # which of several answers to the same prompt and seed
    end_ids: tuple[int, ...] = ()  # at most END_IDS; an emitted one ends the text and is kept
    ignore_eos: bool = False  # go on behind `end_ids`
    stop: tuple[str, ...] = ()  # strings that end the text
    include_stop: bool = False  # keep the stop string in the text
    logprobs: int | None = None  # rivals to report with each token, 0 for the token's own; None is off
    logprobs_kind: str = "raw"  # or "processed"

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 1e6)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_whole("top_k", self.top_k, 0, 2**31 - 1)
        _check_whole("choice_index", self.choice_index, 0, 2**31 - 1)
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, logprobs.MOST)
        _check_flag("ignore_eos", self.ignore_eos)
        _check_flag("include_stop", self.include_stop)
        if self.logprobs_kind not in logprobs.KINDS:
            raise JspecError(
                f"`logprobs_kind` is `{self.logprobs_kind!r}`.",
                '"raw", of the target\'s own logits, or "processed", of the law that was drawn from.',
                "choose one of the two.",
            )
        if self.min_tokens > self.max_tokens:
            raise JspecError(
                f"`min_tokens` is `{self.min_tokens}` and `max_tokens` is `{self.max_tokens}`.",
                "min_tokens <= max_tokens.",
                "lower `min_tokens` or raise `max_tokens`.",
            )
        self._check_collections()

    def _check_collections(self) -> None:
        for name, kind in (("prompt", "token ids"), ("end_ids", "token ids"), ("stop", "strings")):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)):
                raise JspecError(
                    f"`{name}` is `{_short(value)}`.", f"a tuple of {kind}.", f"put `{name}` into a tuple."
                )
            object.__setattr__(self, name, tuple(value))
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
        if len(self.stop) > STOPS:
            raise JspecError(f"`stop` has `{len(self.stop)}` entries.", f"at most {STOPS}.", "name fewer.")
        for place, text in enumerate(self.stop):
            if not isinstance(text, str) or not 0 < len(text) <= STOP_LENGTH:
                raise JspecError(
                    f"`stop[{place}]` is `{_short(text)}`.",
                    f"a string of 1 to {STOP_LENGTH} characters.",
                    "leave it out, or name end tokens in `end_ids`.",
                )
        if not isinstance(self.logit_bias, Mapping):
            raise JspecError(
                f"`logit_bias` is `{_short(self.logit_bias)}`.",
                "a mapping from token ids to numbers.",
                "write `{id: value}`.",
            )
        if len(self.logit_bias) > BIASES:
            raise JspecError(
                f"`logit_bias` has `{len(self.logit_bias)}` entries.", f"at most {BIASES}.", "bias fewer tokens."
            )
        for token, value in self.logit_bias.items():
            _check_number(f"logit_bias[{token!r}]", value, -100.0, 100.0)

    def with_seed(self) -> Request:
        """The same request with a seed, drawn from the operating system if it had none."""
        return self if self.seed is not None else dataclasses.replace(self, seed=secrets.randbits(64))

    @property
    def shaped(self) -> bool:
        """Whether the processors have anything to do: a penalty, a bias or a minimum length."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.min_tokens > 0
            or any(self.logit_bias.values())
        )

    def settings(self) -> dict[str, Any]:
        """Everything but the prompt, by name: what was asked for and what was left at its default."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "prompt"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probabilities at one emitted token."""

    token: int
    logprob: float
    rank: int  # 1: no token was more likely
    top: tuple[tuple[int, float], ...]  # ids and log-probabilities, most likely first, as many as were asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a request."""

    tokens: tuple[int, ...]  # of which the last may be an end token, or complete a stop string
    finish: str  # "stop", "length", "error", or "abort" where the caller ended it
    error: str | None  # why, when `finish` is "error"
    seed: int  # used if temperature > 0
    max_tokens: int  # after capping
    rounds: int
    proposed: int  # drafted tokens that were verified
    accepted: int  # of them accepted
    stop: str | None = None  # the stop string that ended it
    text: str | None = None  # when the loop was given a tokenizer
    logprobs: tuple[TokenLogprob, ...] | None = None  # when asked for, one for each token


def admission(config: EngineConfig, request: Request, slot: int) -> Admission:
    """The request as arrays of one slot; checks that it fits the engine first.

    Raises:
      JspecError: a prompt or id that the engine cannot take. Too large a `max_tokens` is capped.
    """
    check(config, request)
    assert request.seed is not None, "a request gets its seed before it is admitted"
    length = len(request.prompt)
    ends = np.full((END_IDS,), -1, np.int32)
    if not request.ignore_eos:
        ends[: len(request.end_ids)] = request.end_ids
    sampling = Sampling(
        temperature=jnp.asarray([request.temperature], jnp.float32),
        top_k=jnp.asarray([request.top_k], jnp.int32),
        top_p=jnp.asarray([request.top_p], jnp.float32),
        min_p=jnp.asarray([request.min_p], jnp.float32),
        seed=jnp.asarray(seed_words(request.seed)[None]),
        choice_index=jnp.asarray([request.choice_index], jnp.int32),
    )
    ids, values = np.full((1, BIASES), -1, np.int32), np.zeros((1, BIASES), np.float32)
    ids[0, : len(request.logit_bias)] = list(request.logit_bias.keys())
    values[0, : len(request.logit_bias)] = list(request.logit_bias.values())
    processors = Processors(
        repetition=jnp.asarray([request.repetition_penalty], jnp.float32),
        frequency=jnp.asarray([request.frequency_penalty], jnp.float32),
        presence=jnp.asarray([request.presence_penalty], jnp.float32),
        min_length=jnp.asarray([length + request.min_tokens if request.min_tokens else 0], jnp.int32),
        bias_ids=jnp.asarray(ids),
        bias_values=jnp.asarray(values),
    )
    prompt = np.zeros((1, config.target.vocab_size), bool)
    if request.repetition_penalty != 1:
        prompt[0, list(request.prompt)] = True
    return Admission(
        slot=jnp.int32(slot),
        anchor=jnp.int32(request.prompt[-1]),
        length=jnp.int32(length),
        limit=jnp.int32(length + capped(config, request)),
        end_ids=jnp.asarray(ends),
        sampling=sampling,
        processors=processors,
        prompt=jnp.asarray(prompt),
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
    if request.min_tokens > capped(config, request):
        raise JspecError(
            f"`min_tokens` is `{request.min_tokens}` behind a prompt of {len(request.prompt)} tokens.",
            f"at most {capped(config, request)}: the engine holds {config.max_length} tokens of prompt and output.",
            "lower `min_tokens`, or build the engine with a larger `max_length`.",
        )
    vocab = config.target.vocab_size
    for name, ids in (("prompt", request.prompt), ("end_ids", request.end_ids), ("logit_bias", request.logit_bias)):
        for place, token in enumerate(ids):
            if not isinstance(token, (int, np.integer)) or isinstance(token, bool) or not 0 <= token < vocab:
                raise JspecError(
                    f"`{name}[{place}]` is `{token!r}`." if name != "logit_bias" else f"`{name}` names `{token!r}`.",
                    f"token ids from 0 to {vocab - 1}.",
                    "tokenize with the target's own tokenizer.",
                )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise JspecError(f"`{name}` is `{_short(value)}`.", "True or False.", f"correct `{name}`.")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    good = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    # Comparisons refuse NaN and infinities too, and unlike `math.isfinite` take whole numbers of any size.
    if not good or not low <= value <= high:  # type: ignore[operator]
        raise JspecError(f"`{name}` is `{_short(value)}`.", f"a number from {low:g} to {high:g}.", f"correct `{name}`.")


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not low <= value <= high:
        raise JspecError(
            f"`{name}` is `{_short(value)}`.", f"a whole number from {low} to {high}.", f"correct `{name}`."
        )
