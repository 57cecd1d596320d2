"""What is traced: the settings of Triton's "trace" extension, for all models and for single ones.

Lives here: names, values, their checks, and what is inherited. Must not: requests, files. The rule: a model has what
was set for it, else what was set for all, else what the server was started with; and a request to change settings
changes all that it names or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.server.errors import InvalidRequest, NotSupported
from paceline.server.files import in_utf8

_MAX_NUMBER = 2**31 - 1
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,19}\s*")
"""What Triton accepts as a whole number. int() accepts more: 1_0, digits of other scripts."""
_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_LEAST = {"trace_rate": 1, "trace_count": -1, "log_frequency": 0}
_FIELDS = {"trace_level": "timestamps", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
_FIXED = ("trace_file", "trace_mode")
_NAMES = (*_FIELDS, *_FIXED)
_MODES = ("triton", "opentelemetry")
# Keys of mode opentelemetry, with the fields of OtlpTarget that they set; `bsp` is its batch span processor.
_OTLP_NUMBERS = {
    "bsp_max_queue_size": "max_queue_size",
    "bsp_schedule_delay": "schedule_delay_ms",
    "bsp_max_export_batch_size": "max_export_batch_size",
}
_OTLP = ("url", "resource", *_OTLP_NUMBERS)
_FLAGS = {"level": "trace_level", "rate": "trace_rate", "count": "trace_count", "log-frequency": "log_frequency"}

_Changes = dict[str, Any]  # fields of the settings, by name: each has a type of its own


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Whether `timestamps` of requests are traced: of one in `rate`, of `count` in all (-1: no bound). The next file
    begins after `log_frequency` traces (0: never). A rate of 0: only requests that belong to traces already."""

    timestamps: bool = False
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


@dataclass(frozen=True, slots=True)
class OtlpTarget:
    """Where spans go, over gRPC, `resource` attributes of the server, and bounds of the queue before the export. "" and
    None leave a value to OpenTelemetry's environment variables or defaults."""

    url: str = ""
    resource: Mapping[str, str] = field(default_factory=dict)
    max_queue_size: int | None = None
    schedule_delay_ms: int | None = None
    max_export_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """What `--trace-config` says: where traces go, to a `file` in mode triton, to `otlp` in mode opentelemetry (with
    neither, nothing is traced), and the settings to begin with; how long the end waits for a file that hangs."""

    file: Path | None = None
    settings: TraceSettings = field(default_factory=TraceSettings)
    otlp: OtlpTarget | None = None
    patience_s: float = 3.0

    @property
    def mode(self) -> str:
        return "triton" if self.otlp is None else "opentelemetry"

    @property
    def has_target(self) -> bool:
        return self.file is not None or self.otlp is not None


def parse_trace_config(given: Iterable[str]) -> TraceConfig:
    """Read the values of `--trace-config`, such as `triton,file=PATH`, `mode=opentelemetry` and `level=TIMESTAMPS`.
    Raises ValueError saying what was expected and what was given."""
    own: dict[str, list[str]] = {}
    values: dict[str, list[str]] = {}
    modes: list[str] = []
    for text in given:
        mode, comma, setting = text.rpartition(",")
        key, equals, value = setting.partition("=")
        if comma and mode not in _MODES:
            raise ValueError(f"expected mode {' or '.join(_MODES)}, got '{mode}'")
        if not equals or not value:
            raise ValueError(f"expected [MODE,]KEY=VALUE, got '{text}'")
        if key == "mode":
            modes.append(value)
        elif key in _FLAGS:
            values.setdefault(_FLAGS[key], []).append(value)
        elif key == "file" or key in _OTLP:
            own.setdefault(key, []).append(value)
            modes.append(mode or ("triton" if key == "file" else "opentelemetry"))
        else:
            raise ValueError(f"expected one of file, mode, {', '.join((*_FLAGS, *_OTLP))}, got '{key}'")
    for mode in modes:
        if mode not in _MODES:
            raise ValueError(f"expected mode {' or '.join(_MODES)}, got '{mode}'")
        if mode != modes[0]:
            raise ValueError(f"expected settings of one mode, got some of {modes[0]} and {mode}")
    otlp = _otlp(own) if "opentelemetry" in modes else None
    if otlp is None and (strangers := own.keys() - {"file"}):
        raise ValueError(f"expected file in mode triton, got '{min(strangers)}'")
    config = TraceConfig(Path(own["file"][-1]) if "file" in own else None, otlp=otlp)
    try:
        return replace(config, settings=replace(config.settings, **_parsed(values, config)))
    except (InvalidRequest, NotSupported) as error:
        raise ValueError(str(error)) from None


