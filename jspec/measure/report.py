"""Rows for people: the table, the reading of it, and what was checked.

All functions return text and print nothing. Tables are valid Markdown and aligned for a terminal.
A missing figure is a dash, never a zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jspec.measure.document import document, prepare, save_result

__all__ = ["LEGEND", "detail_table", "document", "notes", "parity_lines", "prepare", "ranked", "save_result", "table"]

_DASH = "—"
_TIME_SPLIT_TOLERANCE = 0.01

LEGEND = (
    "Speedup: output tok/s over that of the faster plain run, prefill included. "
    "Decode speedup: the same since the end of prefill.",
    "TTFT: start to the end of the first round. "
    "ITL and TPOT: (latency - TTFT) / (output tokens - tokens of the first round).",
    "Accept rate: accepted / proposed. pK: drafts with at least K accepted / all drafts. "
    "Accept len: 1 + accepted / drafts, bonus token included.",
    "Tok/round: emitted / rounds, rounds without a draft included. "
    "Predicted: tok/round x plain ms per token / (draft + verify + host ms).",
    "Exact: prompts equal to the same engine without a drafter. Native: prompts equal to the N = 1 program.",
    "Intervals: 95 %, resampling prompts in pairs.",
)


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The main table, one line a run, in the order given.

    `rows` are those of `metrics.summarise` with `speedup_vs_baseline` filled in. Times are in
    milliseconds; 0.854x is a slowdown.
    """
    head = (
        "Dataset", "Run", "Req", "Output tok/s", "Speedup", "Latency mean/p95 ms", "TTFT mean/p95 ms",
        "ITL mean/p95 ms", "TPOT mean/p95 ms", "Accept rate", "Accept p1/p2/p3", "Accept len",
    )  # fmt: skip
    return _markdown(
        head,
        [
            (
                _label(r.get("dataset")),
                _label(r.get("run")),
                _number(r.get("requests"), "d"),
                _number(r.get("output_throughput_tps"), ".2f"),
                _number(r.get("speedup_vs_baseline"), ".3f", "x"),
                *(f"{_ms(r, name, 'mean')}/{_ms(r, name, 'p95')}" for name in ("latency", "ttft", "itl", "tpot")),
                _percent(r.get("acceptance_rate")),
                "/".join(_percent(r.get(f"acceptance_pos_{k}"), missing="-") for k in (1, 2, 3)),
                _number(r.get("mean_acceptance_length"), ".3f"),
            )
            for r in rows
        ],
    )


def detail_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The second table: whether the text is the same, and where the time goes.

    Besides the keys of `metrics.summarise` it reads `decode_speedup`, `decode_speedup_low`,
    `decode_speedup_high`, `exact_match`, `native_match` (shares from 0 to 1), `draft_ms`,
    `verify_ms`, `host_ms`, `predicted_speedup` and `compile_s`; what a row lacks is a dash.
    """
    head = (
        "Dataset", "Run", "Tok/round", "Decode tok/s", "Decode speedup [95%]", "Exact", "Native",
        "Draft/verify/host ms", "Predicted", "Compile s",
    )  # fmt: skip
    return _markdown(
        head,
        [
            (
                _label(r.get("dataset")),
                _label(r.get("run")),
                _number(r.get("tokens_per_round"), ".3f"),
                _number(r.get("decode_tps"), ".2f"),
                _interval(r),
                _share(r.get("exact_match")),
                _share(r.get("native_match")),
                "/".join(_number(r.get(key), ".2f", missing="-") for key in ("draft_ms", "verify_ms", "host_ms")),
                _number(r.get("predicted_speedup"), ".3f", "x"),
                _number(r.get("compile_s"), ".1f"),
            )
            for r in rows
        ],
    )


def notes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Says in words what a reader must not miss: slowdowns, texts that differ, figures that do not add up."""
    lines = []
    for r in rows:
        name = f"{r.get('run')} on {r.get('dataset')}"
        ratio = _finite(r.get("speedup_vs_baseline"))
        base = r.get("speedup_base")
        if ratio is not None and ratio < 1 and base != r.get("run"):
            lines.append(f"{name}: a slowdown, {ratio:.3f}x the output tok/s of {base or 'the baseline'}.")
        low, high = _finite(r.get("decode_speedup_low")), _finite(r.get("decode_speedup_high"))
        if low is not None and high is not None and low <= 1 <= high and base != r.get("run"):
            lines.append(f"{name}: no difference shown, the interval of its decode speedup holds 1.")
        exact = _finite(r.get("exact_match"))
        if exact is not None and exact < 1:
            lines.append(f"{name}: NOT exact, {_share(exact)} of the prompts equal the engine without a drafter.")
        gap = time_split_gap(r)
        if gap is not None and abs(gap) > _TIME_SPLIT_TOLERANCE:
            lines.append(f"{name}: draft, verify and host ms add up to {100 * (1 + gap):.1f}% of the round's time.")
        if r.get("compiles_in_window"):
            lines.append(f"{name}: {r['compiles_in_window']} compilations inside the measured time.")
        if r.get("failed_requests"):
            lines.append(f"{name}: {r['failed_requests']} requests failed and are in no figure.")
    return lines


