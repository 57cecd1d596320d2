"""What files say of arrivals: lines for one request or for many, and traces."""

from __future__ import annotations

import json

import pytest

from paceline.clients.load.recording import RecordError, read_recording, recorded_line

S = 1_000_000_000


def test_recording_is_sorted_and_begins_at_its_first_arrival() -> None:
    lines = [
        '{"at_s": 10.5, "shapes": {"x": [1, 3]}}',
        "",
        '{"at_s": 10, "shapes": {}}',
        '{"at_s": 12, "shapes": {"x": [1, 3]}}',
    ]
    recording = read_recording(lines)
    assert recording.at_ns == (0, S // 2, 2 * S)
    assert [recording.shapes[place] for place in recording.contents] == [{}, {"x": (1, 3)}, {"x": (1, 3)}]


def test_requests_of_a_stretch_come_within_it() -> None:
    lines = [recorded_line("m", 10, 2, 50), recorded_line("n", 0, 2, 7), recorded_line("m", 12, 2, 0), '{"at_s": 15}']
    recording = read_recording(lines, "m", seed=1)
    assert recording == read_recording(lines, "m", seed=1) != read_recording(lines, "m", seed=2)
    assert len(recording.at_ns) == 51
    assert recording.at_ns[49] <= 2 * S
    assert 3 * S <= recording.at_ns[50] <= 5 * S
    assert len(set(recording.at_ns)) == 51
    assert not recording.has_shapes


def test_name_of_the_only_model_does_not_matter() -> None:
    assert read_recording([recorded_line("m", 0, 0, 3)], "other").at_ns == (0, 0, 0)


def trace_lines(*starts_ns: int) -> list[str]:
    starts = [[{"name": "REQUEST_START", "ns": at_ns}] for at_ns in starts_ns]
    return [json.dumps([{"id": number, "timestamps": one} for number, one in enumerate(starts)])]


def test_traces_say_when_requests_came() -> None:
    traces = [
        {"id": 1, "model_name": "m", "model_version": 1},
        {"id": 1, "timestamps": [{"name": "REQUEST_START", "ns": 7 * S}, {"name": "REQUEST_END", "ns": 9 * S}]},
        {"id": 2, "model_name": "m", "timestamps": [{"name": "REQUEST_START", "ns": 5 * S}]},
        {"id": 3, "model_name": "n", "timestamps": [{"name": "REQUEST_START", "ns": 4 * S}]},
    ]
    assert read_recording(json.dumps(traces, indent=1).splitlines(), "m").at_ns == (0, 2 * S)


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([], "no arrivals"),
        (["{"], "line 1: not JSON"),
        (['{"at_s": 1}', "[1]"], 'line 2: expected an object with the seconds "at_s"'),
        (['{"at_s": true}'], "at_s"),
        (['{"at_s": NaN}'], "at_s"),
        (['{"at_s": 1e300}'], "at_s"),
        (['{"at_s": 1, "shapes": {"x": [-1]}}'], 'expected "shapes" to be lists of sizes'),
        (['{"at_s": 1, "shapes": [1]}'], 'expected "shapes" to be lists of sizes'),
        (['{"at_s": 1, "requests": 2.5}'], 'expected "requests" to be a number from 0 up'),
        (['{"at_s": 1, "seconds": -1}'], 'expected "seconds" to be a number from 0 up'),
        (['{"at_s": 1, "seconds": 1e300}'], 'expected "seconds" to be a number from 0 up'),
        (['{"at_s": 1, "requests": 0}'], "no arrivals"),
        (['{"at_s": 1, "requests": 10000001}'], "expected at most 10,000,000 arrivals, got 10,000,001"),
        (['{"at_s": 1, "model": "a"}', '{"at_s": 1, "model": "b"}'], "no arrivals for model 'm'; .* lines for a, b"),
        (['{"at_s": 1, "model": "m", "requests": 0}', '{"at_s": 1, "model": "b"}'], ": 0 requests .* for b, too"),
        (['[{"id": 1}, {"timestamps": []}]'], 'expected traces, objects with "id"'),
        (trace_lines(0, 10**400), "expected traces of at most 1e\\+15 seconds"),
        (trace_lines(0, 10**300), "expected traces of at most 1e\\+15 seconds"),
    ],
)
def test_recording_that_is_none_is_refused(lines: list[str], fault: str) -> None:
    with pytest.raises(RecordError, match=fault):
        read_recording(lines, "m")
