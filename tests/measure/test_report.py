"""Tables for people, the document for programs, and what is said about the machine."""

import datetime
import json
import math
import re

import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.measure import hardware
from jspec.measure.card import Card, floor_tps, kv_bytes_per_token
from jspec.measure.metrics import Round, Trace, speedup, summarise, vllm_result
from jspec.measure.report import (
    LEGEND,
    detail_table,
    document,
    notes,
    parity_lines,
    ranked,
    save_result,
    table,
    time_split_gap,
)

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
# A published row, and the line that was printed for it.
PUBLISHED = {
    "dataset": "math500", "run": "dspark_k3", "requests": 500, "output_throughput_tps": 131.0061,
    "speedup_vs_baseline": 1.15472, "latency_mean_ms": 972.824, "latency_p95_ms": 1383.579,
    "ttft_mean_ms": 139.16, "ttft_p95_ms": 243.83, "itl_mean_ms": 6.59, "itl_p95_ms": 9.67, "tpot_mean_ms": 6.59,
    "tpot_p95_ms": 9.67, "acceptance_rate": 0.44804, "acceptance_pos_1": 0.65409, "acceptance_pos_2": 0.42191,
    "acceptance_pos_3": 0.26815, "mean_acceptance_length": 2.34415,
}  # fmt: skip
PRINTED = (
    "| math500 | dspark_k3 | 500 | 131.01 | 1.155x | 972.82/1383.58 | 139.16/243.83 | 6.59/9.67 | 6.59/9.67 "
    "| 44.80% | 65.41%/42.19%/26.82% | 2.344 |"
)
HEADER = (
    "| Dataset | Run | Req | Output tok/s | Speedup | Latency mean/p95 ms | TTFT mean/p95 ms | ITL mean/p95 ms "
    "| TPOT mean/p95 ms | Accept rate | Accept p1/p2/p3 | Accept len |"
)


def squeezed(text: str) -> list[str]:
    return [re.sub(r" +", " ", line) for line in text.splitlines()]


def cells(text: str) -> list[list[str]]:
    return [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines()]


def baseline_row() -> dict:
    rounds = (Round(2.0, 1), Round(3.0, 1))
    row = summarise([Trace(0, 1, rounds, 5, (1, 2), "length")], 3.0, dataset="math500", run="baseline")
    return row | speedup(row, [row])


def test_the_table_prints_published_rows_as_published():
    lines = squeezed(table([PUBLISHED]))
    assert lines[0] == HEADER
    assert lines[2] == PRINTED


def test_a_baseline_has_dashes_where_nothing_was_drafted():
    (line,) = cells(table([baseline_row()]))[2:]
    assert line[:5] == ["math500", "baseline", "1", "0.67", "1.000x"]
    assert line[-3:] == ["—", "-/-/-", "—"]


def test_tables_are_markdown_and_aligned():
    rows = [PUBLISHED, baseline_row(), {"dataset": "a|b\nc", "run": "x" * 30}, {}, summarise([], 0.0)]
    for text in (table(rows), detail_table(rows)):
        lines = text.splitlines()
        assert len({len(line) for line in lines}) == 1
        assert len({len(line) for line in cells(text)}) == 1
        assert len(lines) == 2 + len(rows)
        assert re.fullmatch(r"\|( -+:? \|)+", lines[1])
    assert cells(table(rows))[4][0] == "a\\|b c"


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_what_is_not_a_number_is_a_dash(value):
    row = PUBLISHED | {"speedup_vs_baseline": value, "acceptance_pos_2": value, "latency_p95_ms": value}
    (line,) = cells(table([row]))[2:]
    assert (line[4], line[5], line[10]) == ("—", "972.82/-", "65.41%/-/26.82%")


