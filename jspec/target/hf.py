"""Reads a folder in Hugging Face's layout into a `Checkpoint`.

    config.json             the model's shape                    families.py
    model.safetensors       its weights, or an index and shards  shards.py, plan.py, weights.py
    generation_config.json  the ids that end an answer
    tokenizer.json, ...     text to ids and back                 hf_tokenizer.py

Everything but the weights' values is checked before any of them is read, in this order: configuration,
headers and index, tensors, dtype, memory, end ids, tokenizer. No file is ever run.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

from jspec.errors import JspecError
from jspec.target import documents, dtypes, families, hf_tokenizer, memory, plan, shards, weights
from jspec.target.checkpoint import Checkpoint
from jspec.target.documents import Document

CONFIG = "config.json"
GENERATION = "generation_config.json"


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    context: int | None = None,
    free: int | None = None,
    name: str | None = None,
) -> Checkpoint:
    """Reads configuration, weights and tokenizer from one folder.

    Args:
      folder: with the files above.
      dtype: of the linear weights, `bfloat16` or `float32`; left out or `auto`, the checkpoint decides
        (`dtypes.py`).
      context: for the rope type `dynamic`: the longest text, in tokens, that its frequencies are made
        for (`rope.frequencies`).
      free: bytes of memory that may be used; left out, what the device has.
      name: what reports call it; the folder's name if left out.

    Raises:
      JspecError: a file is missing, damaged, or of a kind that is not supported.
    """
    folder = pathlib.Path(folder)
    name = name or folder.resolve().name
    if not folder.is_dir():
        raise JspecError(f"`{folder}` is not a folder.", "the folder of a checkpoint.", "check the path.")
    wish = dtypes.asked(dtype)
    whole = documents.read(folder / CONFIG)
    family, text = families.find(whole)
    config = families.with_context(family.config(text), context)
    try:
        files = shards.open_folder(folder)
    except OSError as error:
        raise JspecError(f"`{folder}` cannot be read ({error}).", "a folder that can be.", "check the path.") from None
    if config.layers > len(files.tensors):
        text.refuse(
            f"asks for `{config.layers}` layers, and the files hold `{len(files.tensors)}` tensors",
            "several tensors for each layer",
        )
    wanted = plan.make(config, family, files.tensors)
    left, copy = plan.check(wanted, files, family, config.tied_head)
    embed = files.tensors[wanted["embed",].parts[0].name]
    if copy is not None and not weights.equal(files.tensors[copy], embed):
        raise JspecError(
            f"`{copy}` differs from `{embed.name}`, and `tie_word_embeddings` is true.",
            "a tied model without a head of its own, or with a copy of the embedding.",
            f"set `tie_word_embeddings` to false in `{CONFIG}` if the stored head is meant.",
        )
    read = {part.name for weight in wanted.values() for part in weight.parts}
    choice = dtypes.decide(wish, text, (files.tensors[tensor] for tensor in read))
    total, largest = memory.of_plan(wanted, choice.numpy)
    memory.check(name, total + largest, choice.name, memory.available() if free is None else free)
    end_ids, end_note = _end_ids(folder, whole, text, config.vocab_size)
    tokenizer = hf_tokenizer.load(folder, config.vocab_size, end_ids)
    arrays = weights.convert(wanted, files.tensors, choice.numpy)
    return Checkpoint(
        config=config,
        params=plan.assemble(arrays, config),
        tokenizer=tokenizer.tokenizer,
        end_ids=end_ids,
        name=name,
        fingerprint=files.fingerprint([(folder / CONFIG).read_bytes()]),
        license=_license(folder),
        source=str(folder),
        dtype_rule=choice.rule,
        notes=(*_file_notes(files), *_left_notes(left), *_config_notes(whole, text), end_note, *tokenizer.notes),
    )


def _end_ids(folder: pathlib.Path, whole: Document, text: Document, vocab_size: int) -> tuple[tuple[int, ...], str]:
    """Ids that end an answer: of the generation config, then the configuration, the whole's before the part's."""
    generation = documents.read_if_there(folder / GENERATION) or Document({}, GENERATION)
    for doc in (generation, whole, text):
        value: Any = doc.data.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                doc.refuse(
                    f"gives `eos_token_id` as `{str(value)[:80]}`", f"one id or a list, each from 0 to {vocab_size - 1}"
                )
        return tuple(dict.fromkeys(ids)), f"end ids {ids} from {doc.file}"
    return (), "no end ids: answers end at their length"


def _file_notes(files: shards.Shards) -> list[str]:
    notes = []
    if files.stray:
        notes.append(f"weight files beside the checkpoint's, not read: {', '.join(files.stray)}")
    if files.unindexed:
        notes.append(f"tensors in its files that the index does not name: {', '.join(files.unindexed)}")
    return notes


def _left_notes(left: list[plan.Left]) -> list[str]:
    """One line for each reason, with the names."""
    by_reason: dict[str, list[str]] = {}
    for tensor in left:
        by_reason.setdefault(tensor.reason, []).append(tensor.name)
    return [f"tensors left aside ({reason}): {_some(names)}" for reason, names in by_reason.items()]


def _config_notes(whole: Document, text: Document) -> list[str]:
    docs = [whole] if whole is text else [whole, text]
    unread = sorted({key for doc in docs for key in doc.unread()} - families.HARMLESS)
    return [f"settings of {CONFIG} that are not read: {', '.join(unread)}"] if unread else []


def _license(folder: pathlib.Path) -> str | None:
    """As the head of the model card states it."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    try:
        with open(card, encoding="utf-8") as f:
            head = re.match(r"---\n(.*?)\n---\n", f.read(1 << 16), re.DOTALL)
    except (OSError, UnicodeDecodeError):
        return None
    stated = re.search(r"^license:[ \t]*[\"']?([^\s\"']+)", head[1], re.MULTILINE) if head else None
    return stated[1] if stated else None


def _some(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
