"""Traces: where each request was when, as JSON in a file or as spans. Triton's "trace" extension.

Lives here: which requests are traced, and in mode `triton` their timestamps; in mode `opentelemetry`
`server.telemetry.spans` has the rest. Must not: change what happens to a request, or do anything for those that aren't
traced. Everything except writing runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic_ns
from typing import TYPE_CHECKING

from paceline.backends.base import Execution
from paceline.backends.extras import how_to_install
from paceline.scheduler.request import BatchFacts
from paceline.server.errors import StartError
from paceline.server.telemetry.trace_settings import OtlpTarget, TraceConfig, TraceSettings, TraceStore
from paceline.server.telemetry.trace_writer import TraceWriter

if TYPE_CHECKING:
    from paceline.server.telemetry.spans import Spans

__all__ = ["Tracer"]

_MAX_CHARACTERS = 200
"""Of an id that a client sent: a file must not grow by whatever clients send."""


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
    there are `spans`, which call `is_on` and `picks`, and it is never active. Raises StartError if that mode's packages
    are missing."""

    def __init__(self, config: TraceConfig | None = None) -> None:
        config = config or TraceConfig()
        self._store = TraceStore(config)
        self._writer = TraceWriter(config.file) if config.file is not None else None
        self.can_trace = config.has_target
        self.spans = _spans(config.otlp, self) if config.otlp is not None else None
        self._samplers: dict[str, _Sampler] = {}
        self._traces = 0
        self.active = False
        self._follow()

    def start(self) -> None:
        """Get ready to write. Raises OSError if the file can't be written."""
        if self._writer is not None:
            self._writer.start()
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

    def record(self, model: str, version: str, request_id: str, began_ns: int, facts: BatchFacts) -> None:
        """Trace a request that arrived at `began_ns` and has just been answered, if it is its turn."""
        sampler = self._sampler(model)
        if self._writer is None or not sampler.sample():
            return
        self._traces += 1
        # Other servers' versions may have other names, or none.
        number = int(version) if version.isdecimal() else version
        head: dict[str, object] = {"id": self._traces, "model_name": model, "model_version": number}
        if request_id:
            head["request_id"] = request_id[:_MAX_CHARACTERS]
        times = [{"name": name, "ns": ns} for name, ns in _times(began_ns, facts, monotonic_ns()).items()]
        settings = sampler.settings
        self._writer.put(
            (head, {"id": self._traces, "timestamps": times}), settings.log_frequency, last=settings.count == 0
        )

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
        self.active = self._writer is not None and any(
            sampler.settings.timestamps for sampler in self._samplers.values()
        )


def _spans(target: OtlpTarget, tracer: Tracer) -> Spans:
    try:
        from paceline.server.telemetry.spans import Spans  # what it imports isn't always installed, and costs memory
    except ImportError as error:
        raise StartError(
            f"--trace-config: mode opentelemetry needs more packages: {how_to_install('otel')} ({error})"
        ) from None
    return Spans(target, tracer)


def _times(began_ns: int, facts: BatchFacts, ended_ns: int) -> dict[str, int]:
    """Times by Triton's names; what a model doesn't report about its execution is left out. gRPC doesn't say when it
    began to read, so that is when it was done; without it, Triton's summary of traces finds no request. Nor does gRPC
    say when it has sent, so there is no GRPC_SEND_END."""
    started_ns = facts.started_ns
    times = {
        "GRPC_WAITREAD_START": began_ns,
        "GRPC_WAITREAD_END": began_ns,
        "REQUEST_START": began_ns,
        "QUEUE_START": started_ns - facts.queue_ns,
        "COMPUTE_START": started_ns,
    }
    if isinstance(facts.executed, Execution):
        times["COMPUTE_INPUT_END"] = started_ns + facts.executed.input_ns
        times["COMPUTE_OUTPUT_START"] = times["COMPUTE_INPUT_END"] + facts.executed.infer_ns
    times["COMPUTE_END"] = started_ns + facts.compute_ns
    times["INFER_RESPONSE_COMPLETE"] = times["GRPC_SEND_START"] = times["REQUEST_END"] = ended_ns
    return times