def _otlp(own: Mapping[str, list[str]]) -> OtlpTarget:
    if "file" in own:
        raise ValueError(f"expected one of {', '.join(_OTLP)} in mode opentelemetry, got 'file'")
    resource: dict[str, str] = {}
    for text in own.get("resource", []):
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"expected opentelemetry,resource=NAME=VALUE, got '{text}'")
        resource[name] = value
    numbers: dict[str, int] = {
        field: _whole(f"--trace-config opentelemetry,{key}", own[key][-1], 1)
        for key, field in _OTLP_NUMBERS.items()
        if key in own
    }
    queue, batch = numbers.get("max_queue_size"), numbers.get("max_export_batch_size")
    if (batch or 512) > (queue or 2048):
        raise ValueError(
            f"expected bsp_max_export_batch_size up to bsp_max_queue_size, got {batch or 512} and {queue or 2048}"
        )
    return OtlpTarget(_url(own["url"][-1]) if "url" in own else "", resource, **numbers)


def _url(text: str) -> str:
    """An endpoint of OTLP over gRPC, which has no path. Triton uses OTLP over HTTP, with the path `/v1/traces`."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ValueError(
            f"expected the URL of a collector that takes OTLP over gRPC, such as http://localhost:4317, got '{text}'"
        )
    return f"{parts.scheme}://{parts.netloc}"


class TraceStore:
    """The settings in force, by model; "" stands for all models."""

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._given: dict[str, _Changes] = {"": {}}

    @property
    def models(self) -> list[str]:
        """The models that have settings of their own."""
        return [model for model in self._given if model]

    def settings(self, model: str) -> TraceSettings:
        """The settings that hold for `model`."""
        return replace(self._config.settings, **{**self._given[""], **self._given.get(model, {})})

    def update(self, model: str, given: Mapping[str, Sequence[str]]) -> None:
        """Change settings of `model`. A setting without values goes back to what it inherits.

        Raises InvalidRequest or NotSupported, and then nothing has changed.
        """
        unset = {name for name, values in given.items() if not values and name in _NAMES}
        changes = _parsed({name: values for name, values in given.items() if name not in unset}, self._config)
        own = {**self._given.get(model, {}), **changes}
        for name in unset:
            own.pop(_FIELDS.get(name, ""), None)
        if own or not model:
            self._given[model] = own
        else:
            self._given.pop(model, None)

    def forget(self, model: str) -> bool:
        """Drop the settings that `model` has of its own. Returns whether there were any."""
        return self._given.pop(model, None) is not None

    def as_text(self, settings: TraceSettings) -> dict[str, str]:
        """`settings` under the extension's names and in its form, along with those that can't be changed."""
        return {
            "trace_level": "TIMESTAMPS" if settings.timestamps else "OFF",
            "trace_rate": str(settings.rate),
            "trace_count": str(settings.count),
            "log_frequency": str(settings.log_frequency),
            "trace_file": in_utf8(str(self._config.file or "")),
            "trace_mode": self._config.mode,
        }


def _parsed(given: Mapping[str, Sequence[str]], config: TraceConfig) -> _Changes:
    """The fields of TraceSettings that `given` sets. Raises InvalidRequest or NotSupported."""
    changes: _Changes = {}
    for name, values in given.items():
        if name in _FIXED:
            raise NotSupported(f"trace setting '{name}' can only be given when the server starts, with --trace-config")
        if name not in _FIELDS:
            raise InvalidRequest(f"trace setting '{name}': expected one of {', '.join(_NAMES)}")
        is_level = name == "trace_level"
        changes[_FIELDS[name]] = _level(values, config.has_target) if is_level else _number(name, values, config)
    return changes


def _level(values: Sequence[str], has_target: bool) -> bool:
    for value in values:
        if value not in _LEVELS:
            raise InvalidRequest(f"trace setting 'trace_level': expected some of {', '.join(_LEVELS)}, got '{value}'")
    if "OFF" in values and len(values) > 1:
        raise InvalidRequest(f"trace setting 'trace_level': expected OFF alone, got {', '.join(values)}")
    if "TENSORS" in values:
        raise NotSupported("trace setting 'trace_level': TENSORS is not supported by this build, only TIMESTAMPS is")
    if "TIMESTAMPS" in values and not has_target:
        raise NotSupported(
            "trace setting 'trace_level': TIMESTAMPS need a destination; "
            "start the server with --trace-config triton,file=PATH or mode=opentelemetry"
        )
    return "TIMESTAMPS" in values


def _number(name: str, values: Sequence[str], config: TraceConfig) -> int:
    """A rate of 0 is allowed where requests may belong to traces already: then only those are traced."""
    if len(values) != 1:
        raise InvalidRequest(f"trace setting '{name}': expected 1 value, got {len(values)}")
    least = 0 if name == "trace_rate" and config.otlp is not None else _LEAST[name]
    try:
        return _whole(f"trace setting '{name}'", values[0], least)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _whole(what: str, text: str, least: int) -> int:
    if not (_WHOLE.fullmatch(text) and least <= int(text) <= _MAX_NUMBER):
        raise ValueError(f"{what}: expected a whole number from {least} to {_MAX_NUMBER}, got '{text}'")
    return int(text)
