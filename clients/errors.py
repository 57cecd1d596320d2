"""What calling a server can raise, and the one table from gRPC status to exception.

    Exception
    └── ClientError                 all this package raises but ValueError, TypeError, RuntimeError for local misuse
        ├── ClientClosed            used after close()
        ├── ResponseError           the server answered OK with something that contradicts the protocol
        └── InferenceError          the call ended with a status other than OK; also every status not named below
            ├── Cancelled           CANCELLED
            ├── InvalidArgument     INVALID_ARGUMENT: fault in the request, don't repeat it
            │   └── SequenceLost    INVALID_ARGUMENT that asks for the START flag: the server has no such sequence
            ├── DeadlineExceeded    DEADLINE_EXCEEDED: no answer in time, here or in the server's queue
            ├── NotFound            NOT_FOUND: no such model or version
            ├── ResourceExhausted   RESOURCE_EXHAUSTED: the server is full, back off
            ├── Unimplemented       UNIMPLEMENTED: this server lacks the feature
            ├── Internal            INTERNAL: the model failed
            ├── Unavailable         UNAVAILABLE: no connection, not ready, or draining
            ├── Unauthenticated     UNAUTHENTICATED
            └── PermissionDenied    PERMISSION_DENIED

Nothing here sends anything, and no other module of this package chooses an exception by its status.
`SequenceLost` alone is told by the server's text, which is the same in all servers with sequences.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

TrailingMetadata = tuple[tuple[str, str | bytes], ...]


class ClientError(Exception):
    """What this package raises on its own account; ValueError, TypeError and RuntimeError are kept for local misuse."""


class ClientClosed(ClientError):
    """The client was used after close()."""


class ResponseError(ClientError):
    """The server answered OK, and the answer can't be read: byte counts, datatypes or names don't fit together."""


class InferenceError(ClientError):
    """The call ended with a status other than OK.

    `status` is the gRPC status, `message` the server's (or gRPC's own) text, `trailing_metadata` the pairs the
    server sent with the status, values of keys ending in `-bin` as bytes.
    """

    def __init__(self, status: grpc.StatusCode, message: str, trailing_metadata: TrailingMetadata = ()) -> None:
        super().__init__(status, message, trailing_metadata)
        self.status = status
        self.message = message
        self.trailing_metadata = trailing_metadata

    def __str__(self) -> str:
        return f"{self.status.name}: {self.message}"


class Cancelled(InferenceError):
    """CANCELLED: the server gave the call up, or the client was closed during it."""


class InvalidArgument(InferenceError):
    """INVALID_ARGUMENT: the request itself is at fault; the same request fails again."""


class SequenceLost(InvalidArgument):
    """The server has no sequence of that id: it was never started, has ended, or was ended, as by its idle limit, by a
    waiting step that was given up, or by a reload of the model. The message says why, if the server does."""


class DeadlineExceeded(InferenceError):
    """DEADLINE_EXCEEDED: no answer within the time allowed. The server may or may not have run the request."""


class NotFound(InferenceError):
    """NOT_FOUND: the server doesn't know the model or the version."""


class ResourceExhausted(InferenceError):
    """RESOURCE_EXHAUSTED: the server's queue or memory budget is full; repeating at once makes it worse."""


class Unimplemented(InferenceError):
    """UNIMPLEMENTED: the server lacks the call or has it switched off."""


class Internal(InferenceError):
    """INTERNAL: the model failed on this request, or the server is broken."""


class Unavailable(InferenceError):
    """UNAVAILABLE: no connection, or the server or model is not ready, or it is draining."""


class Unauthenticated(InferenceError):
    """UNAUTHENTICATED: credentials missing or not accepted."""


class PermissionDenied(InferenceError):
    """PERMISSION_DENIED: the caller is known, and isn't allowed to make this call."""


_LOST = "must specify the START flag"
NO_SEQUENCE = "must specify a non-zero or non-empty correlation ID"
"""In what servers say of a request outside of a sequence to a model that keeps states."""

_BY_STATUS: dict[grpc.StatusCode, type[InferenceError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.INTERNAL: Internal,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}


def inference_error(status: grpc.StatusCode, message: str, trailing_metadata: TrailingMetadata = ()) -> InferenceError:
    """The exception for a status, by the table above; `InferenceError` itself for a status without a class."""
    kind = _BY_STATUS.get(status, InferenceError)
    if kind is InvalidArgument and _LOST in message:
        kind = SequenceLost
    return kind(status, message, trailing_metadata)


def rpc_failure(error: grpc.RpcError) -> InferenceError:
    """The exception for what grpc or grpc.aio raised. Raise it `from` the original."""
    pairs: Any = error.trailing_metadata() or ()
    return inference_error(error.code(), error.details() or "", tuple((key, value) for key, value in pairs))


def unreadable() -> Internal:
    """The error that grpc raises for an answer that isn't a message; grpc.aio returns None for it."""
    return Internal(grpc.StatusCode.INTERNAL, "Exception deserializing response!")


def closed() -> Cancelled:
    """The error of those who wait while the client is closed."""
    return Cancelled(grpc.StatusCode.CANCELLED, "the client was closed during the call")


def no_answer(timeout_s: float) -> DeadlineExceeded:
    """The error of those whose timeout has passed."""
    return DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout_s:g} s")


def own(error: InferenceError) -> InferenceError:
    """A copy of the error for one of several callers: the traceback of a shared one grows."""
    copied = inference_error(error.status, error.message, error.trailing_metadata)
    copied.__cause__ = error
    return copied


def fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    """Give the error to who waits for the answer, if there is none yet."""
    if not answer.done():
        answer.set_exception(error)
