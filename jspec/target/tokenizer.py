"""Text to ids and back, chats to prompts, and ids to text while they arrive.

Byte-level BPE (Radford et al., 2019): text becomes UTF-8, each byte a printable character, and pairs
of pieces merge by rank. So every id stands for a fixed string of bytes, and decoding is joining them;
it needs no tokenizer, and its cost does not depend on what came before.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import tokenizers
from tokenizers import models, pre_tokenizers

from jspec.errors import JspecError
from jspec.target import templates

Message = Mapping[str, Any]

# How text is cut before merging, by GGUF's name for it (`tokenizer.ggml.pre`).
PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    # Digits one by one, then as GPT-2.
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
}

# Values of `tokenizer.ggml.token_type` that matter here.
CONTROL, USER_DEFINED = 3, 4

# Brackets around a special token's text inside a message (`sanitize_control_tokens`). Unicode reserves
# these two code points for a program's own use: no text holds them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


@final
class Tokenizer:
    """The tokenizer of one checkpoint.

    Attributes:
      vocab_size: V; ids are 0 .. V-1.
      end_ids: ids that end an answer, ascending.
      special: id of each special token by its text.
    """

    def __init__(
        self,
        *,
        plain: tokenizers.Tokenizer,
        marked: tokenizers.Tokenizer,
        pieces: Sequence[bytes],
        special: Mapping[str, int],
        end_ids: Iterable[int],
        prefix: Sequence[int] = (),
        template: str | None = None,
        names: Mapping[str, str] | None = None,
        strip_first_space: bool = False,
    ) -> None:
        """Puts a tokenizer together from its parts.

        Args:
          plain: knows no special tokens.
          marked: the same, with special tokens recognised in text.
          pieces: the bytes of each id.
          special: ids of the special tokens by their text.
          end_ids: ids that end an answer.
          prefix: ids that begin every encoded text, for a model that wants a start token.
          template: the chat template, in Jinja.
          names: variables for the template, such as `bos_token`.
          strip_first_space: a space that begins a decoded text is no part of it (SentencePiece).

        Raises:
          JspecError: an id is outside the vocabulary.
        """
        self._plain, self._marked = plain, marked
        self._pieces = list(pieces)
        self._strip = strip_first_space
        self._prefix, self._template, self._names = list(prefix), template, dict(names or {})
        self.special = dict(special)
        self._special_ids = frozenset(self.special.values())
        self.end_ids = tuple(sorted(set(end_ids)))
        for token in [*self.end_ids, *self._prefix, *self._special_ids]:
            self.token_bytes(token)
        # The longest first, as the backend matches; without special tokens, a pattern that never matches.
        texts = sorted(self.special, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """Rebuilds the tokenizer from the metadata of a GGUF file (keys under `tokenizer.`).

        Bytes that the vocabulary lacks are dropped from text, as llama.cpp and the original do
        (SmolLM2 lacks a few control characters).

        Raises:
          JspecError: a kind of tokenizer that is not supported, or damaged metadata.
        """
        return _from_gguf(fields)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def has_template(self) -> bool:
        """Whether `render_chat` can be used."""
        return self._template is not None

    @property
    def switches(self) -> tuple[str, ...]:
        """What the chat template reads besides the messages, for instance `enable_thinking`; names, sorted."""
        if self._template is None:
            return ()
        template = self._compiled
        return tuple(sorted(template.reads - {"messages", "add_generation_prompt", *template.globals, *self._names}))

    def encode(self, text: str) -> list[int]:
        """Ids of `text` taken literally: what looks like a special token is ordinary text.

        A start token comes first if the model wants one.

        Raises:
          JspecError: `text` holds half of a surrogate pair, which no encoding can express.
        """
        return self._prefix + _encode(self._plain, text)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of `text` as a rendered chat is read: what looks like a special token is one."""
        return _encode(self._marked, text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8, an unfinished last character too, become U+FFFD.

        Equal to what `Stream` gives in pieces.
        """
        data = b"".join(self._bytes(ids, skip_special))
        return data.removeprefix(b" " if self._strip else b"").decode("utf-8", "replace")

    def stream(self, *, skip_special: bool = True) -> Stream:
        """A detokeniser for ids that arrive a few at a time."""
        return Stream(self, skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id stands for; for a special token its text.

        Raises:
          JspecError: the id is outside the vocabulary.
        """
        if not 0 <= token < len(self._pieces):
            raise JspecError(
                f"the token id `{token}` is outside the vocabulary.",
                f"0 to {len(self._pieces) - 1}.",
                "check that ids and tokenizer belong to the same model.",
            )
        return self._pieces[token]

    def render_chat(
        self,
        messages: Sequence[Message],
        /,  # a switch may have any name
        *,
        add_generation_prompt: bool = True,
        sanitize_control_tokens: bool = False,
        **switches: Any,
    ) -> list[int]:
        """Ids of a chat in the model's own format: what transformers' `apply_chat_template` gives.

        Special tokens are recognised everywhere in the rendered text, so by default a message that
        holds `<|im_end|>` ends itself. With `sanitize_control_tokens` only those of the template
        count, and those in messages and switches are ordinary text, cut as `encode` cuts it
        (transformers' option of that name also cuts around each).

        Args:
          messages: mappings with `role`, `content` and whatever else the template reads.
          add_generation_prompt: end with the start of the assistant's answer.
          switches: further variables of the template, such as `tools` or `enable_thinking`.

        Raises:
          JspecError: no template, an unknown switch, or the template refuses the messages.
        """
        text = self._render(messages, add_generation_prompt, switches, sanitize_control_tokens)
        if not sanitize_control_tokens:
            return self.encode_rendered(text)
        ids: list[int] = []
        run = ""  # ordinary text since the last special token
        at = 0
        for match in re.finditer(f"{OPEN}(?:{self._any_special.pattern}){CLOSE}|{self._any_special.pattern}", text):
            run += text[at : match.start()]
            at = match.end()
            if match[0].startswith(OPEN):
                run += match[0]
            else:
                ids += [*self._encode_run(run), self.special[match[0]]]
                run = ""
        return ids + self._encode_run(run + text[at:])

    def chat_text(self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **switches: Any) -> str:
        """The text whose ids `render_chat` gives."""
        return self._render(messages, add_generation_prompt, switches, sanitize=False)

    def _encode_run(self, text: str) -> list[int]:
        return _encode(self._plain, text.replace(OPEN, "").replace(CLOSE, ""))

    def _bytes(self, ids: Iterable[int], skip_special: bool) -> Iterator[bytes]:
        for token in ids:
            piece = self.token_bytes(token)
            if not (skip_special and token in self._special_ids):
                yield piece

    @functools.cached_property
    def _compiled(self) -> templates.Template:
        """The template, compiled when it is first asked for: plain prompts need none."""
        if self._template is None:
            raise JspecError(
                "the model has no chat template.",
                "plain prompts, or a checkpoint made for chat.",
                "encode the prompt as plain text.",
            )
        return templates.Template(self._template)

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, switches: Mapping[str, Any], sanitize: bool
    ) -> str:
        template = self._compiled
        reads = template.reads - {"messages"}  # given as such, never by a switch
        unknown = sorted(name for name in switches if name not in reads)
        if unknown:
            raise JspecError(
                f"the chat template does not read `{'`, `'.join(unknown)}`.",
                f"variables that it reads: `{'`, `'.join(sorted(reads))}`.",
                "leave the switch out: it would change nothing.",
            )
        if not messages:
            raise JspecError("the chat is empty.", "at least one message.", "add a message of role `user`.")

        def mark(text: str) -> str:
            return self._any_special.sub(f"{OPEN}\\g<0>{CLOSE}", text) if sanitize else text

        chat = [_plain_data(message, mark) for message in messages]
        # A key that is None is taken as absent: templates would print the word.
        chat = [{k: v for k, v in message.items() if v is not None} for message in chat]
        variables = {"tools": None, "documents": None, **self._names, **_plain_data(switches, mark)}
        return template.render({"messages": chat, "add_generation_prompt": add_generation_prompt, **variables})


