"""What `paceline top` shows of two looks at a server: rates, quantiles, counters that start again."""

from __future__ import annotations

import math

import pytest

from paceline.clients.snapshots import Model, Snapshot, between, ended, parse, quantile
from paceline.clients.top_table import table

INF = math.inf


def model(requests: float, **more: float) -> Model:
    """Counters after so many requests of two rows, in batches of two, that waited up to 1 ms and took up to 10 ms."""
    return Model(
        succeeded=requests,
        rows=2 * requests,
        batches=requests / 2,
        compute_us=500 * requests,
        queue={1_000.0: requests, INF: requests},
        duration={1_000.0: 0, 10_000.0: requests, INF: requests},
        **more,
    )


def look(taken_s: float, began_s: float = 7.0, /, **models: Model) -> Snapshot:
    by_version = {(name, "1"): one for name, one in models.items()}
    return Snapshot(taken_s, by_version, True, began_s, cpu_s=taken_s / 2, memory_bytes=3 * 2**20)


def lines(before: Snapshot | None, now: Snapshot) -> list[list[str]]:
    return [line.split() for line in table(between(before, now)).splitlines()]


def test_table_replaces_control_characters_in_names_and_versions() -> None:
    text = table(between(None, Snapshot(1.0, {("m\x1b[2J", "1\r\x9b1m"): model(1)}, True)))
    assert all(line.isprintable() for line in text.split("\n"))
    assert "m?[2J" in text


def test_table_has_what_happened_between_two_looks() -> None:
    text = table(between(look(10, m=model(100)), look(12, m=model(300, waiting=4, failures={"OTHER": 10}))))
    assert text == "\n".join(
        [
            "ready, 105 requests/s, 4 waiting, CPU 50 %, memory 3 MiB",
            "",
            "MODEL  VERSION  REQ/S  FAIL/S  ROWS/S  BATCH/S  ROWS/BATCH  WAITING  QUEUE P50     P99  COMPUTE"
            "  LATENCY P50      P99",
            "m            1    105     5.0     200     50.0         4.0        4     500 us  990 us   500 us"
            "       5.5 ms  9.91 ms",
        ]
    )


def test_ended_requests_are_counted_by_model() -> None:
    before, now = look(10, m=model(100), n=model(5)), look(12, m=model(300, failures={"OTHER": 10}), n=model(2))
    now.models["m", "2"] = model(7)
    assert ended(before, now) == {"m": 217, "n": 2}
    assert ended(look(10, 6.0, m=model(1)), now)["m"] == 317


def test_table_of_the_first_look_has_no_rates() -> None:
    summary, _, _, row = lines(None, look(10, m=model(100)))
    assert summary[:3] == ["ready,", "-", "requests/s,"]
    assert row[:7] == ["m", "1", "-", "-", "-", "-", "4.0"]
    assert "CPU" not in summary


def test_table_of_an_idle_model_has_zeros_and_no_times() -> None:
    same = model(100)
    assert lines(look(10, m=same), look(12, m=same))[3] == ["m", "1", "0.0", "0.0", "0.0", "0.0", "-", "0"] + ["-"] * 5


def test_table_without_models_says_so() -> None:
    assert table(between(look(10, m=model(1)), look(12))).splitlines()[-1] == "no models"


def test_table_has_the_busiest_models_first_then_names_and_versions() -> None:
    idle = Model()
    now = look(12, b=idle, a=idle, busy=model(100))
    now.models["a", "10"] = now.models["a", "9"] = idle
    rows = [line[:2] for line in lines(look(10), now)[3:]]
    assert rows == [["busy", "1"], ["a", "1"], ["a", "9"], ["a", "10"], ["b", "1"]]


def test_table_after_a_restart_counts_from_zero() -> None:
    summary, _, _, row = lines(look(10, m=model(1_000)), look(12, 11.0, m=model(1_200)))
    assert row[2] == "600"
    assert float(summary[6]) > 0


def test_table_after_a_reload_counts_that_model_from_zero() -> None:
    before, now = look(10, m=model(1_000), other=model(10)), look(12, m=model(100), other=model(30))
    assert [row[2] for row in lines(before, now)[3:]] == ["50.0", "10.0"]


def test_table_has_no_escape_sequence_of_a_model_name() -> None:
    assert "\x1b" not in table(between(None, look(10, **{"\x1b[2Jm": model(1)})))


@pytest.mark.parametrize(
    ("share", "histogram", "expected"),
    [
        (0.5, {}, None),
        (0.5, {10.0: 0, INF: 0}, None),
        (0.5, {10.0: 4, INF: 4}, 5.0),
        (1.0, {10.0: 4, INF: 4}, 10.0),
        (0.5, {10.0: 1, 20.0: 4, INF: 4}, 10 + 10 * 1 / 3),
        (0.99, {10.0: 1, 20.0: 1, INF: 100}, 20.0),  # above all known bounds: the highest of these
        (0.5, {10.0: 0, 20.0: 0, 40.0: 2, INF: 2}, 30.0),
    ],
)
def test_quantile_is_that_of_prometheus(share: float, histogram: dict[float, float], expected: float | None) -> None:
    assert quantile(share, histogram) == (None if expected is None else pytest.approx(expected))


def test_parse_bucket_without_a_bound_is_ignored() -> None:
    bucket = 'paceline_request_duration_us_bucket{model="m",version="1"} 4'
    assert parse(f"paceline_ready 1\n{bucket}\n", 1.0).models["m", "1"] == Model()


@pytest.mark.parametrize("text", ["", "<html>", "up 1\n", "nv_inference_count{"])
def test_parse_other_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the library's text or ours
        parse(text, 1.0)
