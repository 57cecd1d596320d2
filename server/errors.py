"""Every failure a caller can meet, and the one table that turns it into a gRPC status.

ServerError
├── InvalidRequest   the request is at fault; nothing was queued
├── MessageTooLarge  a message of more elements or fields than allowed
├── ModelNotFound    no such model, or no such version of it
├── ModelNotReady    known, but not serving: loading, failed to load, or the server stops
│   └── ServerStopping   the server accepts nothing more; another one may
├── AnswerTooLarge   what was asked for exceeds a message
├── StateTooLarge    a step leaves more than the states of a sequence may take
├── RegionNotFound   no shared memory region of that name
├── RegionExists     a shared memory region of that name is registered already
├── TooManyRegions   as many shared memory regions as allowed
├── GpuLost          the GPU of a shared memory region is lost for this process
├── NotSupported     this build can't, or it is switched off
├── Aborted          a call has ended with a status and a text already, in the process with the models
├── ConfigError      a model's configuration asks for the impossible; fails its load
├── LoadHangs        an execution before a model is ready takes too long; fails its load
└── LoadFailed       a requested load failed, for whatever reason; what served before goes on serving
    └── TooManyModels    as many models as allowed
StepFailed           a step of an ensemble failed; an ExecutionError with the status of its cause
StartError           the server can't start; one line for the console
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import grpc

from paceline.backends.errors import (
    WITH_STATUS,
    BackendError,
    DeviceError,
    DeviceLost,
    DriverFailed,
    ExecutionError,
    InstanceError,
    InstanceLost,
    LoadError,
    ModelRefused,
    NoDriver,
    OutOfMemory,
    ProcessEndedBeforeBatch,
    ProcessError,
    StalePlan,
    StepHangs,
    Unequipped,
    UnfitOutputs,
    UpstreamFailed,
    UpstreamRefused,
)
from paceline.protos.datatypes import UnknownDatatypeError
from paceline.protos.tensors import TensorError
from paceline.scheduler.errors import (
    BacklogFull,
    BatcherClosed,
    DeadlineExceeded,
    DeadlineUnreachable,
    ExecutionFailed,
    ExecutionTimeout,
    NoInstance,
    NoSequence,
    NotStarted,
    QueueFull,
    QueueTimeout,
    RequestTooLarge,
    SchedulerError,
    SequenceError,
)
from paceline.scheduler.runner import ThreadLost
from paceline.server.limits import LARGEST_MESSAGE_BYTES

T = TypeVar("T")
R = TypeVar("R")


class ServerError(Exception):
    """Base of what this package raises towards callers; the message is for them."""


class InvalidRequest(ServerError):
    """Names, datatypes, shapes, byte counts or parameters don't fit; says which, what was expected and what was got."""


class MessageTooLarge(ServerError):
    """More elements or fields than a message may have, whatever its bytes."""


class ModelNotFound(ServerError):
    """No model or version of that name."""


class ModelNotReady(ServerError):
    """The model is known but can't be used now."""


class ServerStopping(ModelNotReady):
    """The server accepts nothing more. A caller that retries should reach another one, or this one's successor."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")


class AnswerTooLarge(ServerError):
    """The outputs are more than one message can carry, or may by a setting (`why`)."""

    def __init__(self, model: str, most_bytes: int = LARGEST_MESSAGE_BYTES, why: str = "") -> None:
        super().__init__(
            f"model '{model}': expected outputs that one message can carry, at most {most_bytes} bytes in all{why}, "
            "got more; request fewer rows or outputs, or use shared memory"
        )


STATE_STAYS = "the state of its sequence is as it was before, or the initial one if it was to start anew"
"""What a step leaves that fails."""


class StateTooLarge(ServerError):
    """A step that isn't the last leaves more bytes than the states of a sequence may take."""

    def __init__(self, model: str, most_bytes: int, size_bytes: int) -> None:
        super().__init__(
            f"model '{model}': expected a step to leave states of at most {most_bytes} bytes "
            f"(paceline.max_state_bytes), got {size_bytes}; {STATE_STAYS}: end the sequence, or begin it anew"
        )


class RegionNotFound(ServerError):
    """No shared memory region of that name and kind."""


class RegionExists(ServerError):
    """The name of a shared memory region is taken."""


class TooManyRegions(ServerError):
    """No more shared memory regions may be registered."""


class GpuLost(ServerError):
    """The GPU of a shared memory region is lost for this process; another one can use it."""


class NotSupported(ServerError):
    """Not in this build, or switched off; says what to switch on."""


