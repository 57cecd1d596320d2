"""The stream in place of stderr: writers never wait, and lines that can't be written are counted."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from select import PIPE_BUF

import pytest

from paceline.server.telemetry.log_output import LogOutput
from tests.harness import REPO

ENOUGH_S = 60


class PipedOutput:
    """A `LogOutput` for one end of a pipe of one page, the pipe's other end, and the gaps, each of which is reported in
    a separate line."""

    def __init__(self, most_bytes: int = 20_000) -> None:
        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, PIPE_BUF)
        self.gaps: list[int] = []
        self.output = LogOutput(self.writing, self._on_gap, most_bytes)
        self.output.start()

    def _on_gap(self, lines: int) -> None:
        self.gaps.append(lines)
        self.output.write(f"{lines} lost\n")

    def write(self, *numbers: int) -> None:
        for number in numbers:
            self.output.write(line(number))

    def read(self, until: str) -> list[str]:
        """Lines up to and including `until`."""
        text = ""
        while not text.endswith(f"{until}\n"):
            text += os.read(self.reading, 1 << 16).decode()
        return text.splitlines()

    def close(self) -> None:
        # Its thread may hang in a write until the pipe has no reader.
        os.close(self.reading)
        assert self.output.drain(ENOUGH_S)
        os.close(self.writing)


def line(number: int) -> str:
    return f"{number:0199d}\n"


def numbers(lines: list[str]) -> list[int]:
    return [int(one) for one in lines]


@pytest.fixture
def played() -> Iterator[PipedOutput]:
    made = PipedOutput()
    yield made
    made.close()


def test_lines_of_several_threads_are_written_in_each_threads_order(played: PipedOutput) -> None:
    threads = [threading.Thread(target=played.write, args=range(first, 20, 4)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    played.write(99)
    seen = numbers(played.read(until=line(99).strip()))
    assert sorted(seen) == [*range(20), 99]
    for first in range(4):
        assert [number for number in seen[:-1] if number % 4 == first] == [*range(first, 20, 4)]
    assert played.output.drain(ENOUGH_S)
    assert played.output.lost_lines == 0


def test_writer_to_an_unread_pipe_reports_losses_later(
    played: PipedOutput,
) -> None:
    played.write(*range(500))
    lost = played.output.lost_lines
    # A page is in the pipe, another one may be on its way, and 20,000 bytes wait.
    assert 500 - (20_000 + 2 * PIPE_BUF) // 200 <= lost <= 500 - 20_000 // 200
    assert not played.output.drain(0)
    lines = played.read(until=f"{lost} lost")
    assert numbers(lines[:-1]) == [*range(500 - lost)]
    assert played.output.drain(ENOUGH_S)
    assert (played.gaps, played.output.lost_lines) == ([lost], lost)
    played.write(500)
    assert numbers(played.read(until=line(500).strip())) == [500]


def test_gap_stays_one_even_if_there_is_room_for_some_lines_in_between(played: PipedOutput) -> None:
    played.write(*range(500))
    first = played.output.lost_lines
    os.read(played.reading, PIPE_BUF)
    played.write(*range(500, 510))
    assert played.output.lost_lines == first + 10
    played.read(until=f"{first + 10} lost")
    assert played.gaps == [first + 10]


def test_text_larger_than_the_buffer_is_lost_and_the_next_is_not(played: PipedOutput) -> None:
    played.output.write("x" * 30_000 + "\n")
    assert played.output.lost_lines == 1
    assert played.read(until="1 lost") == ["1 lost"]
    played.write(7)
    assert numbers(played.read(until=line(7).strip())) == [7]


def test_empty_text_is_no_gap() -> None:
    """Otherwise a program that ends with one, as click does, would report at its end that 0 lines were lost."""
    gaps: list[int] = []
    reading, writing = os.pipe()
    output = LogOutput(writing, gaps.append)
    output.write("")
    # Too long to be written together with what is before it.
    output.write("x" * PIPE_BUF + "\n")
    output.start()
    assert output.drain(ENOUGH_S)
    assert gaps == []
    os.close(reading)
    os.close(writing)


def test_writes_consist_of_whole_lines_that_a_pipe_takes_at_once() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        output = LogOutput(ours.fileno(), lambda lines: None)
        for number in range(100):
            output.write(line(number))
        output.write("y" * 10_000 + "\n")
        output.start()
        assert output.drain(ENOUGH_S)
        packets = [theirs.recv(1 << 16).decode() for _ in range(6)]
    assert all(packet.endswith("\n") for packet in packets)
    assert [len(packet) for packet in packets] == [4000] * 5 + [10_001]
    assert numbers("".join(packets[:-1]).splitlines()) == [*range(100)]


def test_lines_lost_on_a_full_disk_are_reported_once_it_takes_others() -> None:
    gaps: list[int] = []
    with ExitStack() as files:
        descriptor = os.open("/dev/full", os.O_WRONLY)
        files.callback(os.close, descriptor)
        output = LogOutput(descriptor, gaps.append)
        output.start()
        for number in range(5):
            output.write(line(number))
        assert output.drain(ENOUGH_S)
        assert (output.lost_lines, gaps) == (5, [])
        reading, writing = os.pipe()
        files.callback(os.close, reading)
        os.dup2(writing, descriptor)
        os.close(writing)
        output.write(line(5))
        assert output.drain(ENOUGH_S)
        assert os.read(reading, 1 << 16).decode() == line(5)
        assert (output.lost_lines, gaps) == (5, [5])


def test_lines_for_a_pipe_whose_reader_has_gone_are_lost(played: PipedOutput) -> None:
    other = os.dup(played.writing)
    reading, writing = os.pipe()
    os.dup2(writing, played.writing)
    os.close(writing)
    os.close(reading)
    played.write(1, 2)
    assert played.output.drain(ENOUGH_S)
    assert played.output.lost_lines == 2
    os.dup2(other, played.writing)
    os.close(other)


def test_non_blocking_descriptor_loses_nothing(played: PipedOutput) -> None:
    """Another process that shares it may have made it so, for all that have it."""
    os.set_blocking(played.writing, False)
    os.write(played.writing, b"0" * (PIPE_BUF - 1) + b"\n")
    played.write(*range(100))
    assert numbers(played.read(until=line(99).strip())) == [0, *range(100)]
    assert played.output.drain(ENOUGH_S)
    assert played.output.lost_lines == 0


def test_bytes_are_refused_as_by_any_text_stream(played: PipedOutput) -> None:
    with pytest.raises(AttributeError):
        played.output.write(b"x")  # type: ignore[arg-type]
    assert played.output.drain(ENOUGH_S)


# ---- a process ------------------------------------------------------------------------------------------------------

START = "from paceline.server.telemetry import log; "
START += "from paceline.server.telemetry.log_output import exit_now, take_stderr; take_stderr(); "
START += "log.configure('info', 'text'); import logging; say = logging.getLogger('paceline.x').info; "


PATIENT = "from paceline.server.telemetry import log_output; log_output._PATIENCE_S = 60; "
"""For processes whose lines must all arrive, however busy the machine is."""


def run(code: str, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + code], stderr=stderr, text=True, cwd=REPO, timeout=ENOUGH_S, check=False
    )


def test_process_ended_by_an_exception_writes_all_lines_and_its_traceback_last() -> None:
    ended = run(PATIENT + "[say('line %d', i) for i in range(1000)]; raise ValueError('the end')")
    lines = ended.stderr.splitlines()
    assert [one.rpartition(" ")[2] for one in lines[:1000]] == [str(number) for number in range(1000)]
    assert (lines[1000], lines[-1]) == ("Traceback (most recent call last):", "ValueError: the end")
    assert ended.returncode == 1


def test_process_that_exits_at_once_writes_all_lines_and_counts_of_storms() -> None:
    ended = run(PATIENT + "[logging.getLogger('paceline.x').error('the same') for _ in range(3)]; exit_now(7)")
    assert [one.partition("paceline.x: ")[2] for one in ended.stderr.splitlines()] == [
        "the same",
        "the same (and 2 more like this within 10 s)",
    ]
    assert ended.returncode == 7


def test_exception_of_a_thread_is_written() -> None:
    ended = run(
        PATIENT + "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); say('and on')"
    )
    assert "ZeroDivisionError: division by zero" in ended.stderr
    assert ended.stderr.endswith("and on\n")


def test_message_of_crashing_native_code_is_written() -> None:
    ended = run("import faulthandler, os; faulthandler.enable(); os.abort()")
    assert ended.stderr.startswith("Fatal Python error: Aborted")
    assert ended.returncode < 0


@pytest.mark.parametrize(("end", "status"), [("", 0), ("exit_now(3)", 3), ("raise ValueError", 1)])
def test_process_with_an_unread_stderr_ends_nevertheless(end: str, status: int) -> None:
    reading, writing = os.pipe()
    try:
        assert run(f"[say('%s', i) for i in range(10_000)]\n{end}", writing).returncode == status
    finally:
        os.close(reading)
        os.close(writing)


def test_process_on_a_full_disk_ends_nevertheless() -> None:
    with Path("/dev/full").open("wb") as full:
        assert run("say('lost')", full.fileno()).returncode == 0


def test_process_without_stderr_ends_normally() -> None:
    ended = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, START + "say('lost')"],
        cwd=REPO,
        timeout=ENOUGH_S,
        check=False,
    )
    assert ended.returncode == 0


def test_stdout_whose_reader_has_gone_says_so_once() -> None:
    printing = """
from paceline.server.telemetry.log_output import take_stdout
take_stdout()
try:
    print("for nobody", flush=True)
except BrokenPipeError:
    print("for nobody", flush=True)
    exit(3)
"""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", printing],
            stdout=writing, stderr=subprocess.PIPE, cwd=REPO, timeout=ENOUGH_S, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (3, b"")
