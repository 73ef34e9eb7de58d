"""`Plan`: which prompts the target answers, and how, as a TOML file; and the texts that come of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from jspec.measure import suites
from jspec.target.checkpoint import Checkpoint
from jspec.training import filters, overlap, prompts, synthesise
from jspec.training.synthesise import Settings
from jspec.training.texts import KINDS, Prompt

OWN = "seeds"  # names the prompts that jspec brings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Prompts of one kind: from a file, or written by the target itself."""

    kind: str
    file: str | None = None  # below the data folder, or `seeds`
    invent: str | None = None  # system message under which the target writes user turns; "" is the template's own
    skip: int = 0  # prompts at its beginning that are left to an earlier run

    def __post_init__(self) -> None:
        named = [x for x in (self.file, self.invent) if isinstance(x, str)]
        whole = isinstance(self.skip, int) and not isinstance(self.skip, bool) and self.skip >= 0
        if self.kind not in KINDS or len(named) != 1 or not whole:
            raise JspecError(
                f"a source of prompts is `{dataclasses.asdict(self)}`.",
                f"a kind ({', '.join(KINDS)}), `file` or `invent`, which are texts, and a whole number to `skip`.",
                "correct it.",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How texts are made. Sources of one kind follow each other, the kinds take turns."""

    sources: tuple[Source, ...]
    answers: Settings
    invented: Settings
    slots: int = 16
    max_length: int = 640  # prompt and answer
    shard: int = 128  # prompts of a file


def read(path: Path) -> Plan:
    """Reads a plan: `[[sources]]`, the tables `answers` and `invented`, and `slots`, `max_length`, `shard`.

    Raises:
      JspecError: no TOML file, or a key that is unknown or of another type.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise JspecError(f"`{path}` cannot be read ({error}).", "a plan in TOML.", "correct it.") from None
    known = {field.name for field in dataclasses.fields(Plan)}
    sources = given.pop("sources", [])
    tables = {name: given.pop(name, {}) for name in ("answers", "invented")}
    whole = {name: value for name, value in given.items() if isinstance(value, int) and not isinstance(value, bool)}
    bad = [name for name, value in given.items() if name not in known or whole.get(name, 0) < 1 or value is None]
    try:
        if bad or not isinstance(sources, list) or not sources:
            raise TypeError(f"`{bad[0]}`" if bad else "no `sources`")
        return Plan(
            sources=tuple(Source(**source) for source in sources),
            answers=Settings(**tables["answers"]),
            invented=Settings(**{"temperature": 1.0, "max_tokens": 160, **tables["invented"]}),
            **whole,
        )
    except TypeError as error:
        raise JspecError(
            f"`{path}` is no plan ({error}).",
            f"{', '.join(sorted(known))}; whole numbers of at least 1.",
            "correct it; `configs/texts` has examples.",
        ) from None


def run(
    plan: Plan,
    target: Checkpoint,
    out: Path,
    *,
    data: Path | None,
    benchmarks: Sequence[Path],
    tokens: int,
    tell: Callable[[str], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Lets the target answer, into `out/texts`, until it holds so many answer tokens or no prompt is left.

    What the target invents is kept in `out/invented`. Prompts that stand in a benchmark are left out; those are listed
    in `out/overlap.json`.

    Args:
      data: the folder of the sources' files.
      benchmarks: files of prompts that are never trained on; jspec's built-in sets are added.
      stop: asked after each file.

    Returns:
      whether it came to its end; False if it was stopped before.
    """
    config = EngineConfig(target=target.config, slots=plan.slots, rows=1, max_length=plan.max_length)
    known = overlap.Benchmarks(itertools.chain(built_in(), *(prompts.read(path, "chat") for path in benchmarks)))
    hits: list[overlap.Hit] = []
    tell(f"benchmarks to stay apart from: {known.count} prompts")

    def of_kind(kind: str) -> Iterator[Prompt]:
        for source in plan.sources:
            if source.kind == kind:
                yield from itertools.islice(_stream(source, plan, target, config, out, data), source.skip, None)

    kinds = [kind for kind in KINDS if any(source.kind == kind for source in plan.sources)]
    apart = known.apart(prompts.balanced([of_kind(kind) for kind in kinds]), hits)
    made = 0

    def progress(done: int, count: int) -> None:
        nonlocal made
        made = count
        tell(f"{done} prompts, {count} answer tokens")

    files = synthesise.run(
        target, config, apart, plan.answers, out / "texts", shard=plan.shard, keep=filters.worth, progress=progress
    )
    ended = True
    for _ in files:
        report = {"benchmark_prompts": known.count, "left_out": [dataclasses.asdict(hit) for hit in hits]}
        (out / "overlap.json").write_text(json.dumps(report, indent=1) + "\n")
        if made >= tokens:
            break
        if stop():
            ended = False
            break
    return ended


def built_in() -> Iterator[Prompt]:
    """The benchmark prompts that jspec brings."""
    for name in suites.BUILTIN:
        for number, found in enumerate(suites.load(name)):
            yield Prompt(id=f"{name}-{number}", kind="chat", turns=tuple(found.turns))


def _stream(
    source: Source, plan: Plan, target: Checkpoint, config: EngineConfig, out: Path, data: Path | None
) -> Iterable[Prompt]:
    if source.invent is not None:
        return prompts.invented(
            target,
            config,
            out / "invented",
            kind=source.kind,
            system=source.invent or None,
            settings=plan.invented,
            shard=plan.shard,
        )
    assert source.file is not None
    if source.file == OWN:
        return [prompt for prompt in prompts.read(prompts.SEEDS) if prompt.kind == source.kind]
    if data is None:
        raise JspecError(
            f"the plan takes prompts from `{source.file}`, and no folder of data is given.",
            "the folder that holds it.",
            "name it with --data.",
        )
    return prompts.read(data / source.file, source.kind)
