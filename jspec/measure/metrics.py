"""From traces to one row of the benchmark: every figure, defined once.

| key | unit | definition |
|---|---|---|
| `latency_*` | ms | start to last token |
| `ttft_*` | ms | start to the end of the first round, whatever kind of token it brought |
| `tpot_*`, `itl_*` | ms | per request: (latency - TTFT) / (output tokens - tokens of the first round) |
| `itl_chunk_*` | ms | between the ends of consecutive rounds, all requests pooled; vLLM's ITL |
| `vllm_tpot_*` | ms | per request: (latency - TTFT) / (output tokens - 1) |
| `output_throughput_tps` | tok/s | output tokens / wall time of the run, prefill included |
| `decode_tps` | tok/s | output tokens / seconds since the end of prefill, summed over requests: one stream |
| `acceptance_rate` | 0 to 1 | accepted / proposed |
| `mean_acceptance_length` | tokens | 1 + accepted / drafts, so the target's own token counts |
| `acceptance_pos_k` | 0 to 1 | drafts with at least k accepted / all drafts |
| `tokens_per_round` | tokens | emitted / rounds, rounds without a draft included |
| `round_ms` | ms | time since the end of prefill / rounds |

A *draft* is a round with at least one proposal: a round with an empty proposal is a round but no
draft. All ratios pool over the run (total over total). A request whose denominator is 0 is left out
of the figure in question, and a figure without any request is null. Percentiles interpolate
linearly, as numpy's and vLLM's do. Failed requests are counted and used for nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.errors import JspecError
from jspec.measure.ratios import Row, bootstrap_ratio, predicted_speedup, prompt_speedups, speedup
from jspec.measure.trace import Round, Trace, accepted_prefix
from jspec.measure.vllm_format import vllm_result

__all__ = [
    "Round",
    "Row",
    "Trace",
    "accepted_prefix",
    "bootstrap_ratio",
    "identities",
    "predicted_speedup",
    "prompt_speedups",
    "speedup",
    "summarise",
    "vllm_result",
]


def summarise(
    traces: Iterable[Trace],
    wall_s: float,
    *,
    dataset: str | None = None,
    run: str | None = None,
    method: str | None = None,
    num_speculative_tokens: int | None = None,
) -> Row:
    """Computes the row of one run on one data set; definitions at the top of this file.

    Args:
      traces: the run's requests, failed ones included.
      wall_s: seconds during which this run had the machine. For runs interleaved prompt by prompt
        that is the sum of this run's own shares, not the time from the first to the last.
      dataset, run, method, num_speculative_tokens: labels, copied into the row.

    Returns:
      a flat dictionary of JSON values. `speedup_vs_baseline` is null until `speedup` fills it.
    """
    if not (math.isfinite(wall_s) and wall_s >= 0):
        raise JspecError(f"`wall_s` is `{wall_s}`.", "finite seconds of at least 0.", "check the clock of the run.")
    everything = list(traces)
    done = [t for t in everything if not t.failed]
    timed = [t for t in done if t.timed]
    output_tokens = sum(len(t.tokens) for t in done)
    decode_s = sum(t.decode_s for t in timed)
    rounds = [r for t in timed for r in t.live_rounds]
    row: Row = {
        "dataset": dataset,
        "run": run,
        "method": method,
        "num_speculative_tokens": num_speculative_tokens,
        "requests": len(done),
        "failed_requests": len(everything) - len(done),
        "input_tokens": sum(t.prompt_tokens for t in done),
        "output_tokens": output_tokens,
        "wall_s": wall_s,
        "request_throughput_rps": len(done) / wall_s if wall_s else None,
        "output_throughput_tps": output_tokens / wall_s if wall_s else None,
        "speedup_vs_baseline": None,
        "decode_tps": output_tokens / decode_s if decode_s else None,
        "rounds": len(rounds),
        "tokens_per_round": output_tokens / len(rounds) if rounds else None,
        "round_ms": 1e3 * decode_s / len(rounds) if rounds else None,
    }
    per_token = _per_token_s(timed)
    row |= spread("latency", [t.latency_s for t in timed])
    row |= spread("ttft", [t.ttft_s for t in timed])
    row |= spread("first_content", [t.content_start - t.start for t in timed if t.content_start is not None])
    row |= spread("itl", per_token)
    row |= spread("tpot", per_token)
    row |= spread("itl_chunk", [gap for t in timed for gap in t.chunk_gaps_s])
    row |= spread("vllm_tpot", [(t.latency_s - t.ttft_s) / (len(t.tokens) - 1) for t in timed if len(t.tokens) > 1])
    return row | _acceptance(rounds, num_speculative_tokens)


def identities(row: Mapping[str, Any], K: int, *, tolerance: float = 1e-9) -> list[str]:
    """Names the arithmetic laws of acceptance that a row breaks; an empty list means none.

    With exactly K proposals in every draft, the sum of p_1..p_K is the acceptance length - 1 and
    the acceptance rate is that sum / K; with any number of proposals p_k never rises with k. A row
    that breaks one of them by more than rounding mixes runs or definitions. Positions that a table
    leaves out skip the laws that need them, and a row without drafts breaks none.
    """
    length, rate = row.get("mean_acceptance_length"), row.get("acceptance_rate")
    if length is None or rate is None:
        return []
    broken = []
    survival = [row.get(f"acceptance_pos_{k}") for k in range(1, K + 1)]
    known = [p for p in survival if p is not None]
    if len(known) == K and abs(sum(known) - (length - 1)) > tolerance:
        broken.append(f"p_1..p_{K} add up to {sum(known):.6f}, the acceptance length - 1 is {length - 1:.6f}")
    if abs(rate * K - (length - 1)) > tolerance * K:
        broken.append(f"acceptance rate x {K} is {rate * K:.6f}, the acceptance length - 1 is {length - 1:.6f}")
    if any(b > a + tolerance for a, b in itertools.pairwise(known)):
        broken.append(f"p_k rises with k: {known}")
    return broken


def spread(name: str, seconds: Sequence[float]) -> Row:
    """Mean, median, p95 and p99 of some times as `NAME_mean_ms` and so on; nulls for none."""
    if not len(seconds):
        return {f"{name}_{s}_ms": None for s in ("mean", "p50", "p95", "p99")}
    ms = 1e3 * np.asarray(seconds, dtype=np.float64)
    p50, p95, p99 = np.percentile(ms, (50, 95, 99))
    return {
        f"{name}_mean_ms": float(ms.mean()),
        f"{name}_p50_ms": float(p50),
        f"{name}_p95_ms": float(p95),
        f"{name}_p99_ms": float(p99),
    }


def _per_token_s(timed: Iterable[Trace]) -> list[float]:
    values = []
    for t in timed:
        later = len(t.tokens) - t.live_rounds[0].emitted
        if later:
            values.append((t.latency_s - t.ttft_s) / later)
    return values


def _acceptance(rounds: Sequence[Round], num_speculative_tokens: int | None) -> Row:
    drafts = [r for r in rounds if r.proposed]
    proposed = sum(r.proposed for r in drafts)
    accepted = sum(r.accepted for r in drafts)
    # A position that no draft could have filled has no rate; one that drafts merely missed has 0.
    K = max([num_speculative_tokens or 0, *(r.proposed for r in drafts)])
    row: Row = {
        "drafts": len(drafts),
        "draft_tokens": proposed,
        "accepted_tokens": accepted,
        "acceptance_rate": accepted / proposed if drafts else None,
        "mean_acceptance_length": 1 + accepted / len(drafts) if drafts else None,
    }
    for k in range(1, max(K, 3) + 1):
        known = drafts and k <= K
        row[f"acceptance_pos_{k}"] = sum(r.accepted >= k for r in drafts) / len(drafts) if known else None
    return row
