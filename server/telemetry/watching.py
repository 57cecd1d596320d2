"""One request, followed for code that records every one: a debug line in the log, a span.

Lives here: what is recorded about a request. Must not: do anything if nothing is recorded; no watch is made then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from paceline.scheduler.request import BatchFacts
from paceline.server.call_facts import TraceParent
from paceline.server.codec.wire_request import AnyRequest
from paceline.server.errors import error_text, status_of
from paceline.server.telemetry.log import debugging

if TYPE_CHECKING:
    from paceline.server.telemetry.spans import RequestSpan, Spans

__all__ = ["RequestWatch"]

_access = logging.getLogger("paceline.access")

_MAX_CHARACTERS = 200
"""Of a text that a client sent."""
_GIVEN_UP = "the caller gave up"


class RequestWatch:
    """A request from when it is read until it has ended, which `on_success` or `on_failure` reports, once. `span` is
    set if the request is traced."""

    __slots__ = ("_began_ns", "_id", "_model", "_rows", "_version", "span")

    def __init__(self, request: AnyRequest, parent: TraceParent | None, spans: Spans | None, began_ns: int) -> None:
        self._began_ns = began_ns
        self._model = request.model_name[:_MAX_CHARACTERS]
        self._version = request.model_version[:_MAX_CHARACTERS]
        self._id = request.id[:_MAX_CHARACTERS]
        self._rows = 0
        self.span: RequestSpan | None = None
        if spans is not None:
            self.span = spans.begin(self._model, self._id, self._began_ns, parent)

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
            "duration_us": (time.monotonic_ns() - self._began_ns) // 1_000,
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
