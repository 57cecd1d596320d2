"""Trace settings: what may be said, who inherits what, and that a refused change changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.errors import InvalidRequest, NotSupported
from server.trace_settings import TraceConfig, TraceSettings, TraceStore, parse_trace_config

CONFIG = TraceConfig(Path("t.json"), TraceSettings(rate=7))


def test_config_of_nothing_traces_nothing() -> None:
    assert parse_trace_config([]) == TraceConfig(None, TraceSettings(False, 1000, -1, 0))


def test_config_of_everything_is_read() -> None:
    given = [
        "triton,file=/tmp/t.json",
        "level=TIMESTAMPS",
        "rate=2",
        "count=9",
        "triton,log-frequency=3",
        "mode=triton",
    ]
    assert parse_trace_config(given) == TraceConfig(Path("/tmp/t.json"), TraceSettings(True, 2, 9, 3))


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["file"], "expected [triton,]KEY=VALUE, got 'file'"),
        (["triton,file="], "expected [triton,]KEY=VALUE, got 'triton,file='"),
        (["opentelemetry,url=x"], "expected mode triton, the only one in this build, got 'opentelemetry'"),
        (["mode=opentelemetry"], "expected mode triton, the only one in this build, got 'opentelemetry'"),
        (["colour=red"], "expected one of file, mode, level, rate, count, log-frequency, got 'colour'"),
        (["rate=0"], "trace setting 'trace_rate': expected a whole number from 1 to 2147483647, got '0'"),
        (["rate=1", "rate=2"], "trace setting 'trace_rate': expected 1 value, got 2"),
        (
            ["level=TIMESTAMPS"],
            "trace setting 'trace_level': TIMESTAMPS have no file to go to; "
            "start the server with --trace-config triton,file=PATH",
        ),
    ],
)
def test_config_that_cannot_be_honoured_is_refused(given: list[str], fault: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        parse_trace_config(given)
    assert str(caught.value) == fault


def test_store_begins_with_what_the_server_was_started_with() -> None:
    assert TraceStore(CONFIG).settings("") == TraceStore(CONFIG).settings("m") == CONFIG.settings


def test_store_model_has_its_own_then_everybodys_then_the_first() -> None:
    store = TraceStore(CONFIG)
    store.update("", {"trace_rate": ["5"], "trace_count": ["4"]})
    store.update("m", {"trace_rate": ["3"], "log_frequency": ["2"]})
    assert store.settings("m") == TraceSettings(rate=3, count=4, log_frequency=2)
    assert store.settings("other") == TraceSettings(rate=5, count=4)
    store.update("m", {"trace_rate": []})
    assert store.settings("m") == TraceSettings(rate=5, count=4, log_frequency=2)
    store.update("", {"trace_rate": [], "trace_count": []})
    assert store.settings("m") == TraceSettings(rate=7, log_frequency=2)
    assert store.models == ["m"]
    store.update("m", {"log_frequency": [], "trace_level": []})
    assert store.models == []


def test_store_levels_switch_on_and_off() -> None:
    store = TraceStore(CONFIG)
    store.update("", {"trace_level": ["TIMESTAMPS"]})
    assert store.settings("m").timestamps
    store.update("m", {"trace_level": ["OFF"]})
    assert (store.settings("m").timestamps, store.settings("").timestamps) == (False, True)


@pytest.mark.parametrize("model", ["", "m"])
@pytest.mark.parametrize(
    ("name", "values", "fault"),
    [
        ("trace_rate", ["0"], "expected a whole number from 1 to 2147483647, got '0'"),
        ("trace_rate", ["x"], "expected a whole number from 1 to 2147483647, got 'x'"),
        ("trace_rate", [""], "expected a whole number from 1 to 2147483647, got ''"),
        ("trace_rate", ["2147483648"], "expected a whole number from 1 to 2147483647, got '2147483648'"),
        ("trace_rate", ["1", "2"], "expected 1 value, got 2"),
        ("trace_count", ["-2"], "expected a whole number from -1 to 2147483647, got '-2'"),
        ("log_frequency", ["-1"], "expected a whole number from 0 to 2147483647, got '-1'"),
        ("trace_level", ["MAX"], "expected some of OFF, TIMESTAMPS, TENSORS, got 'MAX'"),
        ("trace_level", ["OFF", "TIMESTAMPS"], "expected OFF alone, got OFF, TIMESTAMPS"),
        (
            "colour",
            ["red"],
            "expected one of trace_level, trace_rate, trace_count, log_frequency, trace_file, trace_mode",
        ),
        (
            "colour",
            [],
            "expected one of trace_level, trace_rate, trace_count, log_frequency, trace_file, trace_mode",
        ),
    ],
)
def test_store_faulty_values_are_refused_and_change_nothing(
    model: str, name: str, values: list[str], fault: str
) -> None:
    store = TraceStore(CONFIG)
    with pytest.raises(InvalidRequest) as caught:
        store.update(model, {"trace_count": ["3"], name: values})
    assert str(caught.value) == f"trace setting '{name}': {fault}"
    assert store.settings(model) == CONFIG.settings


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("trace_file", "x", "trace setting 'trace_file' can only be given when the server starts, with --trace-config"),
        ("trace_mode", "x", "trace setting 'trace_mode' can only be given when the server starts, with --trace-config"),
        ("trace_level", "TENSORS", "trace setting 'trace_level': TENSORS is not supported by this build, only TIME"),
    ],
)
def test_store_what_this_build_lacks_is_not_supported(name: str, value: str, fault: str) -> None:
    store = TraceStore(CONFIG)
    with pytest.raises(NotSupported) as caught:
        store.update("", {"trace_rate": ["1"], name: [value]})
    assert str(caught.value).startswith(fault)
    assert store.settings("") == CONFIG.settings


def test_store_without_a_file_cannot_be_switched_on() -> None:
    store = TraceStore(TraceConfig())
    with pytest.raises(NotSupported, match="start the server with --trace-config triton,file=PATH"):
        store.update("", {"trace_level": ["TIMESTAMPS"]})
    store.update("", {"trace_level": ["OFF"]})


def test_told_settings_have_the_names_and_values_of_the_extension() -> None:
    store = TraceStore(CONFIG)
    assert store.told(TraceSettings(True, 7, -1, 0)) == {
        "trace_level": "TIMESTAMPS",
        "trace_rate": "7",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "t.json",
        "trace_mode": "triton",
    }
    assert TraceStore(TraceConfig()).told(TraceSettings())["trace_file"] == ""