def test_the_second_table():
    row = PUBLISHED | {
        "tokens_per_round": 2.3, "decode_tps": 150.0, "decode_speedup": 1.2, "decode_speedup_low": 1.1,
        "decode_speedup_high": 1.31, "exact_match": 1.0, "native_match": 0.99996, "draft_ms": 1.5, "verify_ms": 20.0,
        "host_ms": 0.25, "predicted_speedup": 1.22, "compile_s": 12.34,
    }  # fmt: skip
    (line,) = cells(detail_table([row]))[2:]
    assert line == [
        "math500", "dspark_k3", "2.300", "150.00", "1.200x [1.100, 1.310]", "100%", "99.9%", "1.50/20.00/0.25",
        "1.220x", "12.3",
    ]  # fmt: skip


def test_bm_10_a_slowdown_is_called_one():
    row = {
        "dataset": "math500", "run": "ngram_k7", "speedup_vs_baseline": 0.857, "speedup_base": "baseline_native",
        "draft_ms": 5.0, "verify_ms": 30.0, "host_ms": 0.0, "round_ms": 35.1,
    }  # fmt: skip
    assert "0.857x" in table([row])
    assert notes([row]) == ["ngram_k7 on math500: a slowdown, 0.857x the output tok/s of baseline_native."]
    # 35 of 35.1 ms are explained; of 40 ms they are not, and that is said.
    assert abs(time_split_gap(row)) < 0.01
    assert "add up to 87.5% of the round's time" in notes([row | {"round_ms": 40.0}])[1]
    assert time_split_gap({"round_ms": 40.0}) is None


def test_notes_say_what_must_not_be_missed():
    assert notes([PUBLISHED, baseline_row(), {}]) == []
    row = {"dataset": "d", "run": "r", "speedup_vs_baseline": 1.01, "exact_match": 0.9999}
    said = notes(
        [row | {"decode_speedup_low": 0.9, "decode_speedup_high": 1.1, "compiles_in_window": 2, "failed_requests": 1}]
    )
    assert [s.removeprefix("r on d: ") for s in said] == [
        "no difference shown, the interval of its decode speedup holds 1.",
        "NOT exact, 99.9% of the prompts equal the engine without a drafter.",
        "2 compilations inside the measured time.",
        "1 requests failed and are in no figure.",
    ]
    # The slower of two baselines is not a run that could have been a speed-up of itself.
    base = baseline_row()
    assert notes([base | {"speedup_vs_baseline": 0.999999}]) == []


def test_bm_1_a_parity_names_its_promise_and_every_breach():
    lines = parity_lines("exact (same engine, no drafter)", 64, [(3, 17, 0.00123), (9, 0, None)])
    assert lines[0] == "exact (same engine, no drafter): 62 of 64 prompts equal."
    assert lines[1:] == [
        "  prompt 3: first difference at token 17, top-2 gap 0.00123",
        "  prompt 9: first difference at token 0, top-2 gap not recorded",
    ]
    assert parity_lines("native", 40, [(i, 0, None) for i in range(20)])[-1] == "  and 12 more"
    assert not any("lossless" in line for line in (*lines, *LEGEND))


def test_bm_3_a_sweep_is_ranked_by_speed():
    rows = [
        {"dataset": "d", "run": "k2", "output_throughput_tps": 90.0, "acceptance_rate": 1.0},
        {"dataset": "d", "run": "k4", "output_throughput_tps": 120.0, "acceptance_rate": 0.5},
        {"dataset": "d", "run": "k8", "output_throughput_tps": 110.0, "acceptance_rate": 0.25},
        {"dataset": "d", "run": "none", "output_throughput_tps": None},
    ]
    assert [r["run"] for r in ranked(rows)] == ["k4", "k8", "k2", "none"]


# The document.


