"""The short way: load a target, generate text.

target = jspec.load()
for piece in jspec.stream(target, "Why is the sky blue?"):
    print(piece, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from jspec import answers
from jspec.answers import Answer, Chunk
from jspec.decoding.generate import check_drafter, decode
from jspec.decoding.request import check
from jspec.decoding.round import check_rule
from jspec.drafters import named
from jspec.drafters.base import Drafter, Plain
from jspec.drafters.draft_model import draft_model
from jspec.drafters.modes import mode_for
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from jspec.prompts import Ask, Prompt, asks
from jspec.target.checkpoint import Checkpoint
from jspec.target.loading import load

__all__ = ["AnyDrafter", "engine", "generate", "load", "stream", "stream_async", "stream_batch"]

AnyDrafter = str | Drafter | tuple[Drafter, Any] | Checkpoint | None


def engine(target: Checkpoint, *, slots: int = 1, rows: int = 8, max_length: int = 2048, **rest: Any) -> EngineConfig:
    """An engine for a target; `max_length` is capped by what the target was made for."""
    if isinstance(max_length, int) and not isinstance(max_length, bool):
        max_length = min(max_length, _checkpoint(target).config.max_positions)
    known = {f.name for f in dataclasses.fields(EngineConfig)} - {"target"}
    if unknown := sorted(set(rest) - known):
        raise JspecError(f"`{unknown[0]}` is no setting of an engine.", ", ".join(sorted(known)) + ".", "leave it out.")
    return EngineConfig(target=_checkpoint(target).config, slots=slots, rows=rows, max_length=max_length, **rest)


def generate(
    target: Checkpoint,
    prompts: Prompt | Sequence[Prompt],
    *,
    drafter: AnyDrafter = "ngram_k7",
    accept: str = "choice",
    chat: bool = True,
    n: int = 1,
    echo: bool = False,
    config: EngineConfig | None = None,
    switches: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[Answer]:
    """Answers prompts, as many at a time as the engine has slots.

    Args:
      target: from `load`.
      prompts: one or several: a text (a user's turn, or with `chat=False` text to continue), a list
        of token ids, or a list of messages with `role` and `content`.
      drafter: by name; made by hand; a pair of drafter and weights; a smaller `Checkpoint` with the same
        tokenizer; None for none. Changes the speed, never the text.
      accept: `choice`, the default; or `rejection`, the classical rule, under which only the law of the
        text is independent of the drafter.
      n: answers to each prompt, told apart by their choice index; at temperature 0 all are equal.
      echo: put the prompt before the text; not for chats, not with `logprobs`.
      config: the engine; one slot for each answer, at most 8, if left out.
      switches: variables of the chat template, such as `enable_thinking`.
      settings: fields of `jspec.Request`: `max_tokens` (256), `min_tokens`, `temperature` (1.0), `top_k`,
        `top_p`, `min_p`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`,
        `logit_bias`, `seed` (drawn and recorded), `end_ids` (the target's), `ignore_eos`, `stop`,
        `include_stop`, `logprobs` and `logprobs_kind`. None is as good as left out.

    Returns:
      answers prompt by prompt, the `n` choices of each together.

    Raises:
      JspecError: anything that cannot be honoured, before anything is decoded. A setting that is not
        supported is refused by name, never ignored.
    """
    chunks = stream_batch(
        target,
        prompts,
        drafter=drafter,
        accept=accept,
        chat=chat,
        n=n,
        echo=echo,
        config=config,
        switches=switches,
        **settings,
    )
    done = [chunk.answer for chunk in chunks if chunk.answer is not None]
    return sorted(done, key=lambda a: (a.prompt, a.choice))


def stream(target: Checkpoint, prompt: Prompt, **options: Any) -> Iterator[str]:
    """The text of one answer to one prompt, piece by piece as rounds emit it. Arguments as in `generate`.

    Raises:
      JspecError: as `generate`, at the call; several prompts or answers, for which there is `stream_batch`;
        and a fault of the target's numbers, when it happens.
    """
    wanted, chunks = _start(target, prompt, **options)
    if len(wanted) != 1:
        raise JspecError(
            f"`stream` was given {len(wanted)} answers to write.",
            "one prompt, and n=1.",
            "use `stream_batch`, which says of each piece whose it is.",
        )

    def pieces() -> Iterator[str]:
        for chunk in chunks:
            if chunk.text:
                yield chunk.text
            if chunk.answer is not None and chunk.answer.error is not None:
                raise JspecError(
                    f"the answer broke off: {chunk.answer.error}",
                    "a target whose numbers are finite.",
                    "check the checkpoint, or load it as float32.",
                )

    return pieces()


def stream_batch(target: Checkpoint, prompts: Prompt | Sequence[Prompt], **options: Any) -> Iterator[Chunk]:
    """Answers prompts and tells what each round adds to each answer. Arguments as in `generate`.

    The texts of an answer's chunks joined are its text. Closing the iterator ends all answers.
    """
    return _start(target, prompts, **options)[1]


def stream_async(target: Checkpoint, prompts: Prompt | Sequence[Prompt], **options: Any) -> AsyncIterator[Chunk]:
    """As `stream_batch`, for `async for`: rounds run in a thread of their own, so other tasks go on.

    A task that is cancelled, or closes the iterator, ends all answers after the round under way.
    """
    chunks = stream_batch(target, prompts, **options)

    async def forward() -> AsyncIterator[Chunk]:
        pool = concurrent.futures.ThreadPoolExecutor(1, "jspec")
        try:
            while (chunk := await asyncio.get_running_loop().run_in_executor(pool, next, chunks, None)) is not None:
                yield chunk
        finally:
            # Behind the round under way, and in its thread: a generator cannot be closed while it runs.
            pool.submit(getattr(chunks, "close", lambda: None))
            pool.shutdown(wait=False)

    return forward()


def _start(
    target: Checkpoint,
    prompts: Prompt | Sequence[Prompt],
    *,
    drafter: AnyDrafter = "ngram_k7",
    accept: str = "choice",
    chat: bool = True,
    n: int = 1,
    echo: bool = False,
    config: EngineConfig | None = None,
    switches: Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[Ask], Iterator[Chunk]]:
    """Checks everything, then returns what is wanted and the iterator that decodes it."""
    check_rule(accept)
    for name, value in (("chat", chat), ("echo", echo)):
        if not isinstance(value, bool):
            raise JspecError(f"`{name}` is `{value!r}`.", "True or False.", f"correct `{name}`.")
    wanted = asks(_checkpoint(target), prompts, chat=chat, n=n, echo=echo, switches=switches, settings=settings)
    chosen, weights = _drafter(target, drafter, accept)
    config = config or engine(target, slots=max(1, min(len(wanted), 8)), taps=chosen.taps)
    if not isinstance(config, EngineConfig) or config.target != target.config:
        raise JspecError(
            "`config` is no engine of this target.",
            "what `jspec.engine(target, ...)` returns, or None.",
            "make the engine of the target that you pass.",
        )
    check_drafter(config, chosen)
    for ask in wanted:
        try:
            check(config, ask.request)
        except JspecError as error:
            raise JspecError(f"`prompts[{ask.prompt}]`: {error.given}", error.allowed, error.action) from None
    common = {"n": n, "echo": echo, "chat": chat, "accept": accept, "drafter": chosen.name}
    return wanted, _chunks(target, config, chosen, weights, accept, wanted, common)


def _chunks(
    target: Checkpoint,
    config: EngineConfig,
    drafter: Drafter,
    weights: Any,
    accept: str,
    wanted: list[Ask],
    common: dict[str, Any],
) -> Iterator[Chunk]:
    events = decode(
        config,
        target.params,
        [ask.request for ask in wanted],
        drafter=drafter,
        weights=weights,
        tokenizer=target.tokenizer,
        accept=accept,
    )
    for event in events:
        ask = wanted[event.index]
        if event.kind == "start" and ask.echo:
            yield Chunk(prompt=ask.prompt, choice=ask.choice, text=ask.echo, ids=())
        elif event.kind == "tokens":
            yield Chunk(
                prompt=ask.prompt, choice=ask.choice, text=event.text, ids=event.tokens, logprobs=event.logprobs
            )
        elif event.result is not None:
            answer = answers.answer(
                event.result,
                prompt=ask.prompt,
                choice=ask.choice,
                prompt_tokens=len(ask.request.prompt),
                prefix=ask.echo,
                settings=ask.request.settings() | common,
            )
            yield Chunk(prompt=ask.prompt, choice=ask.choice, text=event.text, ids=(), answer=answer)


def _drafter(target: Checkpoint, drafter: AnyDrafter, accept: str) -> tuple[Drafter, Any]:
    """The drafter and its weights."""
    if drafter is None:
        return Plain(), ()
    if isinstance(drafter, Checkpoint):
        return draft_model(drafter, target, mode=mode_for(accept))
    if isinstance(drafter, tuple) and len(drafter) == 2 and isinstance(drafter[0], Drafter):
        return drafter
    if isinstance(drafter, str):
        return named.drafter(drafter, target, accept)
    if not isinstance(drafter, Drafter):
        raise JspecError(
            f"`drafter` is of type `{type(drafter).__name__}`.",
            "a name, a Drafter, a pair of Drafter and weights, a Checkpoint, or None.",
            "see `jspec.drafters`.",
        )
    return drafter, drafter.weights(target.params, target.config)


def _checkpoint(target: Checkpoint) -> Checkpoint:
    if not isinstance(target, Checkpoint):
        raise JspecError(
            f"the target is of type `{type(target).__name__}`.", "what `jspec.load` returns.", "load it first."
        )
    return target
