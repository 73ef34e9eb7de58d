"""`tokenizer.json` and its neighbours to a `Tokenizer`.

Two kinds of vocabulary are read, both BPE: byte-level (GPT-2, Llama 3, Qwen), where every piece is
written in an alphabet of 256 characters, and SentencePiece's (Llama 2, Gemma), where ▁ is a space and
<0x0A> a byte. In both an id stands for a fixed string of bytes, so text is put together without
asking the library that took it apart.

    tokenizer.json         vocabulary, merges, special tokens
    tokenizer_config.json  names of special tokens, whether a start token is wanted, the chat template
    chat_template.jinja    the chat template, where it stands alone; it is the one that counts
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping

import tokenizers
from tokenizers import AddedToken

from jspec.errors import JspecError
from jspec.target import documents
from jspec.target.documents import Document
from jspec.target.tokenizer import Tokenizer, byte_of_character

LARGEST = 256 * documents.MIB
TEMPLATE = "chat_template.jinja"

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class Read:
    """A tokenizer, and what is worth telling about how it was read."""

    tokenizer: Tokenizer
    notes: tuple[str, ...]


def load(folder: pathlib.Path, vocab_size: int, end_ids: Iterable[int]) -> Read:
    """Reads the tokenizer of a checkpoint's folder.

    Args:
      vocab_size: rows of the embedding. Ids that have a row but no token stand for no text.
      end_ids: ids that end an answer.

    Raises:
      JspecError: files are missing or damaged, or of a kind that is not supported.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        old = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).exists()]
        having = f", only {', '.join(f'`{name}`' for name in old)}" if old else ""
        raise JspecError(
            f"the folder `{folder}` has no `tokenizer.json`{having}.",
            "a tokenizer in the format of the `tokenizers` library.",
            "convert it with transformers: `AutoTokenizer.from_pretrained(...).save_pretrained(...)`.",
        )
    doc = documents.read(path, LARGEST)
    config = documents.read_if_there(folder / "tokenizer_config.json", LARGEST) or Document({}, "tokenizer_config.json")
    model = doc.child("model") or Document({}, doc.file)
    if model.text("type", "BPE") != "BPE":
        doc.refuse(f"is of the kind `{model.text('type')}`", "`BPE`")
    added, notes = _added(doc, vocab_size)
    vocab = _vocabulary(model, vocab_size)
    spaced = _is_spaced(doc)

    marked = _backend(doc, added)
    for token in added:
        got = marked.token_to_id(token.text)
        if got != token.id:
            doc.refuse(f"gives `{token.text}` the id `{token.id}`, and it would get `{got}`", "ids without gaps")
    # Both share the vocabulary: the second costs nothing. Special tokens are in it, or the ids of those
    # behind them would move, and are not looked for.
    plain = tokenizers.Tokenizer(marked.model)
    for name in ("normalizer", "pre_tokenizer"):
        if getattr(marked, name) is not None:
            setattr(plain, name, getattr(marked, name))
    plain.add_tokens([token.backend() for token in added])
    plain.encode_special_tokens = True

    pieces = _pieces(vocab, added, vocab_size, spaced)
    prefix, told = _prefix(doc, config, marked, {token.text: token.id for token in added} | vocab)
    template, where = _template(folder, config)
    names = {key: text for key in _NAMED if (text := _token_text(config, key)) is not None}
    return Read(
        Tokenizer(
            plain=plain,
            marked=marked,
            pieces=pieces,
            special={token.text: token.id for token in added if token.special},
            end_ids=end_ids,
            prefix=prefix,
            template=template,
            names=names,
            strip_first_space=spaced and _strips(doc),
        ),
        (*notes, *told, *where),
    )


@dataclasses.dataclass(frozen=True)
class _Added:
    """A token beside the BPE vocabulary, or one of it that is found in text before merging."""

    id: int
    text: str
    special: bool
    flags: Mapping[str, bool]

    def backend(self) -> AddedToken:
        return AddedToken(self.text, special=self.special, **self.flags)


def _added(doc: Document, vocab_size: int) -> tuple[list[_Added], list[str]]:
    """The added tokens by id; those beyond the embedding are dropped and told."""
    found: list[_Added] = []
    beyond: list[_Added] = []
    for item in doc.items("added_tokens", dict, []):
        entry = Document(item, f"{doc.file}: added_tokens")
        token = _Added(
            id=entry.integer("id"),
            text=entry.text("content"),
            special=entry.flag("special", False),
            flags={key: entry.flag(key, False) for key in ("lstrip", "rstrip", "normalized", "single_word")},
        )
        if token.id < 0 or not token.text:
            doc.refuse(f"has the added token `{token.text}` with id `{token.id}`", "a text, and an id from 0 on")
        (found if token.id < vocab_size else beyond).append(token)
    found.sort(key=lambda token: token.id)
    for a, b in itertools.pairwise(found):
        if a.id == b.id:
            doc.refuse(f"gives the id `{a.id}` to `{a.text}` and to `{b.text}`", "an id for each token")
    names = ", ".join(f"`{token.text}` ({token.id})" for token in beyond)
    return found, [f"tokens without a row in the embedding, left out: {names}"] if beyond else []


