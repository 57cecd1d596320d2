"""A storm of the same error is one line and a count, with a clock that the test sets and with the real one."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from typing import Any

import pytest

from paceline.server.telemetry import log
from paceline.server.telemetry.log import RepeatFilter
from tests.polling import eventually


class ManualFilter:
    """A filter with windows of 10 s, with a clock that the test sets, and the lines that were written."""

    def __init__(self, window_s: float = 10) -> None:
        self.now_s = 100.0
        self.lines: list[str] = []
        self.storms = RepeatFilter(self.write, window_s, lambda: self.now_s)

    def write(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def say(self, text: str, *args: object, level: int = logging.ERROR, name: str = "paceline.x") -> None:
        record = logging.LogRecord(name, level, "", 0, text, args, None)
        if self.storms.lets_pass(record):
            self.write(record)

    def after(self, seconds: float) -> list[str]:
        """The lines since the last call, once so many more seconds have passed."""
        self.now_s += seconds
        self.storms.tell()
        lines, self.lines = self.lines, []
        return lines


def test_storm_is_its_first_line_and_a_count_each_window() -> None:
    played = ManualFilter()
    for _ in range(1000):
        played.say("no %s", "memory")
    assert played.after(9) == ["no memory"]
    assert played.after(2) == ["no memory (and 999 more like this within 10 s)"]
    played.say("no memory")
    assert played.after(11) == ["no memory (and 1 more like this within 10 s)"]
    assert played.after(11) == []
    played.say("no memory")
    assert played.after(0) == ["no memory"]


def test_single_line_has_no_count() -> None:
    played = ManualFilter()
    played.say("once")
    assert played.after(60) == ["once"]


@pytest.mark.parametrize(
    "other",
    [{"arg": "disk"}, {"arg": "memory", "level": logging.WARNING}, {"arg": "memory", "name": "paceline.y"}],
)
def test_different_lines_are_no_storm(other: dict[str, Any]) -> None:
    played = ManualFilter()
    for arg, options in (("memory", {}), (other["arg"], {key: other[key] for key in other if key != "arg"})):
        played.say("no %s", arg, **options)
    assert len(played.after(60)) == 2


def test_information_is_never_held_back() -> None:
    played = ManualFilter()
    for _ in range(50):
        played.say("loaded", level=logging.INFO)
    assert played.after(60) == ["loaded"] * 50


def test_texts_that_all_differ_are_held_back_after_the_first_101() -> None:
    played = ManualFilter()
    for number in range(1000):
        played.say("request %d failed", number)
    lines = played.after(11)
    assert lines[:101] == [f"request {number} failed" for number in range(101)]
    assert lines[101:] == ["request 100 failed (and 899 more like this within 10 s)"]
    played.after(11)
    played.say("request %d failed", 5000)
    assert played.after(0) == ["request 5000 failed"]


def test_preformatted_texts_are_held_back_by_the_place_that_logs_them() -> None:
    played = ManualFilter()
    for number in range(1000):
        played.say(f"Task exception was never retrieved: Task-{number}", name="asyncio")
    lines = played.after(11)
    assert len(lines) == 102
    assert lines[101].endswith("Task-100 (and 899 more like this within 10 s)")


def test_exceptions_are_distinguished_by_class_and_not_kept_alive() -> None:
    played = ManualFilter()

    class Kept(Exception):
        pass

    def fail(error: Exception) -> None:
        try:
            raise error
        except Exception:  # noqa: BLE001 - what is raised is logged
            record = logging.LogRecord("paceline.x", logging.ERROR, "", 0, "failed", (), sys.exc_info())
            if played.storms.lets_pass(record):
                played.write(record)

    last = Kept()
    watch = weakref.ref(last)
    for error in (Kept(), ValueError(), last):
        fail(error)
    del error, last
    gc.collect()
    assert watch() is None
    assert played.after(11) == ["failed", "failed", "failed (and 1 more like this within 10 s)"]


def test_close_writes_the_remaining_counts() -> None:
    played = ManualFilter()
    played.say("x")
    played.say("x")
    played.storms.close()
    assert played.lines == ["x", "x (and 1 more like this within 10 s)"]


def test_count_is_written_by_itself_and_leaves_no_thread() -> None:
    lines, now_s = list[str](), 100.0
    before = set(threading.enumerate())
    storms = RepeatFilter(lambda record: lines.append(record.getMessage()), 0.01, lambda: now_s)
    record = logging.LogRecord("paceline.x", logging.ERROR, "", 0, "x", (), None)
    storms.lets_pass(record)
    storms.lets_pass(record)
    now_s += 1
    eventually(lambda: lines, "the count")
    assert lines == ["x (and 1 more like this within 0.01 s)"]
    eventually(lambda: set(threading.enumerate()) <= before, "the timer's end")


def test_storm_on_many_threads_loses_no_count() -> None:
    played = ManualFilter()
    threads = [threading.Thread(target=lambda: [played.say("x") for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert played.after(11) == ["x", "x (and 3999 more like this within 10 s)"]


def test_settings_that_change_during_a_storm_lose_no_count(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "text")
    for _ in range(5):
        logging.getLogger("paceline.x").error("x")
    log.configure("info", "json")
    log.configure("info", "text")
    first, count = capsys.readouterr().err.splitlines()
    assert first.endswith("ERROR paceline.x: x")
    assert count.endswith("ERROR paceline.x: x (and 4 more like this within 10 s)")
