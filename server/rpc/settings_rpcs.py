"""The RPCs of the extensions "logging" and "trace", which read and change how the server logs and what it traces.

Lives here: the RPCs, and who may change what: every caller may read, but changing needs a switch, since it affects all
callers. Must not: how lines look (`log`), or what is traced (`tracing`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

from paceline.protos import inference_pb2 as pb
from paceline.server.errors import InvalidRequest, ModelNotFound, ModelNotReady, NotSupported
from paceline.server.models.model_lookup import ModelLookup
from paceline.server.rpc.calls import Context, answering
from paceline.server.telemetry import log
from paceline.server.telemetry.log import LogSettings
from paceline.server.telemetry.tracing import Tracer

_log = logging.getLogger("paceline.server.settings")

_FORMATS = ("default", "ISO8601", "json")
# Each setting's field of LogSettings, and the field of the message that its value comes in.
_LOG_SETTINGS = {
    "log_info": ("info", "bool_param"),
    "log_warning": ("warning", "bool_param"),
    "log_error": ("error", "bool_param"),
    "log_verbose_level": ("verbose_level", "uint32_param"),
    "log_format": ("format", "string_param"),
}


class SettingsRpcs:
    """Reads the settings of the logger and of `tracer`; changes them only if `is_allowed`."""

    def __init__(self, repository: ModelLookup, tracer: Tracer, is_allowed: bool) -> None:
        self._repository = repository
        self._tracer = tracer
        self._is_allowed = is_allowed
        self.on_log_change: Callable[[], None] = lambda: None
        traces = ("trace",) if tracer.can_trace else ()
        self.extensions: tuple[str, ...] = ("logging", *traces) if is_allowed else ()

    @answering
    async def LogSettings(self, request: pb.LogSettingsRequest, context: Context) -> pb.LogSettingsResponse:
        """All log settings, after the requested changes, which are made together or not at all."""
        if request.settings:
            self._refuse_unless_allowed("log settings")
            log.apply(_changed(log.current(), request.settings))
            self.on_log_change()
            _log.info("log settings changed by a client: %s", ", ".join(request.settings))
        settings = asdict(log.current())
        response = pb.LogSettingsResponse()
        response.settings["log_file"].string_param = ""
        for name, (field, kind) in _LOG_SETTINGS.items():
            setattr(response.settings[name], kind, settings[field])
        return response

    @answering
    async def TraceSetting(self, request: pb.TraceSettingRequest, context: Context) -> pb.TraceSettingResponse:
        """All trace settings of a model, or of all models ("" for the name), after the requested changes."""
        try:
            if request.model_name:
                self._repository.get(request.model_name, "")
        except ModelNotReady:
            # Settings are kept for a model that isn't ready. Names that may be nobody's are unbounded, so for them none
            # are.
            if not self._repository.names_known:
                raise
        except ModelNotFound as error:
            raise InvalidRequest(str(error)) from None
        if request.settings:
            self._refuse_unless_allowed("trace settings")
            given = {name: list(setting.value) for name, setting in request.settings.items()}
            self._tracer.update(request.model_name, given)
            whose = f"model '{request.model_name}'" if request.model_name else "all models"
            _log.info("trace settings of %s changed by a client: %s", whose, ", ".join(given))
        response = pb.TraceSettingResponse()
        for name, value in self._tracer.settings(request.model_name).items():
            response.settings[name].value.append(value)
        return response

    def _refuse_unless_allowed(self, what: str) -> None:
        if not self._is_allowed:
            raise NotSupported(
                f"{what} can't be changed by clients: start the server with --allow-remote-settings true"
            )


def _changed(settings: LogSettings, given: Mapping[str, pb.LogSettingsRequest.SettingValue]) -> LogSettings:
    """`settings` with the changes in `given`. Raises InvalidRequest or NotSupported."""
    changes: dict[str, object] = {}
    for name, value in given.items():
        if name == "log_file":
            raise NotSupported("log setting 'log_file' can't be changed: the server logs to stderr")
        if name not in _LOG_SETTINGS:
            raise InvalidRequest(f"log setting '{name}': expected one of log_file, {', '.join(_LOG_SETTINGS)}")
        field, expected = _LOG_SETTINGS[name]
        kind = value.WhichOneof("parameter_choice")
        if kind != expected:
            raise InvalidRequest(f"log setting '{name}': expected {expected}, got {kind or 'none'}")
        changes[field] = getattr(value, expected)
    form = changes.get("format", settings.format)
    if form not in _FORMATS:
        raise InvalidRequest(f"log setting 'log_format': expected one of {', '.join(_FORMATS)}, got '{form}'")
    return replace(settings, **changes)  # type: ignore[arg-type]
