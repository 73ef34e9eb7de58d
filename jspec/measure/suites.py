"""Data sets by name: lists of conversations to measure on.

The unit is everywhere the *conversation*: `num_prompts` counts conversations, and a conversation of
two turns makes two requests, so the 80 dialogues of MT-Bench are 160 requests. Turn 2 is asked with
the target's own answer to turn 1 before it, which is why requests are made while a run goes on
(`Prompt.messages`) and not ahead of it.

The built-in sets (`builtin_math`, `builtin_code`, `builtin_chat`) were written for jspec, come with
the package and need no network. The others are read from a local path, or fetched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jspec.errors import JspecError
from jspec.measure.hub import HubFile, WebFile, fetch
from jspec.measure.layouts import read_dialogue
from jspec.measure.records import CONTAINERS, parse_records, read_records

_BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_COMPLETE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation of a data set."""

    dataset: str
    conversation: int  # its place in the whole data set, from 0, whatever subset was chosen
    turns: tuple[str, ...]  # the user's texts, without any chat template
    system: str | None = None

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """The chat history that asks turn `len(answers)`, counted from 0.

        `answers` are the target's own replies to the turns before, in order.
        """
        if len(answers) >= len(self.turns):
            raise JspecError(
                f"conversation {self.conversation} of `{self.dataset}` was asked for turn {len(answers) + 1}.",
                f"turns 1 to {len(self.turns)}.",
                "stop after the last turn.",
            )
        history = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn, answer in zip(self.turns, answers, strict=False):
            history += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*history, {"role": "user", "content": self.turns[len(answers)]}]


@dataclasses.dataclass(frozen=True, slots=True)
class _Suite:
    source: HubFile | WebFile | None = None
    text_key: str | None = None  # the published record's key for the bare text
    wording: str = "{}"  # put around the bare text; records with `turns` are taken as they are
    # Only the first turn of each record. Later turns of recorded chats answer another model's words.
    opening_only: bool = False


_SUITES = {
    "math500": _Suite(HubFile("HuggingFaceH4/MATH-500", "test.jsonl"), "problem", _BOXED),
    "gsm8k": _Suite(HubFile("openai/gsm8k", "main/test-00000-of-00001.parquet"), "question", _BOXED),
    "humaneval": _Suite(
        HubFile("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet"), "prompt", _COMPLETE
    ),
    "mbpp": _Suite(HubFile("google-research-datasets/mbpp", "sanitized/test-00000-of-00001.parquet"), "prompt"),
    "mt_bench": _Suite(HubFile("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl"), "prompt"),
    "ultrachat": _Suite(
        HubFile("HuggingFaceH4/ultrachat_200k", "data/test_sft-00000-of-00001-f7dfac4afe5b93f4.parquet"),
        opening_only=True,
    ),
    "sharegpt": _Suite(
        HubFile("anon8231489123/ShareGPT_Vicuna_unfiltered", "ShareGPT_V3_unfiltered_cleaned_split.json"),
        opening_only=True,
    ),
    "spec_bench": _Suite(
        WebFile("https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl")
    ),
    "custom": _Suite(),
}
BUILTIN = ("builtin_math", "builtin_code", "builtin_chat")
NAMES = (*BUILTIN, *_SUITES)


def load(
    name: str,
    *,
    path: str | Path | None = None,
    num_prompts: int | None = None,
    seed: int = 0,
    shuffle: bool = False,
) -> list[Prompt]:
    """Loads a data set, or a subset of it.

    Args:
      name: one of `NAMES`. `custom` needs `path`.
      path: a file or a directory that holds `NAME.jsonl`, `NAME.json` or `NAME.parquet`; the layouts
        are those of `jspec.measure.layouts`. Without it the data set is fetched.
      num_prompts: at most this many conversations (not turns), each at most once; None takes all.
      seed: of the shuffle.
      shuffle: chooses a subset by `seed` instead of the first ones. The choice depends on the seed
        and the size of the data set alone, not on versions of any library.

    Returns:
      conversations, each with its place in the data set. Equal arguments give equal lists.
    """
    if name not in NAMES:
        raise JspecError(f"`{name}` is no data set.", f"{', '.join(NAMES)}.", "use `custom` with a path for your own.")
    limit = _whole(num_prompts, "num_prompts", 1) if num_prompts is not None else None
    seed = _whole(seed, "seed", 0)
    prompts = _builtin(name, path) if name in BUILTIN else _read(name, _SUITES[name], path)
    if shuffle:
        prompts.sort(key=lambda p: hashlib.sha256(f"{seed}:{p.conversation}".encode()).digest())
    return prompts[:limit]


