"""The time of day jumps while a server runs: by days, forward and back, as when somebody sets it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from tests.fault.traffic import connected, pending, quiet, request, total
from tests.harness import REPO, ServerProcess, write_identity
from tests.polling import eventually

LIBRARY = REPO / ".witness" / "libfaketimeMT.so.1"
OK = grpc.StatusCode.OK
DAY_S = 86_400
DELAYED = "dynamic_batching { max_queue_delay_microseconds: 600000000 }"


class Day:
    """The time of day as a server sees it, so many seconds from the machine's."""

    def __init__(self, file: Path, timers: Path) -> None:
        self._file = file
        self._timers = timers
        self.set(0)

    def set(self, offset_s: int) -> None:
        """Atomically: half of a number is another number."""
        part = self._file.with_suffix(".part")
        part.write_text(f"{offset_s:+d}\n")
        part.rename(self._file)

    @property
    def env(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": f"{self._timers} {LIBRARY}",
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


def full(number: int) -> pb.ModelInferRequest:
    """A full batch, of another shape than the requests that wait."""
    return request(rows=8, columns=8, first=number)


@pytest.fixture
def day(tmp_path: Path) -> Day:
    if not LIBRARY.is_file():
        pytest.skip(f"no {LIBRARY}: `make witness` fetches it")
    timers = tmp_path / "monotonic_timers.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", timers, Path(__file__).with_name("monotonic_timers.c")], check=True
    )
    return Day(tmp_path / "day", timers)


def test_jumps_of_the_time_of_day_neither_end_nor_prolong_waits(tmp_path: Path, day: Day) -> None:
    """With a process that speaks gRPC, whose clocks count too."""
    write_identity(tmp_path / "models", dims="[ -1 ]", extra=DELAYED)
    with (
        ServerProcess(tmp_path / "models", args=("--frontends", "2"), env=day.env) as server,
        connected(server) as client,
    ):
        assert client.send(full(0)).code() is OK
        told = server.log[-1]["time"]
        waiting = [client.send(request(first=number), timeout_s=300) for number in range(3)]
        eventually(lambda: pending(server) == 3, "three that wait for company")
        for offset_s in (3 * DAY_S, DAY_S, -3 * DAY_S, -2 * DAY_S):
            day.set(offset_s)
            assert [client.send(full(number), timeout_s=60).code() for number in range(5)] == [OK] * 5
            # Ten minutes of delay and five of deadline aren't over.
            assert pending(server) == 3
        assert not any(call.done() for call in waiting)
        # Waiting requests get their batch filled, and those with a short deadline are refused when it has passed.
        late = client.send(request(), timeout_s=0.2)
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: pending(server) == 3, "the one that gave up gone")
        assert client.send(request(rows=5), timeout_s=60).code() is OK
        assert [call.code() for call in waiting] == [OK] * 3
        eventually(lambda: quiet(server), "nothing waiting")
        assert total(server, "nv_inference_request_success") == 25
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert server.log[-1]["time"][:10] != told[:10]  # it saw that other day
