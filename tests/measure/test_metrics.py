"""Figures against hand-computed traces, the laws between them, and comparisons between runs."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.errors import JspecError
from jspec.measure.metrics import (
    Round,
    Trace,
    accepted_prefix,
    bootstrap_ratio,
    identities,
    predicted_speedup,
    prompt_speedups,
    speedup,
    summarise,
    vllm_result,
)

_REFERENCE_KEYS = (
    "dataset run method num_speculative_tokens requests output_tokens request_throughput_rps output_throughput_tps "
    "speedup_vs_baseline latency_mean_ms latency_p50_ms latency_p95_ms latency_p99_ms ttft_mean_ms ttft_p50_ms "
    "ttft_p95_ms ttft_p99_ms itl_mean_ms itl_p50_ms itl_p95_ms itl_p99_ms tpot_mean_ms tpot_p50_ms tpot_p95_ms "
    "acceptance_rate acceptance_pos_1 acceptance_pos_2 acceptance_pos_3 mean_acceptance_length"
)
REFERENCE_KEYS = set(_REFERENCE_KEYS.split())


def trace(start: float, prefill_end: float, rounds: list[tuple[float, int, int, int]], finish: str = "stop") -> Trace:
    emitted = sum(r[1] for r in rounds)
    return Trace(start, prefill_end, tuple(Round(*r) for r in rounds), 7, tuple(range(emitted)), finish)


# The third round accepts all three proposals, but its second token is the end id: 4 tokens are cut to 2.
ENDS_INSIDE = trace(10.0, 10.2, [(10.5, 2, 3, 1), (10.8, 4, 3, 3), (11.0, 2, 3, 3)])
# No draft in the first round; the third is cut from 3 tokens to 1 by the limit; then the slot is
# padding, and what a drafter proposes for it is nobody's.
HITS_LIMIT = trace(
    20.0, 20.1, [(20.3, 1, 0, 0), (20.6, 3, 3, 2), (20.7, 1, 3, 2), (20.9, 0, 3, 3), (21.0, 0, 0, 0)], "length"
)


def plain(times: list[float], start: float = 0.0, prefill_end: float = 1.0) -> Trace:
    return trace(start, prefill_end, [(t, 1, 0, 0) for t in times])


def test_hand_computed_row():
    row = summarise([ENDS_INSIDE, HITS_LIMIT], 2.0, dataset="d", run="r", method="ngram", num_speculative_tokens=3)
    assert row.keys() >= REFERENCE_KEYS
    expected = {
        "dataset": "d",
        "run": "r",
        "method": "ngram",
        "num_speculative_tokens": 3,
        "requests": 2,
        "failed_requests": 0,
        "input_tokens": 14,
        "output_tokens": 13,
        "request_throughput_rps": 1.0,
        "output_throughput_tps": 6.5,
        "decode_tps": 13 / (0.8 + 0.6),
        "latency_mean_ms": 850.0,  # 1000 and 700: the padding after 20.7 is not waited for
        "latency_p50_ms": 850.0,
        "latency_p95_ms": 985.0,
        "latency_p99_ms": 997.0,
        "ttft_mean_ms": 400.0,  # 500 and 300
        "tpot_mean_ms": (500 / 6 + 400 / 4) / 2,  # 8 - 2 and 5 - 1 tokens after the first round
        "itl_mean_ms": (500 / 6 + 400 / 4) / 2,
        "itl_p50_ms": (500 / 6 + 400 / 4) / 2,
        "vllm_tpot_mean_ms": (500 / 7 + 400 / 4) / 2,
        "itl_chunk_mean_ms": (300 + 200 + 300 + 100) / 4,
        "itl_chunk_p50_ms": 250.0,
        "rounds": 6,
        "tokens_per_round": 13 / 6,
        "round_ms": 1400 / 6,
        "drafts": 5,
        "draft_tokens": 15,
        "accepted_tokens": 11,  # 1 + 3 + 3 + 2 + 2, the cut ones included
        "acceptance_rate": 11 / 15,
        "mean_acceptance_length": 1 + 11 / 5,
        "acceptance_pos_1": 1.0,
        "acceptance_pos_2": 4 / 5,
        "acceptance_pos_3": 2 / 5,
        "first_content_mean_ms": None,
    }
    for key, value in expected.items():
        assert row[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert identities(row, 3) == []


def test_plain_decoding_has_no_acceptance_and_both_tpots_agree():
    row = summarise([plain([1.5, 1.75, 2.25])], 2.25)
    acceptance = ["acceptance_rate", "mean_acceptance_length", *(f"acceptance_pos_{k}" for k in (1, 2, 3))]
    assert [row[key] for key in acceptance] == [None] * 5
    assert row["drafts"] == 0 and row["tokens_per_round"] == 1.0
    assert row["tpot_mean_ms"] == row["vllm_tpot_mean_ms"] == row["itl_chunk_mean_ms"] == pytest.approx(375.0)
    assert identities(row, 3) == []


def test_an_answer_of_one_round_has_a_first_token_but_no_time_per_token():
    row = summarise([trace(0, 1, [(2, 4, 3, 3)]), plain([2.0, 3.0])], 5.0)
    assert row["ttft_mean_ms"] == 2000
    assert row["tpot_mean_ms"] == row["itl_mean_ms"] == 1000  # of the second request alone
    assert row["vllm_tpot_mean_ms"] == 500  # vLLM counts 0 / 3 for the first


def test_no_request_at_all_is_a_row_of_nulls():
    row = summarise([], 0.0)
    assert row.keys() >= REFERENCE_KEYS
    assert row["requests"] == row["output_tokens"] == 0
    assert all(row[key] is None for key in row if key.endswith(("_ms", "_tps", "_rps")) or key.startswith("acceptance"))


def test_failed_requests_are_counted_and_used_for_nothing_else():
    failed = trace(0, 1, [(9, 5, 3, 3)], "error")
    with_failure = summarise([ENDS_INSIDE, failed, HITS_LIMIT], 2.0)
    assert with_failure.pop("failed_requests") == 1
    without = summarise([ENDS_INSIDE, HITS_LIMIT], 2.0)
    assert without.pop("failed_requests") == 0
    assert with_failure == without


def test_an_empty_answer_is_a_request_without_latency():
    row = summarise([plain([2.0]), trace(0, 1, [])], 2.0)
    assert row["requests"] == 2 and row["latency_mean_ms"] == 2000


def test_positions_beyond_the_proposals_are_null_and_missed_ones_are_zero():
    rounds = [(2.0, 2, 2, 1), (3.0, 1, 2, 0)]
    assert summarise([trace(0, 1, rounds)], 3.0)["acceptance_pos_3"] is None
    row = summarise([trace(0, 1, rounds)], 3.0, num_speculative_tokens=7)
    assert (row["acceptance_pos_1"], row["acceptance_pos_3"], row["acceptance_pos_7"]) == (0.5, 0.0, 0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_end": 9.0},
        {"start": math.nan},
        {"rounds": (Round(11.0, 2, 3, 1), Round(10.5, 6))},
        {"rounds": (Round(10.5, 8, 3, 4),)},
        {"rounds": (Round(10.5, 8, 3, -1),)},
        {"rounds": (Round(10.5, -1, 0, 0), Round(10.6, 9, 0, 0))},
        {"tokens": (1, 2, 3)},
    ],
)
def test_a_trace_that_cannot_be_is_refused(change):
    with pytest.raises(JspecError, match="Allowed: start <= prefill_end"):
        dataclasses.replace(ENDS_INSIDE, **change)


@pytest.mark.parametrize("wall_s", [-1.0, math.nan, math.inf])
def test_a_wall_time_that_cannot_be_is_refused(wall_s):
    with pytest.raises(JspecError, match="wall_s"):
        summarise([ENDS_INSIDE], wall_s)


# Known failures, by id.


def test_bm_2_acceptance_stops_at_the_first_refusal():
    accepted = accepted_prefix([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    assert accepted.tolist() == [1, 4, 0]
    rounds = [(2.0 + i, int(a) + 1, 4, int(a)) for i, a in enumerate(accepted)]
    row = summarise([trace(0, 1, rounds)], 4.0)
    assert [r[1] for r in rounds] == [2, 5, 1]
    assert [row[f"acceptance_pos_{k}"] for k in (1, 2, 4)] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert identities(row, 4) == []


def test_bm_3_the_rate_falls_with_k_by_arithmetic_while_the_length_stays():
    rows = [summarise([trace(0, 1, [(2.0, 3, K, 2), (3.0, 3, K, 2)])], 3.0) for K in (2, 4, 8)]
    assert [r["mean_acceptance_length"] for r in rows] == [3.0, 3.0, 3.0]
    assert [r["acceptance_rate"] for r in rows] == [1.0, 0.5, 0.25]
    assert all(identities(r, K) == [] for r, K in zip(rows, (2, 4, 8), strict=True))


def test_bm_4_overall_and_mean_of_prompts_are_two_figures_with_two_names():
    figures = prompt_speedups([1, 10], [10, 1000], [2, 40], [10, 1000])
    assert figures["overall_tps"] == pytest.approx(91.8, abs=0.05)
    assert figures["overall_speedup"] == pytest.approx(3.82, abs=0.005)
    assert figures["mean_prompt_speedup"] == pytest.approx(3.0)
    assert bootstrap_ratio([1, 10], [10, 1000], [2, 40], [10, 1000], seed=0)[0] == figures["overall_speedup"]


def test_bm_5_the_first_token_is_the_first_of_any_kind():
    # Reasoning from 1.0 s on, the answer proper from 6.0 s on.
    thinking = dataclasses.replace(plain([1.0, 2.0, 6.0, 7.0], prefill_end=0.5), content_start=6.0)
    row = summarise([thinking], 7.0)
    assert row["ttft_mean_ms"] == 1000
    assert row["first_content_mean_ms"] == 6000
    assert row["output_throughput_tps"] == pytest.approx(4 / 7)
    assert row["tpot_mean_ms"] == 2000


def test_bm_10_the_parts_of_a_round_predict_the_slowdown():
    assert predicted_speedup(5, 30, 0, 10, 3) == pytest.approx(0.857, abs=5e-4)
    assert predicted_speedup(0, 10, 0, 10, 1) == 1
    assert math.isnan(predicted_speedup(0, 0, 0, 10, 1))
    plain_row = summarise([plain([1.01, 1.02, 1.03, 1.04])], 1.04, run="baseline")
    slow = summarise([trace(0, 1, [(1.035, 3, 7, 2), (1.07, 3, 7, 2)])], 1.07, run="k7")
    assert speedup(slow, [plain_row])["decode_speedup"] == pytest.approx(6 / 7)
    assert predicted_speedup(5, 30, 0, plain_row["round_ms"], slow["tokens_per_round"]) == pytest.approx(6 / 7)


# Laws.


@st.composite
def runs(draw, K: int):
    """Traces of one run: every draft proposes K, any number is accepted, the last round may be cut."""
    traces = []
    for _ in range(draw(st.integers(1, 4))):
        clock = draw(st.floats(0, 100))
        start, clock = clock, clock + draw(st.floats(0, 1))
        prefill_end, rounds = clock, []
        for accepted in draw(st.lists(st.integers(0, K), min_size=1, max_size=6)):
            clock += draw(st.floats(1e-4, 1))
            rounds.append((clock, accepted + 1, K, accepted))
        end, emitted, proposed, accepted = rounds[-1]
        rounds[-1] = (end, draw(st.integers(1, emitted)), proposed, accepted)
        traces.append(trace(start, prefill_end, rounds))
    return traces


@given(st.integers(1, 8).flatmap(lambda K: st.tuples(st.just(K), runs(K))))
def test_full_proposals_obey_the_identities(drawn):
    K, traces = drawn
    row = summarise(traces, 10.0, num_speculative_tokens=K)
    assert identities(row, K) == []
    assert 1 <= row["mean_acceptance_length"] <= K + 1
    assert row["acceptance_rate"] == pytest.approx(np.mean([row[f"acceptance_pos_{k}"] for k in range(1, K + 1)]))
    assert row["tokens_per_round"] <= row["mean_acceptance_length"] + 1e-12  # the cut only takes away


@given(runs(3), st.randoms(use_true_random=False))
def test_order_and_padding_change_nothing(traces, random):
    padded = [
        dataclasses.replace(t, rounds=(*t.rounds, Round(t.end + 1, 0, 3, 3), Round(t.end + 2, 0))) for t in traces
    ]
    random.shuffle(padded)
    row, other = summarise(traces, 10.0), summarise(padded, 10.0)
    assert row == {key: pytest.approx(value) if isinstance(value, float) else value for key, value in other.items()}


@given(runs(3))
def test_both_ends_of_a_request_are_kept(traces):
    row = summarise(traces, 10.0)
    assert row["latency_mean_ms"] == pytest.approx(
        row["ttft_mean_ms"] + 1e3 * sum(sum(t.chunk_gaps_s) for t in traces) / len(traces)
    )


def test_identities_catch_planted_faults():
    good = summarise([ENDS_INSIDE], 1.0)
    assert identities(good, 3) == []
    assert identities(good | {"mean_acceptance_length": good["mean_acceptance_length"] - 1}, 3)  # bonus left out
    assert identities(good | {"acceptance_pos_2": 0.9}, 3)  # conditional where survival is meant
    assert identities(good | {"acceptance_rate": good["acceptance_rate"] + 0.01}, 3)  # another run's rate
    assert identities({**good, "acceptance_pos_1": 0.1, "acceptance_pos_2": 0.9}, 3)
    assert identities(summarise([HITS_LIMIT], 1.0), 3) == []
    short = trace(0, 1, [(2.0, 2, 1, 1), (3.0, 1, 3, 0)])  # one proposal cut short: K was not fixed
    assert identities(summarise([short], 3.0), 3)


def test_identities_hold_in_published_figures():
    published = {
        "acceptance_rate": 0.415486407892723,
        "acceptance_pos_1": 0.6332426800409706,
        "acceptance_pos_2": 0.38554727510330944,
        "acceptance_pos_3": 0.22766926853388902,
        "mean_acceptance_length": 2.246459223678169,
    }
    assert identities(published, 3) == []
    # Of seven positions only three were published; the rate still has to fit the length.
    k7 = {
        "acceptance_rate": 0.20277687384748888,
        "acceptance_pos_1": 0.6178056188306758,
        "acceptance_pos_2": 0.36526195899772207,
        "acceptance_pos_3": 0.20611237661351556,
        "mean_acceptance_length": 2.4194381169324224,
    }
    assert identities(k7, 7) == []
    assert identities(k7, 3)


# Comparisons.


def test_speedups_divide_by_the_faster_baseline_and_name_it():
    slow = {"run": "baseline", "output_throughput_tps": 50.0, "decode_tps": 80.0}
    fast = {"run": "baseline_native", "output_throughput_tps": 100.0, "decode_tps": 110.0}
    run = {"run": "ngram_k3", "output_throughput_tps": 85.4, "decode_tps": 121.0}
    figures = speedup(run, [slow, fast])
    assert figures["speedup_base"] == "baseline_native"
    assert figures["speedup_vs_baseline"] == pytest.approx(0.854)
    assert figures["decode_speedup"] == pytest.approx(1.1)
    assert speedup(fast, [slow, fast])["speedup_vs_baseline"] == 1.0
    nothing = {"speedup_base": None, "speedup_vs_baseline": None, "decode_speedup": None}
    assert speedup(run, []) == speedup(run, [summarise([], 0.0, run="baseline")]) == nothing
    assert speedup(summarise([], 0.0), [fast])["speedup_vs_baseline"] is None


def unpaired(num_times, num_tokens, den_times, den_tokens, *, seed, samples=2000):
    """The planted fault: each run draws prompts of its own."""
    rng = np.random.default_rng(seed)
    nt, nk, dt, dk = (np.asarray(a, float) for a in (num_times, num_tokens, den_times, den_tokens))
    a, b = rng.integers(0, nt.size, (2, samples, nt.size))
    ratios = (nk[a].sum(1) / nt[a].sum(1)) / (dk[b].sum(1) / dt[b].sum(1))
    return (nk.sum() / nt.sum()) / (dk.sum() / dt.sum()), *np.percentile(ratios, (2.5, 97.5))


def keeps_pairs(bootstrap) -> bool:
    """Prompts of very different speed, each exactly twice as fast: there is nothing to be unsure of."""
    tokens = np.array([5, 80, 128, 128, 30, 64])
    seconds = tokens * np.array([0.01, 0.02, 0.08, 0.03, 0.05, 0.01])
    ratio, low, high = bootstrap(seconds / 2, tokens, seconds, tokens, seed=1, samples=500)
    return max(abs(ratio - 2), abs(low - 2), abs(high - 2)) < 1e-12


def test_bootstrap_pairs_by_prompt_and_the_check_can_fail():
    assert keeps_pairs(bootstrap_ratio)
    assert not keeps_pairs(unpaired)


def coverage(interval) -> float:
    """How often an interval holds the ratio of the population that the prompts were drawn from."""
    truth = 2 / math.exp(0.2**2 / 2)  # total over total: 1 / E[1 / r] with r = 2 exp(0.2 z)
    hits = 0
    for experiment in range(200):
        rng = np.random.default_rng(experiment)
        tokens = rng.integers(16, 129, 40)
        den = tokens * np.exp(rng.normal(-4, 0.3, 40))
        num = den / (2 * np.exp(rng.normal(0, 0.2, 40)))
        _, low, high = interval(num, tokens, den, tokens, seed=experiment, samples=400)
        hits += low <= truth <= high
    return hits / 200


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    assert 0.88 <= coverage(bootstrap_ratio) <= 0.99

    def too_narrow(*args, **kwargs):
        ratio, low, high = bootstrap_ratio(*args, **kwargs)
        return ratio, ratio - (ratio - low) / 2, ratio + (high - ratio) / 2

    assert coverage(too_narrow) < 0.88


def test_bootstrap_is_a_function_of_its_seed():
    rng = np.random.default_rng(0)
    columns = [rng.uniform(1, 2, 20) for _ in range(4)]
    assert bootstrap_ratio(*columns, seed=3) == bootstrap_ratio(*columns, seed=3)
    assert bootstrap_ratio(*columns, seed=3) != bootstrap_ratio(*columns, seed=4)
    ratio, low, high = bootstrap_ratio(*columns, seed=3)
    assert low < ratio < high


def test_bootstrap_says_when_there_is_too_little():
    assert all(math.isnan(v) for v in bootstrap_ratio([], [], [], [], seed=0))
    assert all(math.isnan(v) for v in bootstrap_ratio([1, 1], [0, 0], [1, 1], [3, 3], seed=0))
    ratio, low, high = bootstrap_ratio([1], [10], [2], [10], seed=0)
    assert ratio == 2 and math.isnan(low) and math.isnan(high)
    assert prompt_speedups([], [], [], []) == dict.fromkeys(["overall_tps", "overall_speedup", "mean_prompt_speedup"])


@pytest.mark.parametrize(
    ("columns", "given"),
    [
        (([1, 2], [1, 2], [1], [1]), "compared prompt by prompt"),
        (([1], [1, 2], [1], [1]), "compared prompt by prompt"),
        (([[1]], [[1]], [[1]], [[1]]), "compared prompt by prompt"),
        (([0.0], [1], [1], [1]), "not above 0"),
        (([1], [-1], [1], [1]), "below 0"),
        (([1], [1], [math.nan], [1]), "not above 0"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(columns, given):
    with pytest.raises(JspecError, match=given):
        bootstrap_ratio(*columns, seed=0)
    with pytest.raises(JspecError, match=given):
        prompt_speedups(*columns)


# vLLM's keys.


def test_vllm_result_has_the_keys_and_definitions_of_vllm():
    result = vllm_result(
        [ENDS_INSIDE, HITS_LIMIT, trace(30, 31, [], "error")],
        2.0,
        model_id="org/model",
        label="d-r",
        max_concurrency=1,
        metadata={"drafter": "ngram"},
    )
    named = (
        "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency "
        "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput "
        "output_throughput total_token_throughput latencies queue_times max_output_tokens_per_s "
        "max_concurrent_requests rtfx spec_decode_acceptance_rate spec_decode_acceptance_length "
        "spec_decode_num_drafts spec_decode_draft_tokens spec_decode_accepted_tokens "
        "spec_decode_per_position_acceptance_rates"
    )
    statistics = {f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")}
    assert result.keys() == {*named.split()} | statistics | {"drafter"}
    assert (result["completed"], result["failed"], result["num_prompts"]) == (2, 1, 3)
    assert result["total_token_throughput"] == (14 + 13) / 2
    assert result["mean_ttft_ms"] == pytest.approx(400) and result["std_ttft_ms"] == pytest.approx(100)
    assert result["mean_tpot_ms"] == pytest.approx((500 / 7 + 100) / 2)
    assert result["mean_itl_ms"] == pytest.approx(225) and result["median_itl_ms"] == pytest.approx(250)
    assert result["p99_e2el_ms"] == pytest.approx(997)
    assert result["spec_decode_acceptance_rate"] == pytest.approx(100 * 11 / 15)
    assert result["spec_decode_acceptance_length"] == pytest.approx(3.2)
    assert result["spec_decode_per_position_acceptance_rates"] == [1.0, 0.8, 0.4]
    assert result["max_output_tokens_per_s"] == 6.0  # the first request's rounds at 0.5 s and 0.8 s
    assert result["max_concurrent_requests"] == 1


def test_vllm_details_are_per_request():
    result = vllm_result(
        [ENDS_INSIDE, trace(10.9, 11, [], "abort")], 2.0, model_id="m", label="l", texts=["a", ""], detailed=True
    )
    assert result["input_lens"] == [7, 7] and result["output_lens"] == [8, 0]
    assert result["itls"] == [pytest.approx([0.3, 0.2]), []]
    assert result["ttfts"] == [pytest.approx(0.5), 0.0]
    assert result["generated_texts"] == ["a", ""] and result["errors"] == ["", "abort"]


def test_vllm_result_of_plain_decoding_and_of_nothing():
    result = vllm_result([plain([2.0, 3.0]), plain([2.5, 3.5], start=0.5)], 4.0, model_id="m", label="l")
    assert not any(key.startswith("spec_decode") for key in result)
    assert result["max_concurrent_requests"] == 2
    empty = vllm_result([], 0.0, model_id="m", label="l")
    assert empty["completed"] == 0 and empty["output_throughput"] is None and empty["mean_ttft_ms"] is None