def describe(prompts: Sequence[Prompt]) -> str:
    """Counts a list of prompts in both units: "80 conversations, 160 turns"."""
    turns = sum(len(p.turns) for p in prompts)
    plural = ("" if len(prompts) == 1 else "s", "" if turns == 1 else "s")
    return f"{len(prompts)} conversation{plural[0]}, {turns} turn{plural[1]}"


def _builtin(name: str, path: str | Path | None) -> list[Prompt]:
    if path is not None:
        raise JspecError(
            f"the data set `{name}` was given the path `{path}`.",
            "no path: the built-in sets come with jspec.",
            "use `custom` to read your own file.",
        )
    file = f"{name.removeprefix('builtin_')}.jsonl"
    data = importlib.resources.files("jspec.measure").joinpath("prompts", file).read_bytes()
    return _prompts(name, _Suite(), list(parse_records(data, file)), file)


def _read(name: str, suite: _Suite, path: str | Path | None) -> list[Prompt]:
    if path is not None:
        file = _locate(name, Path(path).expanduser())
        return _prompts(name, suite, read_records(file), str(file))
    if suite.source is None:
        raise JspecError(
            f"the data set `{name}` has no path.", f"a file, {CONTAINERS}.", "pass --dataset-path with your file."
        )
    found = fetch(name, suite.source)
    records = read_records(found) if isinstance(found, Path) else list(parse_records(found, str(suite.source)))
    return _prompts(name, suite, records, str(suite.source))


def _locate(name: str, path: Path) -> Path:
    if path.is_file():
        return path
    if path.is_dir():
        inside = [path / f"{name}{suffix}" for suffix in (".jsonl", ".json", ".parquet")]
        for file in inside:
            if file.is_file():
                return file
        raise JspecError(
            f"the directory `{path}` holds no file for `{name}`.",
            f"one of {', '.join(f'`{f.name}`' for f in inside)} in it.",
            "pass the file itself, or rename it.",
        )
    raise JspecError(f"`{path}` does not exist.", f"a file or a directory with `{name}.jsonl`.", "check the path.")


def _prompts(name: str, suite: _Suite, records: list[tuple[str, Any]], source: str) -> list[Prompt]:
    prompts = []
    for i, (place, record) in enumerate(records):
        dialogue, bare = read_dialogue(record, place, text_key=suite.text_key, opening_only=suite.opening_only)
        turns = tuple(suite.wording.format(t) for t in dialogue.turns) if bare else dialogue.turns
        # The published chat files hold records that are empty or begin in the middle of a chat.
        if suite.opening_only and not (turns and dialogue.opened_by_user):
            continue
        if not turns:
            raise JspecError(f"{place} has no message by the user.", "at least one.", "repair or delete the record.")
        prompts.append(Prompt(name, i, turns, dialogue.system))
    if not prompts:
        raise JspecError(
            f"`{source}` holds no conversation that the user opens.",
            "at least one.",
            "check that it is the right file.",
        )
    return prompts


def _whole(value: Any, what: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise JspecError(
            f"`{what}` is `{value!r}`.",
            f"a whole number of at least {least}" + (", counted in conversations." if what == "num_prompts" else "."),
            "leave it out to take the whole data set." if what == "num_prompts" else "use 0.",
        )
    return number