def _vocabulary(model: Document, vocab_size: int) -> dict[str, int]:
    vocab = model.child("vocab")
    if vocab is None or not vocab.data:
        model.refuse("has no vocabulary", "an object from texts to ids")
    ids = list(vocab.data.values())
    bad = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]
    if bad:
        model.refuse(
            f"has the id `{str(bad[0])[:40]}` in its vocabulary",
            f"ids from 0 to {vocab_size - 1}, as many as the embedding has rows",
        )
    if len(set(ids)) != len(ids):
        model.refuse("gives one id to several pieces", "an id for each")
    return vocab.data


def _is_spaced(doc: Document) -> bool:
    """Whether pieces are SentencePiece's; else they are byte-level. Told by how ids become text."""
    decoder = doc.child("decoder")
    parts = [] if decoder is None else decoder.items("decoders", dict, [decoder.data])
    kinds = [str(part.get("type")) for part in parts]
    if kinds == ["ByteLevel"]:
        return False
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    if parts[:1] == [spaces] and kinds[1:] in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return True
    doc.refuse(
        f"turns ids into text by {', '.join(f'`{kind}`' for kind in kinds) or 'nothing'}",
        "`ByteLevel`, or `Replace` of ▁ by a space, `ByteFallback`, `Fuse` and perhaps `Strip`",
    )


def _strips(doc: Document) -> bool:
    """Whether the first space of a whole text is no part of it."""
    decoder = doc.child("decoder")
    last = decoder.items("decoders", dict, [{}])[-1] if decoder is not None else {}
    if last.get("type") != "Strip":
        return False
    if (last.get("content"), last.get("start"), last.get("stop")) != (" ", 1, 0):
        doc.refuse(f"strips {last}", "one space at the start")
    return True


def _backend(doc: Document, added: Iterable[_Added]) -> tokenizers.Tokenizer:
    """The library's tokenizer, without what is no business of ids: padding, truncation, decoding."""
    wanted = {key: doc.data.get(key) for key in ("version", "normalizer", "pre_tokenizer", "post_processor", "model")}
    tokens = [{"id": t.id, "content": t.text, "special": t.special, **t.flags} for t in added]
    try:
        return tokenizers.Tokenizer.from_str(json.dumps({**wanted, "added_tokens": tokens}))
    except BaseException as error:  # the library's own errors are bare `Exception`s, its panics not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise JspecError(
            f"`{doc.file}` is not a tokenizer ({str(error)[:200]}).",
            "a file that the `tokenizers` library reads.",
            "get the file again, or update `tokenizers`.",
        ) from None


def _pieces(vocab: Mapping[str, int], added: Iterable[_Added], size: int, spaced: bool) -> list[bytes]:
    alphabet = byte_of_character()
    pieces = [b""] * size
    for text, number in vocab.items():
        byte = _BYTE.fullmatch(text) if spaced else None
        if byte:
            pieces[number] = bytes([int(byte[1], 16)])
        elif spaced:
            pieces[number] = text.replace("▁", " ").encode()
        elif all(character in alphabet for character in text):
            pieces[number] = bytes([alphabet[character] for character in text])
        else:
            pieces[number] = text.encode()
    for token in added:
        pieces[token.id] = token.text.encode()
    return pieces


def _prefix(
    doc: Document, config: Document, marked: tokenizers.Tokenizer, ids: Mapping[str, int]
) -> tuple[list[int], list[str]]:
    """Ids that begin every text. An explicit `add_bos_token` decides, then the post-processor."""
    if config.flag("add_eos_token", False):
        config.refuse("sets `add_eos_token`", "a tokenizer that ends no prompt")
    bare = marked.encode("a", add_special_tokens=False).ids
    full = marked.encode("a").ids
    if full[len(full) - len(bare) :] != bare:
        doc.refuse("puts tokens behind every text", "tokens before the text only")
    prefix = full[: len(full) - len(bare)]
    if "add_bos_token" not in config:
        return prefix, []
    start = _token_text(config, "bos_token")
    wanted = []
    if config.flag("add_bos_token", False):
        if start is None or start not in ids:
            config.refuse(
                f"sets `add_bos_token` with `{start}` as `bos_token`", "a start token that the vocabulary has"
            )
        wanted = [ids[start]]
    told = [] if wanted == prefix else [f"`add_bos_token` of tokenizer_config.json decides: texts begin with {wanted}"]
    return wanted, told


def _template(folder: pathlib.Path, config: Document) -> tuple[str | None, list[str]]:
    path = folder / TEMPLATE
    if path.exists():
        try:
            return documents.contents(path).decode(), []
        except UnicodeDecodeError as error:
            raise JspecError(f"`{TEMPLATE}` cannot be read ({error}).", "a text file.", "get it again.") from None
    value = config.data.get("chat_template")
    if value is None or isinstance(value, str):
        return value, []
    named = {}
    for item in config.items("chat_template", dict):
        entry = Document(item, f"{config.file}: chat_template")
        named[entry.text("name")] = entry.text("template")
    if "default" not in named:
        config.refuse(f"has chat templates named {', '.join(named)}", "one named `default`")
    others = sorted(set(named) - {"default"})
    return named["default"], [f"chat templates not used: {', '.join(others)}"] if others else []


def _token_text(config: Document, key: str) -> str | None:
    """A special token's text: given as such, or as an object that has it as `content`."""
    if isinstance(config.data.get(key), dict):
        entry = config.child(key)
        return None if entry is None else entry.text("content", None)
    return config.text(key, None)