def time_split_gap(row: Mapping[str, Any]) -> float | None:
    """Relative difference of draft + verify + host ms from the measured time of a round; None if unknown."""
    parts = [_finite(row.get(key)) for key in ("draft_ms", "verify_ms", "host_ms")]
    whole = _finite(row.get("round_ms"))
    known = [p for p in parts if p is not None]
    return sum(known) / whole - 1 if whole and len(known) == len(parts) else None


def parity_lines(
    promise: str, prompts: int, differences: Sequence[tuple[int, int, float | None]], *, shown: int = 8
) -> list[str]:
    """States a promise, how many prompts kept it, and how each other one broke it.

    Args:
      promise: what was compared, for instance "exact (same engine, no drafter)".
      prompts: how many were compared.
      differences: (prompt, index of the first differing token, gap between the two best logits
        there or None) of each prompt that differs.
      shown: at most this many differences get a line of their own.
    """
    lines = [f"{promise}: {prompts - len(differences)} of {prompts} prompts equal."]
    for prompt, index, gap in differences[:shown]:
        margin = "not recorded" if gap is None else f"{gap:.3g}"
        lines.append(f"  prompt {prompt}: first difference at token {index}, top-2 gap {margin}")
    if len(differences) > shown:
        lines.append(f"  and {len(differences) - shown} more")
    return lines


def ranked(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Orders a sweep by output tok/s, fastest first, data set by data set.

    Never by acceptance rate: for a given drafter that falls as K grows, by arithmetic alone.
    """
    return sorted(rows, key=lambda r: (str(r.get("dataset")), -(_finite(r.get("output_throughput_tps")) or 0.0)))


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    # The two name columns read from the left, figures line up on the right.
    aligned = [
        [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in (head, *body)
    ]
    rule = ["-" * w if i < 2 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (aligned[0], rule, *aligned[1:]))


def _finite(value: Any) -> float | None:
    if value is None or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def _number(value: Any, spec: str, unit: str = "", missing: str = _DASH) -> str:
    number = _finite(value)
    if number is None:
        return missing
    return f"{int(number) if spec == 'd' else number:{spec}}{unit}"


def _percent(value: Any, missing: str = _DASH) -> str:
    number = _finite(value)
    return missing if number is None else f"{100 * number:.2f}%"


def _share(value: Any) -> str:
    """A share in per cent, rounded down: only all prompts are 100%."""
    number = _finite(value)
    return _DASH if number is None else "100%" if number >= 1 else f"{math.floor(1000 * number) / 10:.1f}%"


def _interval(row: Mapping[str, Any]) -> str:
    ratio = _number(row.get("decode_speedup"), ".3f", "x")
    low, high = _finite(row.get("decode_speedup_low")), _finite(row.get("decode_speedup_high"))
    return ratio if low is None or high is None else f"{ratio} [{low:.3f}, {high:.3f}]"


def _ms(row: Mapping[str, Any], name: str, statistic: str) -> str:
    return _number(row.get(f"{name}_{statistic}_ms"), ".2f", missing="-")


def _label(value: Any) -> str:
    """A name as a table cell: a bar or a line break in it must not make another cell."""
    return _DASH if value is None else " ".join(str(value).split()).replace("|", "\\|")
