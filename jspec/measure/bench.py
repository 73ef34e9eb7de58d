"""`jspec bench`: the same prompts through plain and speculative decoding, side by side.

Every run uses one engine (same slots, rows, capacity), so `baseline` is the very program that
verifies proposals, with none to verify; `baseline_native` is the engine of one row, what one would
use if speculation did not exist. Runs are interleaved: each group of prompts goes through all runs,
in an order that rotates, before the next group starts, so that drift of the machine hits all alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jspec.decoding import probe as probes
from jspec.decoding.generate import RoundTimes
from jspec.decoding.request import check
from jspec.drafters import named
from jspec.drafters.base import Plain
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from jspec.measure import agreement, card, conversations, hardware, metrics, reference, suites
from jspec.measure.conversations import Contender, Settings
from jspec.measure.suites import Prompt
from jspec.measure.trace import Trace
from jspec.startup import CompileCounter
from jspec.target import cache as kv
from jspec.target import products
from jspec.target.checkpoint import Checkpoint

NATIVE = agreement.NATIVE
BASELINES = ("baseline", NATIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    datasets: tuple[tuple[str, tuple[Prompt, ...]], ...]  # name and conversations
    runs: tuple[str, ...]  # `baseline`, `baseline_native`, drafters
    settings: Settings
    concurrency: int = 1  # slots, and conversations in flight
    rows: int = 8
    target: str | None = None  # as given to `loading.load`, for the process without a drafter
    revision: str | None = None
    check_exact: bool = True


@dataclasses.dataclass
class Group:
    """Some conversations of one data set, and what every run made of them."""

    dataset: str
    prompts: tuple[Prompt, ...]
    traces: dict[str, list[list[Trace]]] = dataclasses.field(default_factory=dict)
    wall: dict[str, float] = dataclasses.field(default_factory=dict)
    times: dict[str, RoundTimes] = dataclasses.field(default_factory=dict)

    def tokens(self, run: str) -> list[tuple[int, ...]]:
        """The answers of a run, conversation by conversation, turn by turn."""
        return [t.tokens for turns in self.traces[run] for t in turns]

    def sound(self, run: str) -> bool:
        """Whether no answer of a run failed; one that did has no time to compare."""
        return not any(t.failed for turns in self.traces[run] for t in turns)

    def seconds(self, run: str) -> float:
        """Decode seconds of a run, prefill left out."""
        return sum(t.decode_s for turns in self.traces[run] for t in turns)


@dataclasses.dataclass
class Outcome:
    """All that a benchmark found."""

    rows: list[dict[str, Any]]
    card: card.Card
    probe: probes.Probe
    engine: dict[str, Any]
    groups: list[Group]
    agreement: list[str]
    interrupted: bool


Progress = Callable[[int, int, str], None]  # done, of how many, what


def contenders(plan: Plan, checkpoint: Checkpoint) -> list[Contender]:
    """The engines and drafters of a plan, on an engine large enough for all its prompts."""
    prompts = [p for _, ps in plan.datasets for p in ps]
    first_turn = [conversations.request(checkpoint, p, (), plan.settings) for p in prompts]
    longest = max(len(r.prompt) for r in first_turn) + plan.settings.max_tokens
    # A later turn holds the earlier ones, their answers, and a question of its own with the template around it.
    longest += max(sum(_room(checkpoint, turn, plan.settings) for turn in p.turns[1:]) for p in prompts)
    limit = min(-(-longest // 256) * 256, checkpoint.config.max_positions)
    drafters = {name: named.drafter(name, checkpoint) for name in plan.runs if name != NATIVE}
    taps = tuple(sorted({tap for d, _ in drafters.values() for tap in d.taps}))
    engine = EngineConfig(target=checkpoint.config, slots=plan.concurrency, rows=plan.rows, max_length=limit, taps=taps)
    for prompt, asked in zip(prompts, first_turn, strict=True):
        try:
            check(engine, asked)
        except JspecError as error:
            place = f"conversation {prompt.conversation} of `{prompt.dataset}`"
            raise JspecError(f"{place}: {error.given}", error.allowed, "leave it out of the data set.") from None
    out = []
    for name in plan.runs:
        if name == NATIVE:
            native = dataclasses.replace(engine, rows=1, taps=())
            out.append(Contender(name=name, engine=native, drafter=Plain(), weights=None))
        else:
            d, weights = drafters[name]
            if d.proposals > plan.rows - 1:
                raise JspecError(
                    f"`{name}` drafts `{d.proposals}` tokens, and the engine verifies `{plan.rows}` rows.",
                    f"at most {plan.rows - 1} drafted tokens.",
                    f"give --rows {d.proposals + 1} or more, or leave the run out.",
                )
            out.append(Contender(name=name, engine=engine, drafter=d, weights=weights))
    return out


def _room(checkpoint: Checkpoint, turn: str, settings: Settings) -> int:
    """Tokens that a later turn adds to a conversation at most: question, template, answer."""
    return max(256, len(checkpoint.tokenizer.encode(turn)) + 64) + settings.max_tokens


def run(plan: Plan, checkpoint: Checkpoint, *, progress: Progress = lambda *_: None) -> Outcome:
    """Measures a plan. Ctrl-C ends it early: what is done by every run is reported."""
    racers = contenders(plan, checkpoint)
    engine = next((r.engine for r in racers if r.name != NATIVE), racers[0].engine)
    bandwidth = hardware.read_bandwidth()
    progress(0, 1, "probing the engine")
    found = probes.probe(engine, checkpoint.params)
    compile_s = {}
    for racer in racers:
        progress(0, 1, f"warming up {racer.name}")
        compile_s[racer.name] = _warm_up(racer, checkpoint, plan)
    groups = [
        Group(name, prompts[i : i + plan.concurrency])
        for name, prompts in plan.datasets
        for i in range(0, len(prompts), plan.concurrency)
    ]
    done: list[Group] = []
    interrupted = False
    compiled: dict[str, int] = {racer.name: 0 for racer in racers}
    try:
        for number, group in enumerate(groups):
            turn = number % len(racers)
            for racer in racers[turn:] + racers[:turn]:
                progress(
                    len(done) * len(racers) + len(group.traces),
                    len(groups) * len(racers),
                    f"{group.dataset} {racer.name}",
                )
                times = group.times[racer.name] = RoundTimes()
                with CompileCounter() as counter:
                    answered = conversations.answer(racer, checkpoint, group.prompts, plan.settings, times=times)
                group.traces[racer.name], group.wall[racer.name] = answered
                compiled[racer.name] += counter.programs
            done.append(group)
    except KeyboardInterrupt:
        interrupted = True
    plain = None
    if plan.check_exact and done and not interrupted:
        progress(1, 1, "decoding the same prompts without a drafter in another process")
        plain = reference.tokens(
            {"source": plan.target, "revision": plan.revision, "dtype": str(checkpoint.params.dtype)},
            engine,
            [g.prompts for g in done],
            plan.settings,
        )
    head = checkpoint.params.embed if checkpoint.params.head is None else checkpoint.params.head
    read = sum(x.nbytes for x in jax.tree.leaves(checkpoint.params.layers)) + head.nbytes
    contexts = [t.prompt_tokens + len(t.tokens) // 2 for g in done for turns in g.traces[racers[0].name] for t in turns]
    cost = card.Card(
        model=checkpoint.name,
        dtype=str(checkpoint.params.dtype),
        weight_bytes=read,
        kv_bytes_per_token=kv.bytes_per_token(checkpoint.config, checkpoint.params.dtype),
        context=int(np.mean(contexts)) if contexts else 0,
        bandwidth_gb_s=bandwidth,
        bandwidth_source="measured: read-only, all cores, 1 GiB, best of 5",
        l3_bytes=hardware.l3_bytes(),
    )
    rows = []
    for dataset in dict.fromkeys(g.dataset for g in done):
        chosen = [(i, g) for i, g in enumerate(done) if g.dataset == dataset]
        rows += _rows(dataset, racers, [g for _, g in chosen], plan)
        for row in rows[-len(racers) :]:
            if plain is not None and row["run"] not in BASELINES:
                row["exact_match"] = _equal(
                    [t for i, _ in chosen for conversation in plain[i] for t in map(tuple, conversation)],
                    [t for _, g in chosen for t in g.tokens(row["run"])],
                )
    for row in rows:
        name = row["run"]
        row["compile_s"], row["compiles_in_window"] = compile_s[name], compiled[name]
        row["floor_tps"] = cost.floor_tps(plan.concurrency)
    for row in rows:
        base = next((r for r in rows if r["dataset"] == row["dataset"] and r["run"] == row["speedup_base"]), None)
        row["predicted_speedup"] = _predicted(row, base)
    shape = {f.name: getattr(engine, f.name) for f in dataclasses.fields(engine) if f.name != "target"}
    dtype, form = checkpoint.params.dtype, checkpoint.params.products
    shape["products"] = str(form or products.default(dtype))
    shape |= {"capacity": engine.capacity, "dtype": str(dtype), "attention": engine.attention(dtype).name}
    shape["fingerprint"] = engine.fingerprint(dtype, form)
    lines = agreement.lines(checkpoint, engine, racers, done, plan.settings) if done else []
    return Outcome(rows, cost, found, shape, done, lines, interrupted)


def _warm_up(racer: Contender, checkpoint: Checkpoint, plan: Plan) -> float:
    """Runs every program of a run once; returns the seconds spent compiling or loading them."""
    prompts = plan.datasets[0][1][: plan.concurrency]
    brief = dataclasses.replace(plan.settings, max_tokens=min(8, plan.settings.max_tokens))
    with CompileCounter() as counter:
        conversations.answer(racer, checkpoint, prompts, brief, times=RoundTimes())
    return counter.compile_s + counter.load_s


def _rows(dataset: str, racers: Sequence[Contender], groups: list[Group], plan: Plan) -> list[dict[str, Any]]:
    """One row for each run on one data set, with speed-ups over the faster baseline."""
    rows = []
    for racer in racers:
        traces = [t for g in groups for turns in g.traces[racer.name] for t in turns]
        proposals = racer.drafter.proposals or None
        method = racer.name if racer.name in BASELINES else racer.name.rpartition("_k")[0]
        rows.append(
            metrics.summarise(
                traces,
                sum(g.wall[racer.name] for g in groups),
                dataset=dataset,
                run=racer.name,
                method=method,
                num_speculative_tokens=proposals,
            )
        )
        rows[-1] |= _parts([g.times[racer.name] for g in groups])
    plain = [r for r in rows if r["run"] in BASELINES]
    for row in rows:
        row |= metrics.speedup(row, plain)
        row |= {"exact_match": None, "native_match": None}
        base, name = row["speedup_base"], row["run"]
        if base is None:
            continue
        fair = [g for g in groups if g.sound(name) and g.sound(base)]
        counts = {who: [sum(map(len, g.tokens(who))) for g in fair] for who in (name, base)}
        seconds = {who: [g.seconds(who) for g in fair] for who in (name, base)}
        _, low, high = metrics.bootstrap_ratio(
            seconds[name], counts[name], seconds[base], counts[base], seed=plan.settings.seed
        )
        row["decode_speedup_low"], row["decode_speedup_high"] = low, high
        walls = {who: [g.wall[who] for g in fair] for who in (name, base)}
        _, low, high = metrics.bootstrap_ratio(
            walls[name], counts[name], walls[base], counts[base], seed=plan.settings.seed
        )
        row["speedup_low"], row["speedup_high"] = low, high
        if NATIVE in groups[0].traces and name != NATIVE:
            row["native_match"] = _equal(
                [t for g in groups for t in g.tokens(NATIVE)], [t for g in groups for t in g.tokens(name)]
            )
    return rows


def _parts(times: Sequence[RoundTimes]) -> dict[str, float | None]:
    """Mean milliseconds of the parts of a round, over the measured rounds themselves."""
    count = sum(t.rounds for t in times)
    return {
        f"{name}_ms": 1e3 * sum(getattr(t, name) for t in times) / count if count else None
        for name in ("draft", "verify", "host")
    }


def _equal(a: Sequence[tuple[int, ...]], b: Sequence[tuple[int, ...]]) -> float:
    return float(np.mean([x == y for x, y in zip(a, b, strict=True)]))


def _predicted(row: dict[str, Any], base: dict[str, Any] | None) -> float | None:
    if base is None or row["tokens_per_round"] is None or row["draft_ms"] is None or base["draft_ms"] is None:
        return None
    plain = base["draft_ms"] + base["verify_ms"] + base["host_ms"]
    return metrics.predicted_speedup(row["draft_ms"], row["verify_ms"], row["host_ms"], plain, row["tokens_per_round"])


def plan_of(
    names: Sequence[str],
    runs: Sequence[str],
    settings: Settings,
    *,
    path: str | None,
    num_prompts: int | None,
    **rest: Any,
) -> Plan:
    """Loads the data sets of a plan."""
    loaded = tuple((n, tuple(suites.load(n, path=path, num_prompts=num_prompts))) for n in names)
    return Plan(datasets=loaded, runs=tuple(runs), settings=settings, **rest)
