"""Traces: where each request was when, as JSON in a file or as spans. Triton's "trace" extension. And the log's lines
about each request.

Lives here: which requests are traced, and in mode `triton` their timestamps; in mode `opentelemetry`
`server.telemetry.spans` has the rest; what follows one request for a span or a line. Must not: change what happens to a
request, or do anything for those of which nothing is recorded. Everything except writing runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

from paceline.backends.base import Execution
from paceline.backends.installed import how_to_install
from paceline.scheduler.request import BatchFacts
from paceline.server.call_facts import TraceParent
from paceline.server.codec.wire_request import AnyMessage
from paceline.server.errors import StartError, error_text, status_of
from paceline.server.telemetry.log import debugging
from paceline.server.telemetry.trace_settings import TraceConfig, TraceSettings, TraceStore
from paceline.server.telemetry.trace_writer import TraceWriter

if TYPE_CHECKING:
    from paceline.server.telemetry.spans import RequestSpan, Spans

_access = logging.getLogger("paceline.access")

_MAX_CHARACTERS = 200
"""Of a text that a client sent: a file must not grow by whatever clients send."""
_GIVEN_UP = "the caller gave up"


class _Sampler:
    """Picks one request in `settings.rate`, up to `settings.count`."""

    def __init__(self, settings: TraceSettings) -> None:
        self.given = self.settings = settings
        self._seen = 0

    def sample(self) -> bool:
        settings = self.settings
        if not settings.timestamps or not settings.count or not settings.rate:
            return False
        self._seen += 1
        if self._seen % settings.rate:
            return False
        if settings.count > 0:
            self.settings = replace(settings, count=settings.count - 1)
        return True


class Tracer:
    """Traces requests that were answered. While `active` is false, nobody needs to call `record`. In mode opentelemetry
    there are `spans`, which ask `is_on` and `picks`, and it is never active. Raises StartError if that mode's packages
    are missing."""

    def __init__(self, config: TraceConfig | None = None) -> None:
        config = config or TraceConfig()
        self._store = TraceStore(config)
        self._writer = TraceWriter(config.file, config.patience_s) if config.file is not None else None
        self.can_trace = config.has_target
        self.spans: Spans | None = None
        if config.otlp is not None:
            try:
                from paceline.server.telemetry.spans import Spans  # isn't always installed, and costs memory
            except ImportError as error:
                needs = f"mode opentelemetry needs more packages: {how_to_install('otel')} ({error})"
                raise StartError(f"--trace-config: {needs}") from None
            self.spans = Spans(config.otlp, self.is_on, self.picks)
        self._samplers: dict[str, _Sampler] = {}
        self._traces = 0
        self.active = False
        self._follow()

    def start(self) -> None:
        """Get ready to write. Raises StartError if the file can't be written."""
        if self._writer is not None:
            try:
                self._writer.start()
            except OSError as error:
                raise StartError(f"--trace-config: {error}") from None
        if self.spans is not None:
            self.spans.start()

    def close(self) -> None:
        """Write what was traced, and end. Blocks for as long as that takes."""
        if self._writer is not None:
            self._writer.close()
        if self.spans is not None:
            self.spans.close()

    def settings(self, model: str = "") -> dict[str, str]:
        """The settings that hold for `model` ("": for all that have none of their own), in the extension's form; the
        count is that of traces to come."""
        return self._store.as_text(self._sampler(model).settings)

    def update(self, model: str, given: Mapping[str, Sequence[str]]) -> None:
        """Change the settings of `model`. Raises InvalidRequest or NotSupported, and then nothing has changed."""
        self._store.update(model, given)
        self._follow(model)

    def forget(self, model: str) -> None:
        """`model` is gone: settings that were its own don't hold for another of that name."""
        if self._store.forget(model):
            self._follow()

    def is_on(self, model: str) -> bool:
        """Whether requests for `model` are traced at all."""
        return self._sampler(model).settings.timestamps

    def picks(self, model: str) -> bool:
        """Whether to trace a request that has arrived for `model`: one in `rate`, and `count` in all."""
        return self._sampler(model).sample()

    def record(self, answered: Answered) -> None:
        """Trace a request that has just been answered, if it is its turn, and with it those that were made for it."""
        sampler = self._sampler(answered.model)
        if self._writer is None or not sampler.sample():
            return
        settings = sampler.settings
        self._writer.put([*self._entries(answered)], settings.log_frequency, last=settings.count == 0)

    def _entries(self, answered: Answered, parent: int = 0) -> Iterator[Mapping[str, object]]:
        self._traces += 1
        own, version = self._traces, answered.version
        # Other servers' versions may have other names, or none.
        number = int(version) if version.isdecimal() else version
        head: dict[str, object] = {"id": own, "model_name": answered.model, "model_version": number}
        if answered.request_id:
            head["request_id"] = answered.request_id[:_MAX_CHARACTERS]
        if parent:
            head["parent_id"] = parent
        yield head
        yield {"id": own, "timestamps": [{"name": name, "ns": ns} for name, ns in answered.times.items()]}
        for one in answered.within:
            yield from self._entries(one, own)

    def _sampler(self, model: str) -> _Sampler:
        return self._samplers.get(model) or self._samplers[""]

    def _follow(self, changed: str = "") -> None:
        """Sample as the settings say now. Where they have changed, counting starts anew."""
        before = self._samplers
        self._samplers = {}
        for model in ("", *self._store.models):
            settings, sampler = self._store.settings(model), before.get(model)
            if sampler is None or model == changed or sampler.given != settings:
                sampler = _Sampler(settings)
            self._samplers[model] = sampler
        self.active = self._writer is not None and any(one.settings.timestamps for one in self._samplers.values())