def test_the_document_is_one_line_of_strict_json():
    row = summarise([], 0.0, run="r\u2028\n") | {"nan": math.nan, "inf": [-math.inf, np.float32(0.5)]}
    text = document(
        device={"name": "cpu"},
        versions={"jax": None},
        engine={"B": np.int64(1), "dtype": np.dtype("float32"), "flags": (True, np.bool_(False))},
        probe={"rerun": True},
        runs=[row],
        extra={"command": ["jspec", "bench"], "schema": 99},
    )
    assert len(text.splitlines()) == 1 and text.isascii()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert next(iter(found)) == "schema" and found["schema"] == 1
    assert set(found) == {"schema", "device", "versions", "engine", "probe", "runs", "command"}
    assert found["engine"] == {"B": 1, "dtype": "float32", "flags": [True, False]}
    assert found["runs"][0]["nan"] is None and found["runs"][0]["inf"] == [None, 0.5]
    assert found["runs"][0]["latency_mean_ms"] is None


def results() -> list[dict]:
    one = Trace(0, 1, (Round(2.0, 1),), 5, (1,), "length")
    return [
        vllm_result([one], 2.0, model_id="org/Model-1", label=label, max_concurrency=4, now=NOW)
        for label in ("d-a", "d-a", "../escape")
    ]


def test_results_are_saved_under_vllms_names_and_never_overwritten(tmp_path):
    folder = tmp_path / "new" / "results"
    files = save_result(folder, '{"schema": 1}', results(), now=NOW)
    assert [f.name for f in files] == [
        "jspec-20260102-030405.json",
        "d-a-infqps-concurrency4-Model-1-20260102-030405.json",
        "d-a-infqps-concurrency4-Model-1-20260102-030405-1.json",
        ".._escape-infqps-concurrency4-Model-1-20260102-030405.json",
    ]
    assert all(f.parent == folder for f in files)
    assert json.loads(files[1].read_text())["completed"] == 1
    again = save_result(folder, "{}", now=NOW)
    assert again[0].name == "jspec-20260102-030405.1.json"
    assert json.loads(files[0].read_text()) == {"schema": 1}


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JspecError, match="--result-dir"):
        save_result(tmp_path / "file" / "results", "{}")


# The machine.


def test_the_cost_card_bounds_plain_decoding():
    kv = kv_bytes_per_token(layers=30, kv_heads=3, head_width=64, bytes_per_value=2)
    assert kv == 23_040
    assert floor_tps(1, weight_bytes=240_000_000, kv_bytes=0, bandwidth_gb_s=24.0) == 100.0
    card = Card(
        model="m", dtype="bfloat16", weight_bytes=240_000_000, kv_bytes_per_token=kv, context=1000,
        bandwidth_gb_s=24.0, bandwidth_source="given", l3_bytes=32 << 20,
    )  # fmt: skip
    assert card.floor_tps(1) == pytest.approx(24e9 / (240e6 + 23.04e6))
    assert card.floor_tps(8) == pytest.approx(8 * 24e9 / (240e6 + 8 * 23.04e6))
    text = "\n".join(card.lines())
    assert all(part in text for part in ("240.0 MB", "23.0 kB a token", "24.0 GB/s (given)", "32 MiB", "91.2 tok/s"))
    assert "does not bind" not in text
    assert json.loads(json.dumps(card.as_dict()))["floor_tps"]["1"] == card.floor_tps(1)
    small = Card(**{**vars_of(card), "weight_bytes": 1 << 20})
    assert "does not bind" in "\n".join(small.lines())
    with pytest.raises(JspecError):
        Card(**{**vars_of(card), "bandwidth_gb_s": math.nan})


def vars_of(card: Card) -> dict:
    return {name: getattr(card, name) for name in card.__dataclass_fields__}


def test_the_bandwidth_is_a_plausible_number():
    # 64 MiB, so that the suite stays quick; the figure may then be that of a cache.
    assert 0.1 < hardware.read_bandwidth(size=64 << 20, repeats=2) < 10_000
    with pytest.raises(JspecError, match="1 GiB"):
        hardware.read_bandwidth(size=0)


def test_the_machine_is_described_in_json():
    about = json.loads(json.dumps({**hardware.device(), **hardware.versions()}))
    assert about["name"] and about["cores"] >= 1 and about["numpy"] == np.__version__
    assert about["l3_bytes"] is None or about["l3_bytes"] > 1 << 16
