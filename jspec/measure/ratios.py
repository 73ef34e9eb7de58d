"""Comparisons between runs: speed-ups, their uncertainty, and what the parts predict.

Two averages of a speed-up exist and they answer different questions, so each has its own name:
the *overall* one divides total tok/s by total tok/s (long answers weigh more), the *mean per
prompt* one averages the ratio of each prompt (every prompt weighs the same).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jspec.errors import JspecError

Row = dict[str, Any]

# Resampled indices are drawn in pieces of about this many, so that memory stays small for any data set.
_PIECE = 1 << 20


def speedup(run: Mapping[str, Any], baselines: Iterable[Mapping[str, Any]]) -> Row:
    """Divides a run by the faster of the plain runs and names it.

    Args:
      run: a row of `metrics.summarise`.
      baselines: rows of the plain runs on the same prompts, with their `run` names.

    Returns:
      `speedup_base`, the name of the baseline with the highest output tok/s;
      `speedup_vs_baseline`, the ratio of output tok/s, prefill included;
      `decode_speedup`, the ratio of tok/s since the end of prefill. One base serves both, so that
      the two can be compared. All null where no baseline has finished a request.
    """
    usable = [b for b in baselines if b.get("output_throughput_tps")]
    if not usable:
        return {"speedup_base": None, "speedup_vs_baseline": None, "decode_speedup": None}
    base = max(usable, key=lambda b: b["output_throughput_tps"])
    return {
        "speedup_base": base["run"],
        "speedup_vs_baseline": _quotient(run.get("output_throughput_tps"), base["output_throughput_tps"]),
        "decode_speedup": _quotient(run.get("decode_tps"), base.get("decode_tps")),
    }


def prompt_speedups(num_times: ArrayLike, num_tokens: ArrayLike, den_times: ArrayLike, den_tokens: ArrayLike) -> Row:
    """Computes both averages of a speed-up from seconds and tokens per prompt, paired by prompt.

    Returns:
      `overall_tps`, tok/s of the numerator run over all prompts; `overall_speedup`, the ratio of the
      two totals; `mean_prompt_speedup`, the mean of the per-prompt ratios of tok/s. Prompts without
      a token on either side have no ratio and are left out of the last.
    """
    nt, nk, dt, dk = _paired(num_times, num_tokens, den_times, den_tokens)
    if not nt.size:
        return {"overall_tps": None, "overall_speedup": None, "mean_prompt_speedup": None}
    both = (nk > 0) & (dk > 0)
    per_prompt = (nk[both] / nt[both]) / (dk[both] / dt[both])
    return {
        "overall_tps": float(nk.sum() / nt.sum()),
        "overall_speedup": _quotient(float(nk.sum() / nt.sum()), float(dk.sum() / dt.sum())),
        "mean_prompt_speedup": float(per_prompt.mean()) if per_prompt.size else None,
    }


def bootstrap_ratio(
    num_times: ArrayLike,
    num_tokens: ArrayLike,
    den_times: ArrayLike,
    den_tokens: ArrayLike,
    *,
    seed: int,
    samples: int = 2000,
) -> tuple[float, float, float]:
    """Estimates the ratio of overall tok/s of two runs over the same prompts, with its uncertainty.

    Prompts are drawn with replacement, and a drawn prompt brings its figures from *both* runs: how
    hard a prompt is moves both alike and must not widen the interval. The interval speaks of the
    choice of prompts, not of drift of the machine; that is what interleaving the runs is for.

    Args:
      num_times, num_tokens: seconds and tokens of each prompt in the run in question.
      den_times, den_tokens: the same prompts, same order, in the run it is compared with.
      seed: of the resampling; the same seed gives the same interval.
      samples: number of resamples.

    Returns:
      ratio, and the 2.5 % and 97.5 % percentiles of the resampled ratios. The bounds are NaN for
      fewer than two prompts, and all three where the ratio is undefined.
    """
    nt, nk, dt, dk = _paired(num_times, num_tokens, den_times, den_tokens)
    if samples < 1:
        raise JspecError(f"`samples` is `{samples}`.", "at least 1 resample.", "use the default of 2000.")
    n = nt.size
    if n == 0 or nk.sum() == 0 or dk.sum() == 0:
        return math.nan, math.nan, math.nan
    ratio = float((nk.sum() / nt.sum()) / (dk.sum() / dt.sum()))
    if n < 2:
        return ratio, math.nan, math.nan
    rng = np.random.default_rng(seed)
    drawn = []
    step = max(1, _PIECE // n)
    for first in range(0, samples, step):
        pick = rng.integers(0, n, size=(min(step, samples - first), n))
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold no token at all
            drawn.append((nk[pick].sum(1) / nt[pick].sum(1)) / (dk[pick].sum(1) / dt[pick].sum(1)))
    resampled = np.concatenate(drawn)
    resampled = resampled[np.isfinite(resampled)]
    if not resampled.size:
        return ratio, math.nan, math.nan
    low, high = np.percentile(resampled, (2.5, 97.5))
    return ratio, float(low), float(high)


def predicted_speedup(
    draft_ms: float, verify_ms: float, host_ms: float, baseline_ms: float, tokens_per_round: float
) -> float:
    """Predicts the decode speed-up from the parts of a round.

    Args:
      draft_ms, verify_ms, host_ms: mean milliseconds a round spends drafting, verifying, and on all else.
      baseline_ms: milliseconds per token of plain decoding.
      tokens_per_round: emitted tokens per round, rounds without a draft included.

    Returns:
      time of plain decoding for the tokens of a round over the time of that round; below 1 is a
      slowdown. NaN where the parts add up to nothing. A measured speed-up far from this one means
      that the parts do not explain the round.
    """
    round_ms = draft_ms + verify_ms + host_ms
    return tokens_per_round * baseline_ms / round_ms if round_ms > 0 else math.nan


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _paired(*columns: ArrayLike) -> list[NDArray[np.float64]]:
    num_times, num_tokens, den_times, den_tokens = arrays = [np.asarray(c, dtype=np.float64) for c in columns]
    if any(a.ndim != 1 or a.shape != num_times.shape for a in arrays):
        raise JspecError(
            f"runs of {[a.shape for a in arrays]} figures were to be compared prompt by prompt.",
            "times and tokens of the same prompts in both runs: four lists of one length.",
            "leave out the prompts that only one of the runs has finished.",
        )
    times, tokens = np.stack([num_times, den_times]), np.stack([num_tokens, den_tokens])
    if not (np.isfinite(times).all() and (times > 0).all() and np.isfinite(tokens).all() and (tokens >= 0).all()):
        raise JspecError(
            "a prompt has a time that is not above 0, or a token count below 0.",
            "finite seconds above 0 and token counts of at least 0.",
            "leave out failed requests, and check the clock.",
        )
    return arrays
