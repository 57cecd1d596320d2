from __future__ import annotations

import pytest

from bench.report import COMPARISONS, series_of, table, text, whole

ROUNDS = [
    {
        "mlp 64 product": {"requests_per_s": 900.0, "rows_per_batch": 30.0, "p50_ms": 40.0},
        "mlp 64 unbatched": {"requests_per_s": 100.0, "p50_ms": 400.0},
        "mlp 64 direct": {"requests_per_s": 1000.0},
    },
    {
        "mlp 64 product": {"requests_per_s": 1600.0, "rows_per_batch": 32.0, "p50_ms": 20.0},
        "mlp 64 unbatched": {"requests_per_s": 200.0, "p50_ms": 200.0},
        "mlp 64 direct": {"requests_per_s": 2000.0},
    },
]
FACTS = {
    "processor": "a processor",
    "cores": 2,
    "system": "a system",
    "load_before": 0.1,
    "python": "3",
    "versions": {"grpcio": "1"},
    "protobuf_implementation": "upb",
}
COST = {"depth": 10, "lanes": 1, "deadlines": True, "levels": 3, "push_poll_leave_us": 2.0, "push_cancel_us": 1.0}
MICRO = {"queue": [COST], "batching": [{"row_bytes": 4096, "stack_us": 12.0, "split_us": 3.0, "memcpy_us": 10.0}]}


def test_series_turns_rounds_into_lists() -> None:
    series = series_of(ROUNDS)
    assert series["mlp 64 product"]["requests_per_s"] == [900.0, 1600.0]
    assert series["mlp 64 direct"] == {"requests_per_s": [1000.0, 2000.0]}


def test_series_leaves_out_what_one_round_lacks() -> None:
    assert series_of([{"a": {"x": 1.0, "y": 2.0}}, {"a": {"x": 3.0}}]) == {"a": {"x": [1.0, 3.0]}}


def test_whole_holds_ratios_of_what_was_measured_on_both_sides() -> None:
    ratios = whole(series_of(ROUNDS), {"machine": FACTS})["ratios"]
    assert {title: found["median"] for title, found in ratios.items()} == {
        "perceptron, 64 clients: rows/s, product / session.run of 64 rows": pytest.approx(0.85),
        "perceptron, 64 clients: throughput, batching on / off": pytest.approx(8.5),
    }
    assert set(ratios) <= {one.title for one in COMPARISONS}


def test_text_begins_with_ratios_and_says_what_batching_gains() -> None:
    said = text(series_of(ROUNDS), FACTS, {"1": 100.0, "64": 3000.0}, MICRO)
    assert said.startswith("Ratios")
    assert "0.85 (0.80 - 0.90)" in said
    assert "throughput 8.5 x, mean batch 31.0 rows" in said
    assert "1.50" in said


def test_table_aligns_the_first_column_left_and_the_others_right() -> None:
    assert table([["a", "10"], ["long", "5"]]) == "  a     10\n  long   5"