class Aborted(ServerError):
    """Where the models are, a call has ended with this `status` and text: whatever it was, it was logged there."""

    def __init__(self, status: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.status = status


class ConfigError(ServerError):
    """The model's configuration can't be served as it is."""


class Ending(Protocol):
    """What tells when an execution has ended: its future, whatever the result is."""

    def add_done_callback(self, fn: Callable[[object], object], /) -> None: ...


class StepFailed(ExecutionError):
    """A step of an ensemble has failed; the text says which, and the caller gets the `status` that it would have got
    from the step's model."""

    def __init__(self, text: str, status: grpc.StatusCode | None) -> None:
        super().__init__(text)
        self.status = status


class LoadHangs(ServerError):
    """A trial or warm-up execution takes longer than executions may. `ended` is done when it has ended after all; until
    then, what it uses must not be closed."""

    def __init__(self, limit_ns: int, ended: Ending) -> None:
        super().__init__(
            f"a trial or warm-up execution took longer than its limit: {limit_ns / 1e9:g} s "
            "(--execution-timeout-secs or paceline.execution_timeout_ms, but at least a minute)"
        )
        self.ended = ended


class LoadFailed(ServerError):
    """A model could not be loaded; `__cause__` is the reason."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"load failed for model '{model}': {reason}")
        self.reason = reason


class TooFewDescriptors(ServerError):
    """The process may open so few files that a load would take what connections and probes need."""

    def __init__(self, allowed: int, left: int, kept: int) -> None:
        super().__init__(
            f"of the {allowed} files that the process may open (ulimit -Hn), {left} are left besides connections, and "
            f"{kept} are kept for these and for probes: raise the limit, or unload models"
        )


class TooManyModels(LoadFailed):
    """No more models may serve."""

    def __init__(self, model: str, limit: int) -> None:
        super().__init__(model, f"there are {limit} models already, as many as --max-models allows")


class StartError(Exception):
    """The server can't start; the message is the whole story, in one line."""


_CLASSES: Mapping[grpc.StatusCode, Sequence[type[BaseException]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (
        InvalidRequest, TensorError, UnknownDatatypeError, RequestTooLarge, ConfigError, LoadFailed,
        SequenceError, NoSequence, NotStarted,
    ),
    grpc.StatusCode.NOT_FOUND: (ModelNotFound, RegionNotFound),
    grpc.StatusCode.ALREADY_EXISTS: (RegionExists,),
    grpc.StatusCode.UNAVAILABLE: (
        ModelNotReady, ServerStopping, BatcherClosed, NoInstance, GpuLost,
        UpstreamFailed,  # only if the upstream's own status isn't known, see status_of
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        MessageTooLarge, AnswerTooLarge,  # as gRPC itself does for messages that are too large
        QueueFull, BacklogFull, TooManyRegions, TooManyModels, TooFewDescriptors, OutOfMemory, MemoryError,
        StateTooLarge,
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineExceeded, QueueTimeout, DeadlineUnreachable),
    grpc.StatusCode.CANCELLED: (asyncio.CancelledError,),
    grpc.StatusCode.UNIMPLEMENTED: (NotSupported,),
    grpc.StatusCode.INTERNAL: (
        ExecutionFailed, ExecutionError, UnfitOutputs, InstanceError, Unequipped, StalePlan, ThreadLost,
        Aborted, StepFailed,  # they have a status of their own, see status_of
        LoadError, LoadHangs, NoDriver, DriverFailed, DeviceError,
        UpstreamRefused, ModelRefused,  # only if their own status isn't known, see status_of
        # Not a status that clients retry elsewhere: what makes one server hang would make the next hang too, tensors
        # that break a device would break the next one, and what ends one process would end the next.
        ExecutionTimeout, InstanceLost, DeviceLost, StepHangs, ProcessError, ProcessEndedBeforeBatch,
        SchedulerError, BackendError, ServerError,  # the bases, for classes yet to come
    ),
}  # fmt: skip
STATUS_OF = {kind: status for status, kinds in _CLASSES.items() for kind in kinds}
"""The status of each class; the closest base of an error counts."""


def status_of(error: BaseException) -> grpc.StatusCode | None:
    """The status that the caller gets for `error`; None if it is none of ours, which is a bug. An error that another
    server answered a batch with, or a model a request, keeps its status."""
    cause = error.__cause__ if isinstance(error, ExecutionFailed) else error
    if isinstance(cause, WITH_STATUS) and cause.status in grpc.StatusCode.__members__:
        return grpc.StatusCode[cause.status]
    if isinstance(cause, (StepFailed, Aborted)):
        return cause.status
    if isinstance(cause, (OutOfMemory, MemoryError)) and error is not cause:
        return STATUS_OF[OutOfMemory]
    if isinstance(error.__cause__, TooFewDescriptors):
        return STATUS_OF[TooFewDescriptors]
    for kind in type(error).__mro__:
        if kind in STATUS_OF:
            return STATUS_OF[kind]
    return None


def as_value(error: Exception) -> Exception:
    """`error`, to be handed on rather than raised. Without tracebacks: their frames, and those that called them, would
    hold requests and their memory, and lead back to the error. One that isn't in the table, a bug, keeps its own, to be
    logged."""
    if status_of(error) is not None or isinstance(error, MemoryError):
        error.__context__ = None
        if error.__cause__ is not None:
            error.__cause__ = error.__cause__.with_traceback(None)
        return error.with_traceback(None)
    return error


def value_or_error(make: Callable[[T], R], of: T) -> R | Exception:
    """What `make` returns, or, as a value, what it raises: for whoever asked, while others get what they asked for."""
    try:
        return make(of)
    except Exception as error:  # noqa: BLE001 - handed on
        return as_value(error)


def error_text(error: BaseException) -> str:
    """What `error` says; its type if it can't be put into words."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - its __str__ is at fault, and the caller must get an answer
        return type(error).__name__
