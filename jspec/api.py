"""The short way: load a target, generate text.

target = jspec.load()
for piece in jspec.stream(target, "Why is the sky blue?"):
    print(piece, end="", flush=True)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jspec.decoding.generate import decode
from jspec.decoding.request import Request, Result
from jspec.drafters import named
from jspec.drafters.base import Drafter
from jspec.engine.config import EngineConfig
from jspec.target.checkpoint import Checkpoint
from jspec.target.loading import load

__all__ = ["engine", "generate", "load", "stream"]


def engine(target: Checkpoint, *, slots: int = 1, rows: int = 8, max_length: int = 2048, **rest: Any) -> EngineConfig:
    """An engine for a target; `max_length` is capped by what the target was made for."""
    length = min(max_length, target.config.max_positions)
    return EngineConfig(target=target.config, slots=slots, rows=rows, max_length=length, **rest)


def generate(
    target: Checkpoint,
    prompts: Sequence[str],
    *,
    drafter: str | Drafter = "ngram_k7",
    chat: bool = True,
    config: EngineConfig | None = None,
    **settings: Any,
) -> list[tuple[str, Result]]:
    """Continues several prompts, as many at a time as the engine has slots.

    Args:
      target: from `load`.
      prompts: user turns, or plain text to continue with `chat=False`.
      drafter: by name or made by hand; changes the speed, never the text.
      config: the engine; one slot for each prompt, at most 8, if left out.
      settings: fields of `Request`, such as `max_tokens`, `temperature`, `seed`.

    Returns:
      text and result of every prompt, in order.
    """
    config = config or engine(target, slots=max(1, min(len(prompts), 8)))
    chosen = named.drafter(drafter) if isinstance(drafter, str) else drafter
    requests = [_request(target, p, chat, settings) for p in prompts]
    weights = chosen.weights(target.params, target.config)
    results: dict[int, Result] = {}
    for event in decode(config, target.params, requests, drafter=chosen, weights=weights):
        if event.result is not None:
            results[event.index] = event.result
    return [(target.tokenizer.decode(list(results[i].tokens)), results[i]) for i in range(len(requests))]


def stream(
    target: Checkpoint,
    prompt: str,
    *,
    drafter: str | Drafter = "ngram_k7",
    chat: bool = True,
    config: EngineConfig | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Continues one prompt, piece by piece as rounds emit it. Arguments as in `generate`."""
    config = config or engine(target)
    chosen = named.drafter(drafter) if isinstance(drafter, str) else drafter
    request = _request(target, prompt, chat, settings)
    text = target.tokenizer.stream()
    weights = chosen.weights(target.params, target.config)
    for event in decode(config, target.params, [request], drafter=chosen, weights=weights):
        if piece := text.push(list(event.tokens)):
            yield piece
    if tail := text.finish():
        yield tail


def _request(target: Checkpoint, prompt: str, chat: bool, settings: dict[str, Any]) -> Request:
    if chat and target.tokenizer.has_template:
        ids = target.tokenizer.render_chat([{"role": "user", "content": prompt}])
    else:
        ids = target.tokenizer.encode(prompt)
    return Request(prompt=tuple(ids), **({"end_ids": target.end_ids} | settings))
