"""Log lines as people and machines read them."""

from __future__ import annotations

import json
import logging
import re

import pytest

from server import log

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err.splitlines()


def test_text_is_one_line_with_time_in_utc_level_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "text")
    logging.getLogger("paceline.some.module").warning("%d of %s", 3, "m")
    (line,) = lines(capsys)
    assert re.fullmatch(rf"{STAMP} WARNING paceline\.some\.module: 3 of m", line)


def test_json_is_one_object_a_line_whatever_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    logging.getLogger("paceline.x").error('two\nlines, "quoted", \u00fc')
    (line,) = lines(capsys)
    record = json.loads(line)
    assert re.fullmatch(STAMP, record.pop("time"))
    assert record == {"level": "ERROR", "logger": "paceline.x", "message": 'two\nlines, "quoted", \u00fc'}


def test_json_carries_the_traceback_of_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    try:
        raise ValueError("no good")
    except ValueError:
        logging.getLogger("paceline.x").exception("failed")
    record = json.loads(lines(capsys)[0])
    assert record["message"] == "failed"
    assert "Traceback" in record["exception"]
    assert record["exception"].endswith("ValueError: no good")


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_level_is_the_least_important_that_is_shown(
    capsys: pytest.CaptureFixture[str], level: str, shown: list[str]
) -> None:
    log.configure(level, "text")
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("paceline.x"), name)(name)
    assert [line.rpartition(" ")[2] for line in lines(capsys)] == shown


def test_configure_twice_writes_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "text")
    log.configure("info", "text")
    logging.getLogger("paceline.x").info("once")
    assert len(lines(capsys)) == 1


def test_configure_leaves_other_loggers_alone(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("debug", "text")
    logging.getLogger("somebody.else").info("not ours")
    assert lines(capsys) == []
