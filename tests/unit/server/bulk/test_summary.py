"""What is said once a job has ended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from paceline.server.bulk.summary import Outcome, Summary
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BadRow


def summary(**counts: float) -> Summary:
    """Of a job of 4 units with 1000 rows each, all planned, with `counts`."""
    tally = Tally(units=4, rows=4000, planned_share=1)
    counts = {"rows_executed": counts.get("rows_read", 0), **counts}
    for name, count in counts.items():
        setattr(tally, name, count)
    return Summary(Outcome.FINISHED, "", "magika", Path("out"), (0, 1), 90.0, 80.0, 300 << 20, tally)


def whole() -> Summary:
    return summary(
        units_done=4, rows_read=4000, rows_written=4000, executions=160, rows_executed=4000, elements=100,
        filled_elements=5,
    )  # fmt: skip


def test_finished_job_says_rows_speed_batches_and_place() -> None:
    assert whole().text().splitlines() == [
        "finished: 4,000 rows in 4 parts",
        "this time: 4,000 rows in 1 min 20 s, 50.0 rows/s, 25.0 rows/batch, 5.0 % padding",
        "in all: 1 min 30 s, 300 MiB of memory at most",
        "output: out",
    ]


def test_rows_at_fault_come_with_their_commonest_reasons() -> None:
    one = summary(units_done=4, rows_read=4000)
    for letter, times in zip("abcdef", (1, 20, 3, 4, 5, 7), strict=True):
        one.tally.add_bad([BadRow(place, f"reason {letter}") for place in range(times)])
    lines = one.text().splitlines()
    assert lines[2] == "at fault: 40 rows (1 %)"
    assert [line.split(maxsplit=1) for line in lines[3:9]] == [
        ["20", "reason b"],
        ["7", "reason f"],
        ["5", "reason e"],
        ["4", "reason d"],
        ["3", "reason c"],
        ["1", "other reasons"],
    ]
    assert lines[10] == "output: out, rows at fault: out/_bad"
    assert "--retry-bad" in lines[11]


def test_second_run_of_finished_job_says_so() -> None:
    one = summary(units_before=4, rows_before=4000, rows_bad_before=2)
    lines = one.text().splitlines()
    assert lines[0] == "finished: 4,000 rows in 4 parts, all of them earlier: there was nothing to do"
    assert lines[1] == "at fault: 2 rows (0.05 %, 2 of them found earlier)"


def test_resumed_job_tells_its_own_speed() -> None:
    one = summary(units_before=3, rows_before=3000, units_done=1, rows_read=1000)
    assert one.text().splitlines()[:2] == [
        "finished: 4,000 rows in 4 parts",
        "this time: 1,000 rows in 1 min 20 s, 12.5 rows/s",
    ]


def test_stopped_job_says_how_to_go_on() -> None:
    one = replace(summary(units_done=1, rows_read=1700), outcome=Outcome.STOPPED, why="by SIGTERM")
    lines = one.text().splitlines()
    assert lines[0] == "stopped: by SIGTERM"
    assert lines[-1] == "next: start it again to go on; parts that are finished, 1 of 4, won't be computed again"


def test_stopped_job_counts_what_was_computed() -> None:
    one = replace(summary(rows_read=2492, rows_executed=1890, rows_bad=10), outcome=Outcome.STOPPED, why="by SIGINT")
    assert one.text().splitlines()[1:3] == [
        "this time: 1,900 rows in 1 min 20 s, 23.8 rows/s",
        "at fault: 10 rows (0.4 % of the 2,492 read)",
    ]
    assert json.loads(one.as_json())["rows_per_s"] == 1900 / 80


def test_job_that_failed_before_its_plan_names_no_total() -> None:
    one = replace(summary(planned_share=0.5, units_done=2), outcome=Outcome.FAILED, why="no room")
    assert one.text().splitlines()[0] == "failed: no room"
    assert "parts that are finished, 2, won't" in one.text()


def test_job_that_failed_at_once_advises_nothing() -> None:
    one = replace(summary(), outcome=Outcome.FAILED, why="no such file")
    assert [line.partition(":")[0] for line in one.text().splitlines()] == ["failed", "in all", "output"]


def test_finished_shard_says_that_others_are_left() -> None:
    one = replace(whole(), outcome=Outcome.SHARD_FINISHED, shard=(2, 8))
    assert one.text().splitlines()[-1] == "next: this was shard 2 of 8; _SUCCESS appears with the last part"


def test_job_too_short_for_a_speed_claims_none() -> None:
    one = replace(whole(), computing_s=0.0)
    assert "too short to tell a speed" in one.text()
    assert json.loads(one.as_json())["rows_per_s"] is None


def test_json_has_all_numbers() -> None:
    one = whole()
    one.tally.add_bad([BadRow(3, "no text")])
    assert json.loads(one.as_json()) == {
        "outcome": "finished",
        "why": "",
        "model": "magika",
        "out": "out",
        "shard": 0,
        "shards": 1,
        "units": 4,
        "units_before": 0,
        "units_done": 4,
        "rows_before": 0,
        "rows_bad_before": 0,
        "rows_read": 4000,
        "rows_computed": 4000,
        "rows_written": 4000,
        "rows_bad": 1,
        "reasons": [{"reason": "no text", "rows": 1}],
        "executions": 160,
        "rows_per_batch": 25.0,
        "padding": 0.05,
        "rows_per_s": 50.0,
        "elapsed_s": 90.0,
        "computing_s": 80.0,
        "peak_memory_bytes": 300 << 20,
    }
