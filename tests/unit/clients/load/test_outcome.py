from __future__ import annotations

import json
import re

import pytest

from paceline.clients.load.assertions import parse_assertion
from paceline.clients.load.control import Served, Statistics
from paceline.clients.load.extent import Period
from paceline.clients.load.measuring import Measured
from paceline.clients.load.outcome import Outcome
from paceline.clients.load.page import page
from paceline.clients.load.printing import outcome_json, outcome_text, written_time
from paceline.clients.load.tally import Counts, Reply, Slices, merged
from tests.pages import Page
from tests.unit.clients.load.counting import MS, S, counts

PHASES = ("queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


def statistics(requests: int, batches: int, queue_ns: int = 0) -> Statistics:
    phases = dict.fromkeys(PHASES, 0) | {"queue": queue_ns, "compute_infer": 3 * queue_ns}
    return Statistics(requests, 1, requests, batches, phases, {1: batches // 2, 4: batches - batches // 2})


SERVED = Served.between(statistics(100, 40), statistics(300, 90, 400 * MS))
STEADY = counts([1.0] * 90 + [10.0] * 10, refused=1, cpu_ms=20, lag_ms=2)


def outcome_of(
    slices: list[Counts], period: Period, *, served: Served | None = SERVED, is_open: bool = True
) -> Outcome:
    seconds = float(period.end - period.first)
    return Outcome(Measured(slices, 1.0, period, seconds, None, None), served, 2, is_open)


OUTCOME = outcome_of([counts([99.0])] * 2 + [STEADY] * 10, Period(2, 12, True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("throughput", 100),
        ("offered", 101),
        ("requests", 1010),
        ("errors", 10),
        ("error_rate", 10 / 1010),
        ("p50", 1 * MS),
        ("p99", 10 * MS),
        ("max", 10 * MS),
        ("mean", 1.9 * MS),
        ("lag.p99", 2 * MS),
        ("first.p50", None),
        ("tokens", None),
        ("cpu", 200 * MS / 1010),
        ("queue", 2 * MS),
        ("compute", 6 * MS),
        ("rows_per_batch", 4),
        ("rows", 20),
        ("stable", 1),
    ],
)
def test_figures_are_of_the_period_alone(name: str, value: float | None) -> None:
    found = OUTCOME.value(name)
    assert found == (None if value is None else pytest.approx(value, rel=1 / 1024))


def test_outcome_without_requests_has_no_latencies() -> None:
    idle = outcome_of([counts()] * 3, Period(0, 3), served=None)
    assert [idle.value(name) for name in ("p99", "mean", "max", "cpu", "error_rate", "queue", "rows_per_batch")] == [
        None
    ] * 7
    assert "tells no statistics" in outcome_text(idle, "m")
    assert "caution       no request was due in the measured time" in outcome_text(idle, "m")
    assert page(idle, "m", "m", []).count("nothing to show") == 2


@pytest.mark.parametrize(("refused", "doubts"), [(0, 0), (1, 1)])
def test_steps_that_only_the_server_counts_are_told(refused: int, doubts: int) -> None:
    measured = outcome_of([counts([1.0] * 9, refused=refused)], Period(0, 1)).measured
    found = Outcome(measured, SERVED, 1, is_open=False, in_sequences=True).doubts()
    assert sum("steps that ended sequences" in one for one in found) == doubts


def test_server_that_loaded_the_model_anew_has_no_figures() -> None:
    assert Served.between(statistics(300, 90), statistics(100, 40)) is None
    assert Served.between(None, statistics(100, 40)) is None


def test_server_counts_batches_of_the_meantime_by_rows() -> None:
    assert SERVED is not None
    assert (SERVED.succeeded, SERVED.batches, SERVED.executions) == (200, 50, {1: 25, 4: 25})


def test_doubts_name_lag_and_busy_processes_and_windows() -> None:
    late = outcome_of([counts([1.0] * 9, lag_ms=5, cpu_ms=1900)] * 3, Period(0, 3, False))
    assert [doubt.partition(":")[0] for doubt in late.doubts()] == [
        "the windows don't agree",
        "requests were sent late, which is part of their latencies",
        "the generator's processes were busy all the time and may be the limit",
    ]
    assert outcome_of([counts([50.0] * 9, lag_ms=2)] * 3, Period(0, 3, True)).doubts() == []


@pytest.mark.parametrize(("cpu_ms", "why"), [(1200, "more --processes may help"), (120, "the machine was busy")])
def test_more_processes_are_advised_to_busy_ones(cpu_ms: int, why: str) -> None:
    late = outcome_of([counts([1.0] * 9, lag_ms=5, cpu_ms=cpu_ms)] * 3, Period(0, 3, True))
    (doubt,) = late.doubts()
    assert doubt.startswith(f"requests were sent late, which is part of their latencies: {why}")


def test_long_reason_is_cut_in_the_text_alone() -> None:
    slices, reason = Slices(0, S), "long " * 600
    slices.fail(slices.begin(0), 0, MS, "INTERNAL", reason)
    outcome = outcome_of([merged(one for _, one in slices.rest())], Period(0, 1))
    assert max(map(len, outcome_text(outcome, "m").splitlines())) < 400
    assert json.loads(outcome_json(outcome, {}, []))["errors"]["INTERNAL"]["reason"] == reason


def test_text_has_a_line_for_each_kind_of_figure() -> None:
    lines = outcome_text(OUTCOME, "m on here").splitlines()
    assert lines[0] == "m on here"
    assert [line.split()[0] for line in lines[2:] if not line.startswith(" ")] == [
        "measured", "throughput", "latency", "errors", "server", "generator", "caution",
    ]  # fmt: skip
    text = "\n".join(lines)
    assert "1010 requests in 10 s, the last three windows, which agree" in text
    assert "100.0 requests/s  (100.0 to 100.0)" in text
    assert "RESOURCE_EXHAUSTED 10, after 2.00 ms: the queue is full" in text
    assert "4.00 rows per batch" in text


def test_text_of_a_generation_has_first_answers_and_tokens() -> None:
    slices = Slices(0, S)
    slices.succeed(slices.begin(0), 0, 9 * MS, Reply(answers=3, tokens=3, first_ns=5 * MS, gaps_ns=[2 * MS, 2 * MS]))
    ((_, one),) = slices.settled(S)
    outcome = outcome_of([one], Period(0, 1), is_open=False)
    text = outcome_text(outcome, "m")
    assert re.search(r"^first answer +mean 5.00 ms", text, re.MULTILINE)
    assert re.search(r"^per token +mean 2.00 ms", text, re.MULTILINE)
    assert re.search(r"^tokens +3.0/s", text, re.MULTILINE)
    assert outcome.value("token.p50") == pytest.approx(2 * MS, rel=1 / 1024)


def test_json_has_everything_and_nothing_that_json_lacks() -> None:
    verdicts = [(one, OUTCOME.value(one.name)) for one in map(parse_assertion, ["p99<20ms", "errors==0"])]
    found = json.loads(outcome_json(OUTCOME, {"model": "m"}, verdicts), parse_constant=pytest.fail)
    assert found["latency_ms"]["p99"] == pytest.approx(10, rel=1 / 1024)
    assert found["latency_intervals_ms"]["p50"] == pytest.approx([1, 1], rel=1 / 1024)
    assert found["errors"]["RESOURCE_EXHAUSTED"]["count"] == 10
    assert found["server"]["batches_by_rows"] == {"1": 25, "4": 25}
    assert found["assertions"] == [{"text": "p99<20ms", "holds": True}, {"text": "errors==0", "holds": False}]


def test_verdicts_say_what_was_found() -> None:
    asked = map(parse_assertion, ["p99<20ms", "errors==0", "first.p50<1s", "error_rate<0.5%"])
    text = outcome_text(OUTCOME, "m", [(one, OUTCOME.value(one.name)) for one in asked])
    assert text.splitlines()[-5:] == [
        "",
        "holds  p99<20ms  (got 10.0 ms)",
        "FAILS  errors==0  (got 10)",
        "FAILS  first.p50<1s  (got none)",
        "FAILS  error_rate<0.5%  (got 0.9901%)",
    ]


TIMES = {900: "0.90 us", 12_340: "12.3 us", 999_900: "1.00 ms", 12.34e6: "12.3 ms", 2e9: "2.00 s", 1e13: "10000 s"}


@pytest.mark.parametrize(("ns", "text"), [(None, "-"), *TIMES.items()])
def test_times_are_written_with_three_digits(ns: float | None, text: str) -> None:
    assert written_time(ns) == text


def test_page_is_whole_and_needs_nothing_from_elsewhere() -> None:
    text = page(OUTCOME, "Load on m", "<script>alert(1)</script>", [(parse_assertion("errors==0"), 10.0)])
    parsed = Page(text)
    assert parsed.open == []
    assert parsed.elsewhere == []
    assert parsed.tags.count("svg") == 5
    assert "script" not in parsed.tags
    assert "url(" not in text
    assert "FAILS  errors==0" in text
    assert "nan" not in text.lower()
