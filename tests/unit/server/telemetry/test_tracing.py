"""Which requests are traced, what is written about them, and into which files."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.base import Execution
from paceline.scheduler.request import BatchFacts
from paceline.server.errors import StartError
from paceline.server.telemetry.trace_settings import TraceConfig, TraceSettings
from paceline.server.telemetry.trace_writer import TraceWriter
from paceline.server.telemetry.tracing import Answered, Tracer

FACTS = BatchFacts(1, 2, 2, 300, 1000, 5_000, Execution([()], 10, 900, 90))


class Traced:
    """A tracer into t.json, and what it has written once it is closed."""

    def __init__(self, folder: Path, settings: TraceSettings) -> None:
        self.folder = folder
        self.tracer = Tracer(TraceConfig(folder / "t.json", settings, patience_s=60))  # however busy the machine is
        self.tracer.start()

    def record(self, *requests: str, model: str = "m") -> None:
        for request in requests:
            self.tracer.record(Answered.now(model, "3", request, 4_000, FACTS, ()))

    def written(self) -> dict[str, list[Any]]:
        """By file, the ids of the requests that are traced in it."""
        self.tracer.close()
        files = {path.name: json.loads(path.read_text()) for path in self.folder.iterdir()}
        return {name: [one["request_id"] for one in content[::2]] for name, content in sorted(files.items())}


@pytest.fixture
def everything(tmp_path: Path) -> Iterator[Traced]:
    traced = Traced(tmp_path, TraceSettings(timestamps=True, rate=1))
    yield traced
    traced.tracer.close()


def test_trace_has_the_request_and_the_times_of_its_stages(everything: Traced) -> None:
    everything.record("r")
    everything.record("")
    everything.tracer.close()
    first, times, second, _ = json.loads((everything.folder / "t.json").read_text())
    assert first == {"id": 1, "model_name": "m", "model_version": 3, "request_id": "r"}
    assert second == {"id": 2, "model_name": "m", "model_version": 3}
    assert times["id"] == 1
    ends = times["timestamps"][-3:]
    assert times["timestamps"][:-3] == [
        {"name": "GRPC_WAITREAD_START", "ns": 4_000},
        {"name": "GRPC_WAITREAD_END", "ns": 4_000},
        {"name": "REQUEST_START", "ns": 4_000},
        {"name": "QUEUE_START", "ns": 4_700},
        {"name": "COMPUTE_START", "ns": 5_000},
        {"name": "COMPUTE_INPUT_END", "ns": 5_010},
        {"name": "COMPUTE_OUTPUT_START", "ns": 5_910},
        {"name": "COMPUTE_END", "ns": 6_000},
    ]
    assert [one["name"] for one in ends] == ["INFER_RESPONSE_COMPLETE", "GRPC_SEND_START", "REQUEST_END"]
    assert ends[0]["ns"] == ends[1]["ns"] == ends[2]["ns"] > 6_000


def test_trace_of_a_non_numeric_version_has_its_name(everything: Traced) -> None:
    everything.tracer.record(Answered.now("m", "v1.2", "r", 4_000, FACTS, ()))
    everything.tracer.record(Answered.now("m", "", "r", 4_000, FACTS, ()))
    everything.tracer.close()
    told = json.loads((everything.folder / "t.json").read_text())
    assert [one["model_version"] for one in told[::2]] == ["v1.2", ""]


def test_trace_of_a_request_with_a_long_id_keeps_its_beginning(everything: Traced) -> None:
    everything.record("0123456789" * 1_000)
    assert everything.written() == {"t.json": ["0123456789" * 20]}


def test_trace_without_an_instances_times_leaves_its_stages_out(everything: Traced) -> None:
    everything.tracer.record(Answered.now("m", "1", "r", 4_000, BatchFacts(1, 2, 2, 300, 1000, 5_000, None), ()))
    everything.tracer.close()
    _, times = json.loads((everything.folder / "t.json").read_text())
    names = [one["name"] for one in times["timestamps"]]
    assert names[2:-3] == ["REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_END"]


@pytest.mark.parametrize(("rate", "traced"), [(1, "abcdef"), (2, "bdf"), (5, "e"), (7, "")])
def test_rate_traces_one_in_so_many_requests(tmp_path: Path, rate: int, traced: str) -> None:
    traces = Traced(tmp_path, TraceSettings(timestamps=True, rate=rate))
    traces.record(*"abcdef")
    assert traces.written() == ({"t.json": list(traced)} if traced else {})


def test_count_limits_all_traces_and_is_shown_as_what_is_left(tmp_path: Path) -> None:
    traces = Traced(tmp_path, TraceSettings(timestamps=True, rate=1, count=3))
    traces.record(*"ab")
    assert traces.tracer.settings()["trace_count"] == "1"
    traces.record(*"cdef")
    assert traces.tracer.settings()["trace_count"] == "0"
    assert traces.written() == {"t.json.0": ["a", "b", "c"]}


def test_reached_count_ends_the_file_which_gets_a_number(tmp_path: Path) -> None:
    traces = Traced(tmp_path, TraceSettings(timestamps=True, rate=1, count=2))
    traces.record(*"abc")
    traces.tracer.update("", {"log_frequency": ["2"], "trace_count": ["3"]})
    traces.record(*"defg")
    traces.tracer.update("", {"log_frequency": ["2"], "trace_count": ["2"]})
    traces.record(*"hi")
    traces.tracer.update("", {"log_frequency": ["0"], "trace_count": ["2"]})
    traces.record("j")
    assert traces.written() == {
        "t.json": ["j"],
        "t.json.0": ["a", "b"],
        "t.json.1": ["d", "e"],
        "t.json.2": ["f"],
        "t.json.3": ["h", "i"],
    }


def test_new_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        traced = Traced(tmp_path, TraceSettings(timestamps=True, rate=1))
        traced.record("a")
        traced.tracer.update("", {"log_frequency": ["1"]})
        traced.record("b")
        assert traced.written().keys() == {"t.json", "t.json.0"}
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_reached_count_does_not_rename_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "t.json").symlink_to(tmp_path / "elsewhere" / "t")
    traces = Traced(tmp_path / "links", TraceSettings(timestamps=True, rate=1, count=1))
    traces.record("a")
    traces.tracer.update("", {"trace_count": ["1"]})
    traces.record("b")
    assert traces.written() == {"t.json": ["a", "b"]}


def test_log_frequency_begins_a_new_file_after_so_many_traces(tmp_path: Path) -> None:
    traces = Traced(tmp_path, TraceSettings(timestamps=True, rate=1, log_frequency=2))
    traces.record(*"abcde")
    traces.tracer.update("", {"log_frequency": ["0"]})
    traces.record(*"fg")
    traces.tracer.update("", {"log_frequency": ["3"]})
    traces.record(*"hij")
    assert traces.written() == {
        "t.json": ["f", "g"],
        "t.json.0": ["a", "b"],
        "t.json.1": ["c", "d"],
        "t.json.2": ["e", "h", "i"],
        "t.json.3": ["j"],
    }


def test_level_off_traces_nothing_and_makes_the_tracer_inactive(everything: Traced) -> None:
    assert everything.tracer.active
    everything.tracer.update("", {"trace_level": ["OFF"]})
    assert not everything.tracer.active
    everything.record(*"ab")
    everything.tracer.update("", {"trace_level": ["TIMESTAMPS"]})
    everything.record(*"cd")
    assert everything.written() == {"t.json": ["c", "d"]}


def test_models_with_their_own_settings_are_counted_separately(everything: Traced) -> None:
    everything.tracer.update("quiet", {"trace_level": ["OFF"]})
    everything.tracer.update("rare", {"trace_rate": ["2"]})
    everything.record("a", model="quiet")
    everything.record("b", model="rare")
    everything.record("c", model="m")
    everything.record("d", model="rare")
    everything.tracer.update("", {"trace_level": ["OFF"]})
    everything.record("e", model="m")
    everything.tracer.update("rare", {"trace_level": ["TIMESTAMPS"], "trace_rate": ["1"]})
    assert everything.tracer.active
    everything.record("f", model="rare")
    assert everything.written() == {"t.json": ["c", "d", "f"]}


def test_change_for_others_keeps_a_models_count(everything: Traced) -> None:
    everything.tracer.update("m", {"trace_count": ["2"], "trace_rate": ["1"]})
    everything.record("a")
    everything.tracer.update("", {"trace_rate": ["9"]})
    assert everything.tracer.settings("m")["trace_count"] == "1"
    everything.tracer.update("m", {"trace_count": ["2"]})
    assert everything.tracer.settings("m")["trace_count"] == "2"


def test_forgotten_model_is_traced_as_others_are(everything: Traced) -> None:
    everything.tracer.update("", {"trace_level": ["OFF"]})
    everything.tracer.update("m", {"trace_level": ["TIMESTAMPS"]})
    everything.record("a")
    everything.tracer.forget("m")
    everything.record("b")
    assert not everything.tracer.active
    assert everything.written() == {"t.json": ["a"]}


def test_forgetting_a_model_without_settings_changes_nothing_for_others(everything: Traced) -> None:
    everything.tracer.update("m", {"trace_count": ["2"], "trace_rate": ["1"]})
    everything.record("a")
    everything.tracer.forget("other")
    assert everything.tracer.settings("m")["trace_count"] == "1"


def test_tracer_without_a_file_is_never_active() -> None:
    tracer = Tracer()
    tracer.start()
    assert not tracer.active
    tracer.record(Answered.now("m", "1", "r", 1, FACTS, ()))
    tracer.close()


def test_start_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "t.json", tmp_path):
        with pytest.raises(StartError, match=f"--trace-config: {path}: expected a file in a folder"):
            Tracer(TraceConfig(path)).start()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "paceline.server.tracing"]


def test_file_error_later_ends_tracing_with_one_line_and_a_final_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sub").mkdir()
    traces = Traced(tmp_path / "sub", TraceSettings(timestamps=True, rate=1))
    (tmp_path / "sub").rmdir()
    with caplog.at_level(logging.WARNING, "paceline.server.tracing"):
        traces.record(*"abc")
        traces.tracer.close()
    first, second = logged(caplog)
    assert first == f"no more traces are written to {tmp_path}/sub/t.json until a restart: No such file or directory"
    assert second == f"3 traces were not written to {tmp_path}/sub/t.json: No such file or directory"


def test_full_disk_ends_tracing_with_one_line_and_the_thread_without_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "t.json").symlink_to("/dev/full")
    traces = Traced(tmp_path, TraceSettings(timestamps=True, rate=1))
    with caplog.at_level(logging.WARNING, "paceline.server.tracing"):
        traces.record(*"abc")
        traces.tracer.close()
    assert logged(caplog) == [
        f"no more traces are written to {tmp_path}/t.json until a restart: No space left on device",
        f"3 traces were not written to {tmp_path}/t.json: No space left on device",
    ]
    assert not [one for one in recwarn if one.category is pytest.PytestUnhandledThreadExceptionWarning]


def test_traces_that_wait_for_a_hanging_file_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "t.json")
    writer = TraceWriter(tmp_path / "t.json", patience_s=0.05)
    writer.start()
    for _ in range(3):
        writer.put([{}], 0)
    with caplog.at_level(logging.WARNING, "paceline.server.tracing"):
        writer.close()
    by_then = logged(caplog)
    os.close(os.open(tmp_path / "t.json", os.O_RDONLY))  # so that the thread can end
    writer._thread.join(30)  # what it logs is not another test's
    assert by_then == [f"3 traces were not written to {tmp_path}/t.json: writing hangs"]