class Answered(NamedTuple):
    """A request that was answered: its `times` by Triton's names, and what was made for it `within`, such as the steps
    of an ensemble."""

    model: str
    version: str
    request_id: str
    times: Mapping[str, int]
    within: Sequence[Answered]

    @classmethod
    def now(
        cls,
        model: str,
        version: str,
        request_id: str,
        began_ns: int,
        facts: BatchFacts | None,
        within: Sequence[Answered],
    ) -> Answered:
        """One that arrived at `began_ns`. What a model doesn't report about its execution is left out, and without
        `facts` all of it: of one that was answered before its execution ended, or without any. gRPC doesn't say when it
        began to read, so that is when it was done; without it, Triton's summary of traces finds no request. Nor does
        gRPC say when it has sent, so there is no GRPC_SEND_END."""
        times = dict.fromkeys(("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START"), began_ns)
        if facts is not None:
            times["QUEUE_START"] = facts.started_ns - facts.queue_ns
            times["COMPUTE_START"] = facts.started_ns
            if isinstance(facts.executed, Execution):
                times["COMPUTE_INPUT_END"] = facts.started_ns + facts.executed.input_ns
                times["COMPUTE_OUTPUT_START"] = times["COMPUTE_INPUT_END"] + facts.executed.infer_ns
            times["COMPUTE_END"] = facts.started_ns + facts.compute_ns
        times["INFER_RESPONSE_COMPLETE"] = times["GRPC_SEND_START"] = times["REQUEST_END"] = monotonic_ns()
        return cls(model, version, request_id, times, within)


class RequestWatch:
    """A request from when it is read until it has ended, which `on_success` or `on_failure` reports, once. `span` is
    set if the request is traced."""

    __slots__ = ("_began_ns", "_id", "_model", "_rows", "_version", "span")

    def __init__(self, request: AnyMessage, parent: TraceParent | None, spans: Spans | None, began_ns: int) -> None:
        self._began_ns = began_ns
        self._model = request.model_name[:_MAX_CHARACTERS]
        self._version = request.model_version[:_MAX_CHARACTERS]
        self._id = request.id[:_MAX_CHARACTERS]
        self._rows = 0
        self.span: RequestSpan | None = None
        if spans is not None:
            self.span = spans.begin(self._model, self._id, self._began_ns, parent)

    @property
    def as_parent(self) -> TraceParent | None:
        """What requests that are made in its course come from."""
        return self.span.as_parent if self.span is not None else None

    def on_taken(self, version: str, rows: int) -> None:
        """The request is valid, has `rows` rows, is for `version`, and is to be queued now."""
        self._version = version
        self._rows = rows
        if self.span is not None:
            self.span.on_taken(version, rows)

    def on_success(self, facts: BatchFacts | None) -> None:
        """It has its answer; for one that was executed in parts, `facts` are those of the last part."""
        if self.span is not None:
            self.span.end(None)
        if debugging.on:
            self._write("OK", facts, "")

    def on_failure(self, error: BaseException) -> None:
        """It has ended with `error`."""
        if self.span is not None:
            self.span.end(error)
        if debugging.on:
            code = status_of(error)
            text = _GIVEN_UP if isinstance(error, asyncio.CancelledError) else error_text(error)
            self._write("INTERNAL" if code is None else code.name, None, text[:_MAX_CHARACTERS])

    def _write(self, status: str, facts: BatchFacts | None, error: str) -> None:
        fields: dict[str, str | int] = {
            "model": self._model,
            "version": self._version,
            "request_id": self._id,
            "status": status,
            "duration_us": (monotonic_ns() - self._began_ns) // 1_000,
            "rows": self._rows,
        }
        if facts is not None:
            fields["queue_us"] = facts.queue_ns // 1_000
            fields["compute_us"] = facts.compute_ns // 1_000
            fields["batch_rows"] = facts.rows
        if self.span is not None:
            fields["trace_id"] = self.span.trace_id
        if error:
            fields["error"] = error
        # In the text format, names and values are part of the message.
        text = " ".join(
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}" for name, value in fields.items()
        )
        _access.debug("%s", text, extra={"fields": fields})
