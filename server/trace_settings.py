"""What is traced: the settings of Triton's "trace" extension, for all models and for single ones.

Lives here: names, values, their checks, and who inherits what. Must not: requests, files. The rule: a model has what
was set for it, else what was set for all, else what the server was started with; and a request to change settings
changes all that it names or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from server.errors import InvalidRequest, NotSupported

__all__ = ["TraceConfig", "TraceSettings", "TraceStore", "parse_trace_config"]

_MOST = 2**31 - 1
_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_NUMBERS = {"trace_rate": ("rate", 1), "trace_count": ("count", -1), "log_frequency": ("log_frequency", 0)}
_FIXED = ("trace_file", "trace_mode")
_NAMES = ("trace_level", *_NUMBERS, *_FIXED)
_FLAGS = {"level": "trace_level", "rate": "trace_rate", "count": "trace_count", "log-frequency": "log_frequency"}


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Whether `timestamps` of requests are written, of one in `rate`, of `count` in all (-1: no bound), and after how
    many of them the next file begins (0: never)."""

    timestamps: bool = False
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """What `--trace-config` says: the `file` that traces go to (None: nowhere, and nothing is traced), and the settings
    to begin with."""

    file: Path | None = None
    settings: TraceSettings = field(default_factory=TraceSettings)


def parse_trace_config(given: Iterable[str]) -> TraceConfig:
    """Read the values of `--trace-config`, such as `triton,file=PATH` and `level=TIMESTAMPS`. Raises ValueError saying
    what was expected and what came."""
    file: Path | None = None
    values: dict[str, list[str]] = {}
    for text in given:
        mode, comma, setting = text.rpartition(",")
        key, equals, value = setting.partition("=")
        if comma and mode != "triton":
            raise ValueError(f"expected mode triton, the only one in this build, got '{mode}'")
        if not equals or not value:
            raise ValueError(f"expected [triton,]KEY=VALUE, got '{text}'")
        if key == "file":
            file = Path(value)
        elif key == "mode":
            if value != "triton":
                raise ValueError(f"expected mode triton, the only one in this build, got '{value}'")
        elif key in _FLAGS:
            values.setdefault(_FLAGS[key], []).append(value)
        else:
            raise ValueError(f"expected one of file, mode, {', '.join(_FLAGS)}, got '{key}'")
    try:
        changes = _read(values, has_file=file is not None)
    except (InvalidRequest, NotSupported) as error:
        raise ValueError(str(error)) from None
    return TraceConfig(file, replace(TraceSettings(), **changes))


class TraceStore:
    """The settings in force, by model; "" stands for all models."""

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._changes: dict[str, dict[str, Any]] = {"": {}}

    @property
    def models(self) -> list[str]:
        """The models that have settings of their own."""
        return [model for model in self._changes if model]

    def settings(self, model: str) -> TraceSettings:
        """What holds for `model`."""
        return replace(self._config.settings, **{**self._changes[""], **self._changes.get(model, {})})

    def update(self, model: str, given: Mapping[str, Sequence[str]]) -> None:
        """Change settings of `model`. Without a value a setting goes back to what it inherits.

        Raises InvalidRequest or NotSupported, and then nothing has changed.
        """
        changes = _read(
            {name: values for name, values in given.items() if values or name not in _NAMES},
            has_file=self._config.file is not None,
        )
        own = {**self._changes.get(model, {}), **changes}
        for name, values in given.items():
            if not values:
                own.pop(_field(name), None)
        if own or not model:
            self._changes[model] = own
        else:
            self._changes.pop(model, None)

    def told(self, settings: TraceSettings) -> dict[str, str]:
        """`settings` by the names and in the form of the extension, and beside them what can't be changed."""
        return {
            "trace_level": "TIMESTAMPS" if settings.timestamps else "OFF",
            "trace_rate": str(settings.rate),
            "trace_count": str(settings.count),
            "log_frequency": str(settings.log_frequency),
            "trace_file": str(self._config.file or ""),
            "trace_mode": "triton",
        }


def _read(given: Mapping[str, Sequence[str]], *, has_file: bool) -> dict[str, Any]:
    """The fields of TraceSettings that `given` changes. Raises InvalidRequest or NotSupported."""
    changes: dict[str, Any] = {}
    for name, values in given.items():
        if name in _FIXED:
            raise NotSupported(f"trace setting '{name}' can only be given when the server starts, with --trace-config")
        if name == "trace_level":
            changes["timestamps"] = _level(values, has_file)
        elif name in _NUMBERS:
            changes[_field(name)] = _number(name, values)
        else:
            raise InvalidRequest(f"trace setting '{name}': expected one of {', '.join(_NAMES)}")
    return changes


def _field(name: str) -> str:
    return "timestamps" if name == "trace_level" else _NUMBERS[name][0] if name in _NUMBERS else name


def _level(values: Sequence[str], has_file: bool) -> bool:
    for value in values:
        if value not in _LEVELS:
            raise InvalidRequest(f"trace setting 'trace_level': expected some of {', '.join(_LEVELS)}, got '{value}'")
    if "OFF" in values and len(values) > 1:
        raise InvalidRequest(f"trace setting 'trace_level': expected OFF alone, got {', '.join(values)}")
    if "TENSORS" in values:
        raise NotSupported("trace setting 'trace_level': TENSORS is not supported by this build, only TIMESTAMPS is")
    if "TIMESTAMPS" in values and not has_file:
        raise NotSupported(
            "trace setting 'trace_level': TIMESTAMPS have no file to go to; "
            "start the server with --trace-config triton,file=PATH"
        )
    return "TIMESTAMPS" in values


def _number(name: str, values: Sequence[str]) -> int:
    if len(values) != 1:
        raise InvalidRequest(f"trace setting '{name}': expected 1 value, got {len(values)}")
    least, text = _NUMBERS[name][1], values[0]
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= _MOST:
        raise InvalidRequest(f"trace setting '{name}': expected a whole number from {least} to {_MOST}, got '{text}'")
    return number
