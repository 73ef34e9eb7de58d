"""Prompts and settings as a user gives them, to `Request`s."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from jspec.decoding.request import Request
from jspec.errors import JspecError
from jspec.target.checkpoint import Checkpoint
from jspec.target.tokenizer import Message

Prompt = str | Sequence[int] | Sequence[Message]

# Asked for elsewhere, and not honoured here: refused rather than ignored.
REFUSED = {
    **dict.fromkeys(
        ("grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "response_format"),
        "grammars are not supported: the text would have to be matched token by token between draft and verify",
    ),
    **dict.fromkeys(
        ("logits_processor", "logits_processors", "processors"),
        "processors of one's own are not supported: they cannot run inside the compiled round",
    ),
    **dict.fromkeys(("num_beams", "use_beam_search", "best_of", "length_penalty"), "there is no beam search"),
    **dict.fromkeys(("prompt_logprobs",), "log-probabilities of the prompt are not computed: prefill makes no logits"),
    **dict.fromkeys(("bad_words", "bad_words_ids"), "words cannot be banned; single tokens can, by `logit_bias`"),
    **dict.fromkeys(("no_repeat_ngram_size",), "there is no ban on repeated n-grams; there are penalties"),
    **dict.fromkeys(("suffix",), "text cannot be continued towards a suffix"),
}
SETTINGS = tuple(f.name for f in dataclasses.fields(Request) if f.name not in ("prompt", "choice_index"))
MOST_CHOICES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """One answer that is wanted."""

    prompt: int  # index of the prompt
    choice: int
    request: Request
    echo: str  # text to put before the answer


def asks(
    target: Checkpoint,
    prompts: Prompt | Sequence[Prompt],
    *,
    chat: bool,
    n: int,
    echo: bool,
    switches: Mapping[str, Any] | None,
    settings: dict[str, Any],
) -> list[Ask]:
    """Every answer that is wanted, prompt by prompt, its `n` choices together.

    Raises:
      JspecError: a prompt or setting that cannot be honoured, by name.
    """
    settings = _checked(settings)
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_CHOICES:
        raise JspecError(f"`n` is `{n!r}`.", f"a whole number from 1 to {MOST_CHOICES}.", "correct `n`.")
    if echo and settings.get("logprobs") is not None:
        raise JspecError(
            "`echo` and `logprobs` were asked for together.",
            "one of the two: log-probabilities of the prompt are not computed.",
            "leave `echo` out and put the prompt before the text yourself.",
        )
    settings = {"end_ids": target.end_ids} | settings
    out = []
    batch = _batch(prompts)
    for index, prompt in enumerate(batch):
        try:
            ids, text = _ids(target, prompt, chat, switches, echo)
            request = Request(prompt=tuple(ids), **settings).with_seed()
        except JspecError as error:
            if len(batch) == 1:
                raise
            raise JspecError(f"`prompts[{index}]`: {error.given}", error.allowed, error.action) from None
        for choice in range(n):
            wanted = dataclasses.replace(request, choice_index=choice)
            out.append(Ask(prompt=index, choice=choice, request=wanted, echo=text if echo else ""))
    return out


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    for name in settings:
        if name in REFUSED:
            raise JspecError(
                f"`{name}` was asked for; {REFUSED[name]}.",
                "settings that hold for every token, drafted or not: " + ", ".join(SETTINGS) + ".",
                f"leave `{name}` out.",
            )
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, 1, 0.6)
            raise JspecError(
                f"`{name}` is no setting.",
                ", ".join(SETTINGS) + ".",
                f"did you mean `{near[0]}`?" if near else "leave it out.",
            )
    out = {name: value for name, value in settings.items() if value is not None or name == "seed"}
    if isinstance(out.get("stop"), str):
        out["stop"] = (out["stop"],)
    return out


def _batch(prompts: Any) -> list[Any]:
    """Several prompts, also where one was given: a text, a list of ids, a list of messages."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Sequence):
        _refuse(prompts)
    first = prompts[0] if prompts else None
    one = isinstance(first, Mapping) or (isinstance(first, (int, float, np.integer)) and not isinstance(first, bool))
    return [prompts] if one else list(prompts)


def _ids(
    target: Checkpoint, prompt: Any, chat: bool, switches: Mapping[str, Any] | None, echo: bool
) -> tuple[Sequence[int], str]:
    """Ids and, for `echo`, text of one prompt."""
    tokenizer = target.tokenizer
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, str) and not (chat and tokenizer.has_template):
        _no_switches(switches)
        return tokenizer.encode(prompt), prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        _refuse(prompt)
    if prompt and all(isinstance(message, Mapping) for message in prompt):
        if echo:
            raise JspecError(
                "`echo` was asked for with a chat.",
                "`echo` with plain text or ids: a chat has no text to be continued.",
                "leave `echo` out, or give the prompt as text with chat=False.",
            )
        return tokenizer.render_chat(prompt, **dict(switches or {})), ""
    for place, token in enumerate(prompt):
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
            raise JspecError(
                f"item {place} of the prompt is `{str(token)[:80]!r}`, of type `{type(token).__name__}`.",
                "a text, a list of token ids, or a list of messages with `role` and `content`.",
                "do not mix them inside one prompt.",
            )
    _no_switches(switches)
    return [int(t) for t in prompt], tokenizer.decode(int(t) for t in prompt) if echo and _known(target, prompt) else ""


def _known(target: Checkpoint, ids: Sequence[int]) -> bool:
    # What is not known is refused with its place by `request.check`.
    return all(0 <= t < target.tokenizer.vocab_size for t in ids)


def _no_switches(switches: Mapping[str, Any] | None) -> None:
    if switches:
        raise JspecError(
            f"template switches were given, `{next(iter(switches))}` first, and the prompt is no chat.",
            "`switches` with a chat, which goes through the model's template.",
            "leave them out.",
        )


def _refuse(prompt: Any) -> NoReturn:
    text = repr(prompt)
    raise JspecError(
        f"the prompt is `{text if len(text) <= 80 else text[:77] + '...'}`, of type `{type(prompt).__name__}`.",
        "a text, a list of token ids, a list of messages with `role` and `content`, or a list of these.",
        "convert it to one of these.",
    )
