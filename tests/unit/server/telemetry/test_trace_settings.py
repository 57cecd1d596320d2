"""Trace settings: what is accepted, what is inherited from where, and that a refused change changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.server.errors import InvalidRequest, NotSupported
from paceline.server.telemetry.trace_settings import (
    OtlpTarget,
    TraceConfig,
    TraceSettings,
    TraceStore,
    parse_trace_config,
)

CONFIG = TraceConfig(Path("t.json"), TraceSettings(rate=7))


def test_config_without_settings_traces_nothing() -> None:
    assert parse_trace_config([]) == TraceConfig(None, TraceSettings(False, 1000, -1, 0))


def test_config_of_all_triton_settings_is_read() -> None:
    given = [
        "triton,file=/tmp/t.json",
        "level=TIMESTAMPS",
        "rate=2",
        "count=9",
        "triton,log-frequency=3",
        "mode=triton",
    ]
    assert parse_trace_config(given) == TraceConfig(Path("/tmp/t.json"), TraceSettings(True, 2, 9, 3))


def test_config_of_opentelemetry_is_read() -> None:
    given = [
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        "rate=0",
        "opentelemetry,url=collector:4317/",
        "opentelemetry,resource=service.name=vision",
        "resource=zone=a=b",
        "bsp_max_queue_size=900",
        "opentelemetry,bsp_schedule_delay=100",
        "bsp_max_export_batch_size=9",
    ]
    target = OtlpTarget("http://collector:4317", {"service.name": "vision", "zone": "a=b"}, 900, 100, 9)
    config = parse_trace_config(given)
    assert config == TraceConfig(None, TraceSettings(True, 0), target)
    assert TraceStore(config).as_text(config.settings)["trace_mode"] == "opentelemetry"


def test_config_of_opentelemetry_alone_leaves_the_rest_to_its_environment_and_traces_nothing() -> None:
    assert parse_trace_config(["mode=opentelemetry"]) == TraceConfig(None, TraceSettings(), OtlpTarget())


def test_store_of_opentelemetry_can_be_switched_on_without_a_file() -> None:
    store = TraceStore(TraceConfig(otlp=OtlpTarget()))
    store.update("m", {"trace_level": ["TIMESTAMPS"], "trace_rate": ["0"]})
    assert store.settings("m") == TraceSettings(timestamps=True, rate=0)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["file"], "expected [MODE,]KEY=VALUE, got 'file'"),
        (["triton,file="], "expected [MODE,]KEY=VALUE, got 'triton,file='"),
        (["zipkin,url=x"], "expected mode triton or opentelemetry, got 'zipkin'"),
        (["mode=zipkin"], "expected mode triton or opentelemetry, got 'zipkin'"),
        (
            ["colour=red"],
            "expected one of file, mode, level, rate, count, log-frequency, url, resource, bsp_max_queue_size, "
            "bsp_schedule_delay, bsp_max_export_batch_size, got 'colour'",
        ),
        (["mode=opentelemetry", "file=x"], "expected settings of one mode, got some of opentelemetry and triton"),
        (["mode=triton", "url=x"], "expected settings of one mode, got some of triton and opentelemetry"),
        (
            ["opentelemetry,file=x"],
            "expected one of url, resource, bsp_max_queue_size, bsp_schedule_delay, "
            "bsp_max_export_batch_size in mode opentelemetry, got 'file'",
        ),
        (["triton,url=x"], "expected file in mode triton, got 'url'"),
        *(
            (
                [f"url={url}"],
                "expected the URL of a collector that takes OTLP over gRPC, such as http://localhost:4317, "
                f"got '{url}'",
            )
            for url in ("localhost:4318/v1/traces", "ftp://x:1", "http://", "http://x:1?y=z")
        ),
        (["resource=x"], "expected opentelemetry,resource=NAME=VALUE, got 'x'"),
        (
            ["bsp_max_queue_size=0"],
            "--trace-config opentelemetry,bsp_max_queue_size: expected a whole number from 1 to 2147483647, got '0'",
        ),
        (
            ["bsp_max_queue_size=10", "bsp_max_export_batch_size=11"],
            "expected bsp_max_export_batch_size up to bsp_max_queue_size, got 11 and 10",
        ),
        (["rate=0"], "trace setting 'trace_rate': expected a whole number from 1 to 2147483647, got '0'"),
        (["rate=1", "rate=2"], "trace setting 'trace_rate': expected 1 value, got 2"),
        (
            ["level=TIMESTAMPS"],
            "trace setting 'trace_level': TIMESTAMPS need a destination; "
            "start the server with --trace-config triton,file=PATH or mode=opentelemetry",
        ),
    ],
)
def test_config_with_invalid_settings_is_refused(given: list[str], fault: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        parse_trace_config(given)
    assert str(caught.value) == fault


def test_store_begins_with_the_servers_start_settings() -> None:
    assert TraceStore(CONFIG).settings("") == TraceStore(CONFIG).settings("m") == CONFIG.settings


def test_store_gives_a_models_settings_then_the_global_then_the_initial_ones() -> None:
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
        ("trace_rate", ["1_0"], "expected a whole number from 1 to 2147483647, got '1_0'"),
        ("trace_rate", ["\u0663"], "expected a whole number from 1 to 2147483647, got '\u0663'"),
        ("trace_rate", ["9" * 20], f"expected a whole number from 1 to 2147483647, got '{'9' * 20}'"),
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
def test_store_refuses_invalid_values_and_changes_nothing(model: str, name: str, values: list[str], fault: str) -> None:
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
def test_store_refuses_unsupported_changes_and_changes_nothing(name: str, value: str, fault: str) -> None:
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


def test_settings_as_text_have_the_names_and_values_of_the_extension() -> None:
    store = TraceStore(CONFIG)
    assert store.as_text(TraceSettings(True, 7, -1, 0)) == {
        "trace_level": "TIMESTAMPS",
        "trace_rate": "7",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "t.json",
        "trace_mode": "triton",
    }
    assert TraceStore(TraceConfig()).as_text(TraceSettings())["trace_file"] == ""


def test_trace_file_outside_utf8_is_told_escaped() -> None:
    config = TraceConfig(Path(os.fsdecode(b"r\xe9.json")))
    assert TraceStore(config).as_text(TraceSettings())["trace_file"] == "r\\udce9.json"