@final
class Stream:
    """Turns ids into text as they arrive.

    What `push` returns is final: bytes that may be the start of a character are held back until the
    character is whole or cannot become so any more, at most three. The pieces joined, with that of
    `finish`, equal `Tokenizer.decode` of all ids. An id costs the same wherever it stands.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer._strip  # until the first byte

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that is now certain, possibly none."""
        data = b"".join(self._tokenizer._bytes(ids, self._skip_special))
        if self._strip and data:
            self._strip, data = False, data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The tail: one U+FFFD if the answer ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


# --- From GGUF metadata --------------------------------------------------------------------------


def _from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    ggml = "tokenizer.ggml."

    def get(key: str, kind: type, default: Any = None) -> Any:
        value = fields.get(key, default)
        if value is not default and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
            raise _refuse(f"gives `{key}` as `{str(value)[:80]}`", f"a value of type `{kind.__name__}`")
        return value

    kind, pre = get(ggml + "model", str), get(ggml + "pre", str)
    if kind != "gpt2":
        raise _refuse(f"is of the kind `{kind}`", "`gpt2`, that is byte-level BPE")
    if pre not in PRE_TOKENIZERS:
        raise _refuse(f"cuts text by the rule `{pre}`", ", ".join(f"`{name}`" for name in PRE_TOKENIZERS))
    for flag in ("add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"):
        if get(ggml + flag, bool, False):
            raise _refuse(f"sets `{flag}`", "a tokenizer without it")

    tokens, merges = get(ggml + "tokens", list, []), get(ggml + "merges", list, [])
    types = get(ggml + "token_type", list, [1] * len(tokens))
    if not tokens or not all(isinstance(text, str) for text in [*tokens, *merges]):
        raise _refuse("has no list of tokens, or one that is not text", "a list of texts")
    if len(types) != len(tokens):
        raise _refuse(f"has `{len(tokens)}` tokens but `{len(types)}` token types", "one type for each token")
    vocab = {text: i for i, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(text for i, text in enumerate(tokens) if vocab[text] != i)
        raise _refuse(f"has the token `{twice}` twice", "tokens that differ")

    def token_id(name: str) -> int | None:
        value = get(f"{ggml}{name}_token_id", int)
        if value is not None and not 0 <= value < len(tokens):
            raise _refuse(f"gives `{name}_token_id` as `{value}`", f"an id from 0 to {len(tokens) - 1}")
        return value

    found = {name: token_id(name) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    ids = {name: token for name, token in found.items() if token is not None}
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    add_bos = get(ggml + "add_bos_token", bool, False)
    if add_bos and "bos" not in ids:
        raise _refuse("sets `add_bos_token` without a `bos_token_id`", "both or neither")

    try:
        model = models.BPE(vocab, [_pair(merge) for merge in merges])
    except JspecError:
        raise
    except Exception as error:  # the backend raises no narrower type
        raise _refuse(f"has merges that do not fit its tokens ({error})", "merges of known tokens") from None
    # Both share the model: the second costs nothing.
    plain, marked = tokenizers.Tokenizer(model), tokenizers.Tokenizer(model)
    special = {text: i for i, text in enumerate(tokens) if types[i] == CONTROL}
    user_defined = [text for i, text in enumerate(tokens) if types[i] == USER_DEFINED]
    for backend in (plain, marked):
        backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
        backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in user_defined])
    marked.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in special])

    literal = {*special, *user_defined}
    byte_of = byte_of_character()
    return Tokenizer(
        plain=plain,
        marked=marked,
        pieces=[text.encode() if text in literal else _piece(text, byte_of) for text in tokens],
        special=special,
        end_ids=[ids[name] for name in ("eos", "eot", "eom") if name in ids],
        prefix=[ids["bos"]] if add_bos else [],
        template=get("tokenizer.chat_template", str),
        names={variable: tokens[ids[name]] for variable, name in names.items() if name in ids},
    )


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise _refuse(f"has the merge `{merge}`", "two tokens with a space between them")
    return left, right


def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte, the byte's own where it has one."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _piece(token: str, byte_of: Mapping[str, int]) -> bytes:
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:  # not written in the alphabet: the text itself, as the original decodes it
        return token.encode()


def _refuse(given: str, allowed: str) -> JspecError:
    return JspecError(
        f"the tokenizer in the GGUF file {given}.", f"{allowed}.", "use another checkpoint, or get the file again."
    )


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except (TypeError, UnicodeEncodeError):
        raise JspecError(
            "the text is not a string, or holds half of a surrogate pair.",
            "Unicode text.",
            "decode the text from its source properly.",
        ) from None


# --- For templates -------------------------------------------------------------------------------


def _plain_data(value: Any, mark: Callable[[str], str]) -> Any:
    """A copy made of JSON's types alone, so that a template never holds an object with methods."""
    if isinstance(value, str):
        return mark(str(value))
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_data(item, mark) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain_data(item, mark) for item in value]
    raise JspecError(
        f"a message holds a value of type `{type(value).__name__}`.",
        "texts, numbers, lists and mappings.",
        "convert the value before it is given to the chat template.",
    )


__all__ = ["Message", "Stream", "Tokenizer"]
