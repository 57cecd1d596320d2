"""What fronts and the engine say to each other, how errors and calls travel, and what fronts know about the models that
the engine serves.

Lives here: kinds of messages with their fields, in order; what stands in for gRPC's context where a front's RPC is
handled; the handles that the engine gives to models, the snapshot that is sent, and a front's look-up. Must not: act on
messages, know any RPC, or decide what a name means or why it means nothing, which the repository does. `id` is the
front's number for what it waits for. Deadlines are on the monotonic clock, which is the same for all processes of a
machine. A front's look-up may be out of date: handles are never used twice, and the engine answers STALE to a request
for one that is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NoReturn

import grpc

from paceline.backends.errors import WITH_STATUS, UpstreamFailed
from paceline.backends.spec import ModelSpec
from paceline.backends.transport.link import FIRST_KIND
from paceline.scheduler.errors import ExecutionFailed
from paceline.server.codec.adapting_codec import codec_for
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.remote import OpenCodec
from paceline.server.errors import STATUS_OF, InternalError, StepFailed, error_text, status_of

if TYPE_CHECKING:  # fronts do without it
    from paceline.server.models.served_model import ServedModel


class Kind:
    """The kinds of messages, each with its fields; plain numbers, as `marshal` takes no others."""

    # From the front.
    LISTENS = FIRST_KIND  # port, or 0 and why not
    SUBMIT = FIRST_KIND + 1  # id, as FrontSession._submit takes it
    INFER = FIRST_KIND + 2  # id, as FrontSession._infer takes it
    CALL = FIRST_KIND + 3  # id, name of the RPC, deadline or None, headers, bytes of the request
    CANCEL = FIRST_KIND + 4  # id
    REFUSED = FIRST_KIND + 5  # model's handle; there was no room to submit it
    TAKEN = FIRST_KIND + 6  # id, bytes of the oldest answer in NEXT that hasn't left, and has now
    USAGE = FIRST_KIND + 7  # calls and streams in progress, those refused by reason, how many connections may be

    # From the engine.
    HELLO = FIRST_KIND + 8  # pickled Greeting
    CATALOGUE = FIRST_KIND + 9  # pickled Catalogue
    STATE = FIRST_KIND + 10  # whether it serves, is ready, stops, is live
    LOG = FIRST_KIND + 11  # pickled LogSettings
    LEAVE = FIRST_KIND + 12  # nothing: accept no more connections, and tell existing ones to go
    END = FIRST_KIND + 13  # seconds of grace
    # Replies, with all that follows.
    RESULT = FIRST_KIND + 14  # id, parcel of outputs, facts; to SUBMIT
    STALE = FIRST_KIND + 15  # id; to SUBMIT, for a model that is gone
    FAILED = FIRST_KIND + 16  # id, and the `packed_error`; to SUBMIT and INFER
    ANSWER = FIRST_KIND + 17  # id, bytes of the response, empty if the last was in NEXT; to INFER and CALL
    PACKED = FIRST_KIND + 18  # id, parcel of the same; to INFER, where that is large
    ABORTED = FIRST_KIND + 19  # id, name of the status, text; to CALL
    # What isn't the end of a request, with all that follows.
    OPENED = FIRST_KIND + 20  # id; to INFER: it may be answered more than once
    NEXT = FIRST_KIND + 21  # id, bytes of a response that isn't the last; to INFER
    NEXT_FAILED = FIRST_KIND + 22  # id, and the `packed_error` in place of one; to INFER


MAX_WHOLE_BYTES = 2**13
"""Of requests and responses that go through the socket unchanged, where there is another way: the engine decodes and
encodes so little, together with similar ones, as fast as it takes over what a front has made of it."""
WHAT_IS_FULL = "bytes of tensors in transit between processes (--frontend-memory-mb)"

_log = logging.getLogger("paceline.server.fronts")
_BY_NAME = {kind.__name__: kind for kind in STATUS_OF}


def packed_error(error: BaseException) -> tuple[str, str, str]:
    """What to send of an error: the name of its class, or of its base that is in the table of statuses; its text; and
    the status that follows from its cause, or ""."""
    # Of another server's error, or of an execution that failed for a reason of its own, such as memory.
    cause = error.__cause__ if isinstance(error, ExecutionFailed) else error
    code = status_of(error) if isinstance(error, ExecutionFailed) else None
    status = "" if code in (None, STATUS_OF[ExecutionFailed]) else code.name
    if isinstance(cause, WITH_STATUS):
        status = cause.status
    if isinstance(cause, StepFailed):
        error = cause  # which names the model
    for kind in type(error).__mro__:
        if kind in STATUS_OF:
            return kind.__name__, error_text(error), status
    _log.error("a request failed with an internal error, a bug in paceline; please report it", exc_info=error)
    return InternalError.__name__, f"internal error: {type(error).__name__}: {error_text(error)}", ""


def unpacked_error(name: str, text: str, status: str) -> BaseException:
    """The error again, with its status and text; what else it had is lost."""
    kind = _BY_NAME[name]
    if issubclass(kind, WITH_STATUS):
        return kind(status, text)
    if kind is StepFailed:
        return StepFailed(text, grpc.StatusCode[status or "INTERNAL"])
    error = kind.__new__(kind, text)
    if status:
        error.__cause__ = UpstreamFailed(status, text)
    return error


class Aborted(Exception):
    """A handler ended its call with a status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class CallContext:
    """What unary handlers use of their context: headers, the time that is left, and `abort`."""

    def __init__(self, headers: tuple[tuple[str, str | bytes], ...], deadline_ns: int | None) -> None:
        self._headers = headers
        self._deadline_ns = deadline_ns

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._headers

    def time_remaining(self) -> float | None:
        if self._deadline_ns is None:
            return None
        return max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise Aborted(code, details)


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version of a model, with what its codec needs to know; if it is `remote`, another server executes it."""

    handle: int
    name: str
    version: str
    spec: ModelSpec
    max_request_rows: int
    batch_id_prefix: str
    remote: bool = False


Catalogue = Mapping[tuple[str, str], VersionInfo]
"""All that is served, by each name and version that a request may have."""


class Handles:
    """The engine's side: models by handle."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._handles: dict[ServedModel, int] = {}
        self.models: dict[int, ServedModel] = {}
        """Those that still serve."""

    def update(self, served: Mapping[tuple[str, str], ServedModel]) -> Catalogue:
        """Give handles to new models, forget those that are gone, and make the snapshot."""
        # Fronts know nothing about models that don't declare their tensors, about those with sequences, whose steps
        # mustn't overtake each other, and about those whose answers are kept, as all of a request says whether two are
        # equal: they pass requests for them on unchanged.
        shown = {
            name: model
            for name, model in served.items()
            if not isinstance(model.codec, OpenCodec)
            and model.spec.sequence is None
            and model.open_requests is None
            and model.responses is None
        }
        models = dict.fromkeys(shown.values())
        self._handles = {model: self._handles.get(model) or next(self._numbers) for model in models}
        self.models = {handle: model for model, handle in self._handles.items()}
        infos = {
            one: VersionInfo(
                handle, one.name, one.version, one.spec, one.max_request_rows, one.batch_id_prefix, one.remote
            )
            for one, handle in self._handles.items()
        }
        return {name: infos[model] for name, model in shown.items()}


@dataclass(slots=True)
class Model:
    """What a front needs to accept a request for a model. `answers_large` once an answer was: from then on the front
    makes them itself."""

    info: VersionInfo
    codec: ModelCodec
    answers_large: bool = False


class LookUp:
    """The front's side: `models` by name and version, according to the latest catalogue."""

    def __init__(self) -> None:
        self.models: dict[tuple[str, str], Model] = {}

    def update(self, catalogue: Catalogue) -> None:
        known = {model.info.handle: model for model in self.models.values()}
        self.models = {}
        for name, info in catalogue.items():
            if info.handle not in known:
                known[info.handle] = Model(info, codec_for(info.name, info.version, info.spec, info.max_request_rows))
            self.models[name] = known[info.handle]
