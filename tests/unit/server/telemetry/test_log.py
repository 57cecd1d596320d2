"""Log lines as people and machines read them."""

from __future__ import annotations

import json
import logging
import os
import re

import pytest

from paceline.server.telemetry import log

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


def test_json_is_one_object_per_line_whatever_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    logging.getLogger("paceline.x").error('two\nlines, "quoted", \u00fc')
    (line,) = lines(capsys)
    record = json.loads(line)
    assert re.fullmatch(STAMP, record.pop("time"))
    assert record == {"level": "ERROR", "logger": "paceline.x", "message": 'two\nlines, "quoted", \u00fc'}


@pytest.mark.parametrize("form", ["json", "text"])
def test_line_with_a_name_outside_utf8_is_utf8(capsys: pytest.CaptureFixture[str], form: str) -> None:
    """Parsers refuse JSON with a lone surrogate, escaped or not."""
    log.configure("info", form)
    name = os.fsdecode(b"r\xe9seau")
    try:
        raise ValueError(name)
    except ValueError:
        logging.getLogger("paceline.x").exception("model '%s'", name, extra={"fields": {"model": name, "rows": 3}})
    (first, *others) = lines(capsys)
    if form == "text":
        assert first.endswith("model 'r\\udce9seau'")
        assert others[-1].endswith("ValueError: r\\udce9seau")
        return
    record = json.loads(first)
    assert (record["message"], record["model"], record["rows"]) == ("model 'r\\udce9seau'", "r\\udce9seau", 3)
    assert record["exception"].endswith("ValueError: r\\udce9seau")


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


def test_lines_of_the_event_loop_are_formatted_like_ours(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    for _ in range(3):
        logging.getLogger("asyncio").error("unexpected:\n%s", "x")
    logging.getLogger("asyncio").info("nobody's business")
    (line,) = lines(capsys)  # and a storm of them is one line
    assert json.loads(line)["logger"] == "asyncio"
    assert json.loads(line)["message"] == "unexpected:\nx"
    log.configure("info", "json")  # closes the handler before, which reports what it counted
    assert [json.loads(line)["repeated"] for line in lines(capsys)] == [2]


def test_lines_of_grpc_are_not_written_since_they_contain_headers(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("debug", "json")
    logging.getLogger("grpc._cython.cygrpc").error("Invalid encoding on %s", b"Bearer secret\xff")
    assert lines(capsys) == []


def test_text_of_an_exception_cannot_forge_a_line_or_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "text")
    try:
        raise ValueError("no good\n2026-11-21T00:00:00.000Z ERROR paceline.x: forged \x1b[31m\r\u2028")
    except ValueError:
        logging.getLogger("paceline.x").exception("failed")
    first, *traceback = lines(capsys)
    assert first.endswith("ERROR paceline.x: failed")
    assert all(line.startswith("    ") for line in traceback)
    assert traceback[-1].endswith("forged \\x1b[31m\\r\\u2028")


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_level_is_the_lowest_that_is_shown(capsys: pytest.CaptureFixture[str], level: str, shown: list[str]) -> None:
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


SWITCHED: list[tuple[log.LogSettings, str]] = [
    (log.LogSettings(), "iwe"),
    (log.LogSettings(verbose_level=1), "diwe"),
    (log.LogSettings(verbose_level=7, info=False), "dwe"),
    (log.LogSettings(warning=False), "ie"),
    (log.LogSettings(info=False, warning=False), "e"),
    (log.LogSettings(error=False), "iw"),
    (log.LogSettings(info=False, warning=False, error=False), ""),
]


@pytest.mark.parametrize(("settings", "shown"), SWITCHED)
def test_each_level_can_be_switched_separately(
    capsys: pytest.CaptureFixture[str], settings: log.LogSettings, shown: str
) -> None:
    log.apply(settings)
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("paceline.x"), name)(name[0])
    assert [line[-1] for line in lines(capsys)] == list(shown)
    assert log.current() == settings


@pytest.mark.parametrize(
    ("level", "form", "settings"),
    [
        ("debug", "text", log.LogSettings(verbose_level=1)),
        ("info", "json", log.LogSettings(format="json")),
        ("warning", "text", log.LogSettings(info=False)),
        ("error", "text", log.LogSettings(info=False, warning=False)),
    ],
)
def test_current_settings_are_those_of_the_flags(level: str, form: str, settings: log.LogSettings) -> None:
    log.configure(level, form)
    assert log.current() == settings


def test_current_settings_with_another_programs_log_handler_are_the_defaults() -> None:
    logging.getLogger("paceline").handlers = [logging.NullHandler()]
    assert log.current() == log.LogSettings()


@pytest.mark.parametrize(("form", "start"), [("default", "2"), ("ISO8601", "2"), ("json", "{")])
def test_format_applies_from_the_next_line_on(capsys: pytest.CaptureFixture[str], form: str, start: str) -> None:
    log.apply(log.LogSettings(format=form))
    logging.getLogger("paceline.x").info("x")
    assert lines(capsys)[0].startswith(start)


def test_fields_are_separate_values_in_json_and_left_out_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("json", "text"):
        log.configure("info", form)
        logging.getLogger("paceline.x").info("done", extra={"fields": {"rows": 3, "model": "m"}})
    as_json, as_text = lines(capsys)
    assert json.loads(as_json).items() >= {"message": "done", "rows": 3, "model": "m"}.items()
    assert as_text.endswith("INFO paceline.x: done")


def test_text_of_a_client_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "text")
    logging.getLogger("paceline.x").info("unknown model '%s'", "m\n2026 ERROR\x1b[2Jx\x85\u2028y\t\u00fc")
    assert lines(capsys)[0].endswith("unknown model 'm\\n2026 ERROR\\x1b[2Jx\\x85\\u2028y\t\u00fc'")
