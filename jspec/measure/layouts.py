"""What one record of a prompt file says: the user's turns, in the layouts that are in common use.

| record | turns |
|---|---|
| `{"turns": ["...", "..."]}` | the list |
| `{"messages": [{"role": ..., "content": ...}]}`, also `conversations`, `conversation` | the user's messages |
| `{"conversations": [{"from": "human", "value": ...}]}` | the user's messages |
| `{"instruction": "...", "instances": [{"input": ...}]}`, or `input` beside it | instruction, blank line, first input |
| `{"prompt": ...}`, `question`, `problem`, `text` | the text; a list of texts is a list of turns |

A record with several of these keys is read by the first that matches, top to bottom. Recorded
answers of other models are never used: in a later turn the history holds the target's own answers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.errors import JspecError

LAYOUTS = (
    '`{"turns": [...]}`, `{"messages": [{"role", "content"}, ...]}`, `{"conversations": [{"from", "value"}, ...]}`, '
    '`{"instruction", "instances"}`, `{"prompt"}`, `{"question"}`, `{"problem"}` or `{"text"}`'
)
_MESSAGE_KEYS = ("messages", "conversations", "conversation")
_TEXT_KEYS = ("prompt", "question", "problem", "text")
_USER = ("user", "human", "prompter")
_SYSTEM = ("system", "developer")
# ShareGPT names the model that answered; tool results belong to the answer, too.
_ANSWER = ("assistant", "gpt", "model", "chatgpt", "bing", "bard", "tool", "function", "function_call", "observation")


@dataclasses.dataclass(frozen=True, slots=True)
class Dialogue:
    """The user's side of one record."""

    turns: tuple[str, ...]
    system: str | None = None
    opened_by_user: bool = True  # false where a recorded answer comes before the first turn


def read_dialogue(
    record: Any, place: str, *, text_key: str | None = None, opening_only: bool = False
) -> tuple[Dialogue, bool]:
    """Reads one record.

    Args:
      record: the parsed JSON value.
      place: where it stands, for error messages, such as "line 3 of `a.jsonl`".
      text_key: the data set's own key for the bare text; it is tried right after `turns`.
      opening_only: keep the first turn alone; messages behind it are not looked at.

    Returns:
      the dialogue, which has no turns where a list of messages holds none by the user, and whether
      it is the bare text of `text_key`, to which the data set's wording still has to be added.
    """
    if not isinstance(record, dict):
        raise JspecError(
            f"{place} is `{_brief(record)}`, not an object.", LAYOUTS + ".", "convert the record to one of these."
        )
    if "turns" in record:
        return _from_texts(record["turns"], "turns", place, opening_only), False
    if text_key is not None and text_key in record:
        return _from_texts(record[text_key], text_key, place, opening_only), True
    for key in _MESSAGE_KEYS:
        if key in record:
            return _from_messages(record[key], key, place, opening_only), False
    if "instruction" in record:
        return _from_instruction(record, place), False
    for key in _TEXT_KEYS:
        if key in record:
            return _from_texts(record[key], key, place, opening_only), False
    raise JspecError(
        f"{place} has the keys {', '.join(f'`{k}`' for k in list(record)[:12]) or 'of an empty object'}.",
        LAYOUTS + ".",
        "rename the key that holds the prompt to `prompt`.",
    )


def _from_texts(value: Any, key: str, place: str, opening_only: bool) -> Dialogue:
    texts = [value] if isinstance(value, str) and key != "turns" else value
    if isinstance(texts, list) and texts and all(isinstance(t, dict) for t in texts):
        return _from_messages(texts, key, place, opening_only)
    if not isinstance(texts, list) or not texts:
        raise JspecError(
            f"`{key}` at {place} is `{_brief(value)}`.",
            "a list of at least one text." if key == "turns" else "a text, or a list of at least one text.",
            "repair the record.",
        )
    texts = texts[:1] if opening_only else texts
    return Dialogue(tuple(_text(t, f"`{key}`", place) for t in texts))


def _from_messages(value: Any, key: str, place: str, opening_only: bool) -> Dialogue:
    if not isinstance(value, list):
        raise JspecError(f"`{key}` at {place} is `{_brief(value)}`.", "a list of messages.", "repair the record.")
    turns: list[str] = []
    system: str | None = None
    opened_by_user: bool | None = None
    for i, message in enumerate(value):
        where = f"message {i + 1} of `{key}`"
        if not isinstance(message, dict):
            raise JspecError(
                f"{where} at {place} is `{_brief(message)}`.",
                '`{"role": ..., "content": ...}` or `{"from": ..., "value": ...}`.',
                "repair the record.",
            )
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if role in _USER:
            turns.append(_text(content, where, place))
        elif role in _SYSTEM:
            # An empty system message asks for the model's own default, like a missing one.
            if content and (turns or system is not None):
                raise JspecError(
                    f"{where} at {place} is a second system message, or one behind a turn.",
                    "one system message, before the first turn.",
                    "join the system messages, or delete the later ones.",
                )
            system = _text(content, where, place) if content else system
            continue
        elif role not in _ANSWER:
            raise JspecError(
                f"{where} at {place} has the role `{_brief(role)}`.",
                f"{', '.join(_USER + _SYSTEM + _ANSWER)}.",
                "rename the role.",
            )
        if opened_by_user is None:
            opened_by_user = role in _USER
        if opening_only and turns:
            break
    return Dialogue(tuple(turns), system, bool(opened_by_user))


def _from_instruction(record: dict[str, Any], place: str) -> Dialogue:
    text = _text(record["instruction"], "`instruction`", place)
    given = record.get("input", "")
    if "instances" in record:
        instances = record["instances"]
        if not isinstance(instances, list) or not all(isinstance(i, dict) for i in instances):
            raise JspecError(
                f"`instances` at {place} is `{_brief(instances)}`.",
                'a list of `{"input": ..., "output": ...}`.',
                "repair the record.",
            )
        # One conversation a record: further instances repeat the instruction.
        given = instances[0].get("input", "") if instances else ""
    if not given:
        return Dialogue((text,))
    return Dialogue((f"{text}\n\n{_text(given, '`input`', place)}",))


def _text(value: Any, what: str, place: str) -> str:
    """A message's text: a string, or the text parts of a list in OpenAI's layout."""
    if isinstance(value, list) and value and all(isinstance(p, dict) and p.get("type") == "text" for p in value):
        value = "".join(p["text"] if isinstance(p.get("text"), str) else "" for p in value)
    if not isinstance(value, str) or not value.strip():
        raise JspecError(
            f"{what} at {place} is `{_brief(value)}`.",
            "a text that is not blank; images and other parts have no place in a text model.",
            "repair or delete the record.",
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise JspecError(
            f"{what} at {place} holds half of a surrogate pair (character {error.start}).",
            "text that can be written as UTF-8.",
            "repair or delete the record; its text was cut inside a character.",
        ) from error
    return value


def _brief(value: Any) -> str:
    """A value for an error message, cut to a readable length; never the whole of a hostile record."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    if isinstance(value, list | dict) and not value:
        text = "[]" if isinstance(value, list) else "{}"
    return text if len(text) <= 60 else text[:57] + "..."
