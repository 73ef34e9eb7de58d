"""A run in the keys of `vllm bench serve --save-result`, with vLLM's own definitions.

Tools that read vLLM's result files can read these. Where a key needs something that does not exist
here (a server queue, audio, goodput targets) it has the value vLLM writes when the feature is off.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.measure.trace import Trace


def vllm_result(
    traces: Iterable[Trace],
    wall_s: float,
    *,
    model_id: str,
    label: str,
    max_concurrency: int | None = None,
    num_prompts: int | None = None,
    tokenizer_id: str | None = None,
    texts: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    detailed: bool = False,
    now: datetime.datetime | None = None,
) -> dict[str, Any]:
    """Builds the result of one run.

    Args:
      traces: the run's requests, in the order in which they were sent.
      wall_s: seconds during which this run had the machine.
      model_id, tokenizer_id: names for the file; the tokenizer's defaults to the model's.
      label: the run's name, first part of vLLM's file name.
      max_concurrency, num_prompts: as given on the command line; `num_prompts` defaults to the requests.
      texts: the answers, only used with `detailed`.
      metadata: further keys, such as the drafter and K.
      detailed: also write the lists per request that vLLM keeps for `--save-detailed`.
      now: time stamp of the file.

    Returns:
      JSON values. Times are seconds except for the keys that end in `_ms`; `tpot` divides by output
      tokens - 1, `itl` is the time between rounds, and `std` is the population's. Differences from
      vLLM: `max_output_tokens_per_s` counts tokens where vLLM counts stream chunks, which hold
      several tokens under speculation; a figure without data is null where vLLM writes 0.
    """
    everything = list(traces)
    done = [t for t in everything if not t.failed]
    timed = [t for t in done if t.timed]
    total_input = sum(t.prompt_tokens for t in done)
    total_output = sum(len(t.tokens) for t in done)
    result: dict[str, Any] = {
        "date": (now or datetime.datetime.now()).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "jspec",
        "backend": "jspec",
        "label": label,
        "model_id": model_id,
        "tokenizer_id": tokenizer_id or model_id,
        "num_prompts": len(everything) if num_prompts is None else num_prompts,
        **(metadata or {}),
        "request_rate": "inf",  # prompts are sent as soon as a slot is free
        "burstiness": 1.0,
        "max_concurrency": max_concurrency,
        "duration": wall_s,
        "completed": len(done),
        "failed": len(everything) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": _rate(len(done), wall_s),
        "request_goodput": None,
        "output_throughput": _rate(total_output, wall_s),
        "total_token_throughput": _rate(total_input + total_output, wall_s),
        "latencies": [t.latency_s if not t.failed else 0.0 for t in everything],
        "queue_times": [0.0 for _ in everything],
        "max_output_tokens_per_s": _peak_tokens_per_s(timed),
        "max_concurrent_requests": _peak_concurrency(timed),
        "rtfx": 0.0,
    }
    if detailed:
        result |= {
            "input_lens": [t.prompt_tokens for t in everything],
            "output_lens": [len(t.tokens) if not t.failed else 0 for t in everything],
            "ttfts": [t.ttft_s if t.timed else 0.0 for t in everything],
            "itls": [t.chunk_gaps_s for t in everything],
            "start_times": [t.start for t in everything],
            "generated_texts": list(texts) if texts is not None else ["" for _ in everything],
            "errors": [t.finish if t.failed else "" for t in everything],
        }
    result |= _speculation(timed)
    result |= _statistics("ttft", [t.ttft_s for t in timed])
    result |= _statistics("tpot", [(t.latency_s - t.ttft_s) / (len(t.tokens) - 1) for t in timed if len(t.tokens) > 1])
    result |= _statistics("itl", [gap for t in timed for gap in t.chunk_gaps_s])
    result |= _statistics("e2el", [t.latency_s for t in timed])
    return result


def _speculation(timed: Sequence[Trace]) -> dict[str, Any]:
    """vLLM's keys for speculation, absent without drafts; its acceptance rate is in per cent."""
    drafts = [r for t in timed for r in t.live_rounds if r.proposed]
    if not drafts:
        return {}
    proposed = sum(r.proposed for r in drafts)
    accepted = sum(r.accepted for r in drafts)
    deepest = max(r.proposed for r in drafts)
    return {
        "spec_decode_acceptance_rate": 100 * accepted / proposed,
        "spec_decode_acceptance_length": 1 + accepted / len(drafts),
        "spec_decode_num_drafts": len(drafts),
        "spec_decode_draft_tokens": proposed,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [
            sum(r.accepted > position for r in drafts) / len(drafts) for position in range(deepest)
        ],
    }


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    if not len(seconds):
        return {f"{s}_{name}_ms": None for s in ("mean", "median", "std", "p99")}
    ms = 1e3 * np.asarray(seconds, dtype=np.float64)
    return {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
        f"p99_{name}_ms": float(np.percentile(ms, 99)),
    }


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds else None


def _peak_tokens_per_s(timed: Sequence[Trace]) -> float:
    """The most tokens in one second, in seconds counted from the first request's start."""
    if not timed:
        return 0.0
    first = min(t.start for t in timed)
    buckets: dict[int, int] = {}
    for t in timed:
        for r in t.live_rounds:
            second = math.floor(r.end - first)
            buckets[second] = buckets.get(second, 0) + r.emitted
    return float(max(buckets.values()))


def _peak_concurrency(timed: Sequence[Trace]) -> int:
    # At equal times a request that ends comes before one that starts, so that a handover counts once.
    events = sorted([(t.start, 1) for t in timed] + [(t.end, -1) for t in timed])
    return int(max(np.cumsum([change for _, change in events]), default=0))
