"""Texts for training, written by the target itself.

A drafter is judged by what its target says, so it learns from nothing else: answers of other models or
of people cost more acceptance than any choice of architecture (drafters.md 9.1). The target answers
given prompts, and prompts that it invents itself: shown the beginning of a user's turn it writes
one (Xu et al., "Magpie", 2024).

Every answer is a function of prompt, settings and seed (docs/exactness.md), and files are written whole,
so a run that was killed goes on where it stopped and ends with the same files.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jspec.decoding.generate import generate
from jspec.decoding.request import Request
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from jspec.target.checkpoint import Checkpoint
from jspec.training import filters, texts
from jspec.training.texts import Prompt, Text

MARK = "\ufdd2"  # no text holds it: where a message begins and ends in the chat template


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How answers are drawn."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 256  # of one answer
    seed: int = 0
    choice: int = 0  # which of several answers to the same prompt


def answer(target: Checkpoint, config: EngineConfig, prompts: Sequence[Prompt], settings: Settings) -> list[Text]:
    """Lets the target answer every turn of every prompt, in its chat template.

    A prompt that leaves no room for an answer in the engine is left out, and an answer that goes in circles.
    """
    chats: list[list[dict[str, str]] | None] = [[] for _ in prompts]
    made: list[Text] = []
    for turn in range(max((len(prompt.turns) for prompt in prompts), default=0)):
        asked, requests = [], []
        for i, prompt in enumerate(prompts):
            before = chats[i]
            if before is None or turn >= len(prompt.turns):
                continue
            chat = [*before, {"role": "user", "content": prompt.turns[turn]}]
            ids = target.tokenizer.render_chat(chat, sanitize_control_tokens=True)
            chats[i] = chat if len(ids) < config.max_length else None
            if chats[i] is not None:
                asked.append((i, chat))
                requests.append(_request(target, ids, settings, f"{prompt.id}/{turn}"))
        # A loop would be dropped at its end; to end it at once saves half of the time.
        results = generate(config, target.params, requests, abort=lambda _, tokens: filters.looping(tokens))
        for (i, chat), request, result in zip(asked, requests, results, strict=True):
            if result.finish == "abort":
                chats[i] = None
                continue
            tokens = np.asarray([*request.prompt, *result.tokens], np.int32)
            span = (len(request.prompt), len(tokens))
            # A text for each turn: what came before is read as the template renders it, which may
            # differ from what was written, so earlier answers are context there and no labels.
            made.append(Text(id=f"{prompts[i].id}/{turn}", kind=prompts[i].kind, tokens=tokens, answers=(span,)))
            chats[i] = [*chat, {"role": "assistant", "content": target.tokenizer.decode(result.tokens)}]
    return made


def invent(
    target: Checkpoint,
    config: EngineConfig,
    *,
    first: int,
    count: int,
    kind: str,
    system: str | None,
    settings: Settings,
) -> list[Prompt]:
    """Lets the target write user turns itself, number `first` and the `count - 1` behind it.

    Args:
      kind: what they are filed under.
      system: the system message, which steers what users ask; None is the template's own.

    Returns:
      prompts, without those that did not end by themselves.
    """
    ids = _user_turn(target, system)
    names = [f"invented-{kind}-{settings.seed}-{number}" for number in range(first, first + count)]
    results = generate(config, target.params, [_request(target, ids, settings, name) for name in names])
    out = []
    for name, result in zip(names, results, strict=True):
        text = target.tokenizer.decode(result.tokens).strip()
        if result.finish == "stop" and text:
            out.append(Prompt(id=name, kind=kind, turns=(text,)))
    return out


def run(
    target: Checkpoint,
    config: EngineConfig,
    prompts: Iterable[Prompt],
    settings: Settings,
    folder: Path,
    *,
    shard: int = 128,
    keep: Callable[[Text], bool] = lambda text: True,
    progress: Callable[[int, int], None] = lambda done, tokens: None,
) -> Iterator[Path]:
    """Answers prompts into files of `shard` prompts each, and yields each file as it stands.

    A file that is there is left as it is, so the same call goes on after an interruption.

    Raises:
      JspecError: a file that is there was made by another target or with other settings.
    """
    about: dict[str, Any] = {
        "target": target.fingerprint,
        "engine": config.fingerprint(target.params.dtype, target.params.products),
    }
    about |= {"settings": dataclasses.asdict(settings)}
    done = made = 0
    for number, part in enumerate(_parts(prompts, shard)):
        digest = hashlib.sha256(repr([(p.id, p.turns) for p in part]).encode()).hexdigest()
        mine = about | {"prompts": digest}
        path = folder / f"{number:05d}.npz"
        if path.exists():
            got, said = texts.load(path)
            if differing := sorted(key for key in mine if said.get(key) != mine[key]):
                raise JspecError(
                    f"`{path}` was made with another {', '.join(differing)}.",
                    "files of this very run: same target, engine, settings and prompts.",
                    "choose another folder, or remove the files to make them again.",
                )
        else:
            got = [text for text in answer(target, config, part, settings) if keep(text)]
            texts.save(path, got, mine)
        done, made = done + len(part), made + texts.count(got)
        progress(done, made)
        yield path


def _request(target: Checkpoint, ids: Sequence[int], settings: Settings, name: str) -> Request:
    digest = hashlib.sha256(f"{settings.seed} {name}".encode()).digest()
    options: dict[str, Any] = {"temperature": settings.temperature, "top_p": settings.top_p}
    return Request(
        prompt=tuple(ids),
        max_tokens=settings.max_tokens,
        seed=int.from_bytes(digest[:8], "little"),
        choice_index=settings.choice,
        end_ids=target.end_ids,
        **options,
    )


def _user_turn(target: Checkpoint, system: str | None) -> list[int]:
    """Ids of a chat up to where its first user turn begins."""
    chat = [] if system is None else [{"role": "system", "content": system}]
    chat.append({"role": "user", "content": MARK})
    text = target.tokenizer.chat_text(chat, add_generation_prompt=False)
    head, mark, _ = text.partition(MARK)
    ids = target.tokenizer.encode_rendered(head)
    if not mark or not ids:
        fault = "changes what users say" if not mark else "puts nothing before what users say"
        raise JspecError(
            f"the chat template of `{target.name}` {fault}.",
            "a template in which a user's turn begins by a token of its own, for the target to go on from.",
            "train on given prompts only.",
        )
    return ids


def _parts(prompts: Iterable[Prompt], size: int) -> Iterator[list[Prompt]]:
    part: list[Prompt] = []
    for prompt in prompts:
        part.append(prompt)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part
