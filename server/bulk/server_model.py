"""The model of a running server that computes a job's rows, over streams.

Lives here: what it is asked with, and what its errors mean for the rows. Must not: repeat what failed for a time, or
choose rows. The rule: a row is at fault only if the server says so of the request; what may be the connection's fault,
or somebody else's, isn't.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import numpy as np

from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array
from paceline.clients.aio import InferenceClient
from paceline.clients.description import Batching, ModelDescription
from paceline.clients.errors import (
    ClientError,
    DeadlineExceeded,
    InferenceError,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from paceline.clients.messages import InferResult
from paceline.clients.options import ConnectionOptions
from paceline.server.bulk.execution import NOT_THE_ROWS
from paceline.server.bulk.models import asked_of, generates
from paceline.server.bulk.values import BulkError, Parameters

__all__ = ["ServerModel", "server_model"]

_FIRST_S = 3.0
_START_S = 60.0
"""How long a server may take to be ready when the job begins."""
_CALL_S = 600.0
"""How long a call may take. Without an end, a server whose machine is gone would never be asked again."""
_MOST_CALLS = 64
"""Of one row each: enough to fill a server's batches."""
_TOO_LARGE = ("larger than max", "one message can carry", "--max-request-elements")
"""What gRPC and servers say of a request that is too large by itself, rather than one too many."""
_LOST = "RST_STREAM"
"""In what gRPC says of a call whose connection has broken, if it doesn't say that it is unavailable."""


class ServerModel:
    """`Computes` for a model that is described as `description`, which `streams` and `calls` ask: clients for streams,
    and for calls by themselves. `say` is told why a call wasn't answered, and "" once one is. The server fills rows up
    to common sizes, so rows of a call have equal shapes."""

    batch_sizes: Sequence[int] = ()
    max_elements = 0
    lengths: Lengths | None = None

    def __init__(
        self,
        description: ModelDescription,
        streams: InferenceClient,
        calls: InferenceClient,
        parameters: Parameters,
        say: Callable[[str], None] = lambda why: None,
    ) -> None:
        if why := _why_not(description):
            raise BulkError(f"model '{description.name}' can't compute rows: {why}")
        # On a stream, a generation is answered token by token.
        self._streams = calls if generates(description) else streams
        self._calls, self._parameters, self._say = calls, parameters, say
        self.description = asked_of(description, parameters)
        self.max_rows = description.batching.max_rows if description.batching is not None else 0
        self.at_once = _at_once(description)
        self._datatypes = {one.name: one.datatype for one in description.inputs}
        self._bits = {one.name for one in description.outputs if one.datatype == "BF16"}

    async def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        try:
            answer = await self._infer(inputs, outputs)
        except InferenceError as error:
            if error.status in NOT_THE_ROWS and error.status is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._say(_shortened(error.message))
            raise
        self._say("")
        return answer

    async def _infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        try:
            return await self._asked(self._streams, inputs, outputs)
        except InferenceError as error:
            if not (error.status is grpc.StatusCode.UNKNOWN or _LOST in error.message):
                raise
        # Streams of other servers don't tell an error's status, which says whether the rows are at fault.
        try:
            return await self._asked(self._calls, inputs, outputs)
        except Internal as error:
            if _LOST not in error.message:
                raise
            raise Unavailable(grpc.StatusCode.UNAVAILABLE, error.message) from error

    async def _asked(
        self, client: InferenceClient, inputs: Mapping[str, Array], outputs: Sequence[str]
    ) -> Mapping[str, Array]:
        try:
            result = await client.infer(
                self.description.name,
                inputs,
                outputs=outputs,
                parameters=self._parameters,
                datatypes={name: self._datatypes[name] for name in inputs},
            )
        except ResourceExhausted as error:
            if any(text in error.message for text in _TOO_LARGE):
                raise Internal(grpc.StatusCode.INTERNAL, error.message) from error
            raise
        except InferenceError:
            raise
        except ClientError as error:
            raise BulkError(str(error)) from error
        except (ValueError, TypeError) as error:  # also for tensors that no message can carry
            raise InvalidArgument(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        rows = len(next(iter(inputs.values()))) if self.max_rows and inputs else None
        return {name: self._checked(name, result, rows) for name in outputs or result.outputs}

    def _checked(self, name: str, result: InferResult, rows: int | None) -> Array:
        array = result.outputs.get(name)
        if array is None or (rows is not None and array.shape[:1] != (rows,)):
            got = "none" if array is None else f"shape {list(array.shape)}"
            expected = "an array" if rows is None else f"{rows} rows"
            raise Internal(grpc.StatusCode.INTERNAL, f"output '{name}': expected {expected} from the server, got {got}")
        if name in self._bits:  # of which the client makes numbers, and all other models give the bits
            return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return array


@asynccontextmanager
async def server_model(
    target: str,
    name: str,
    *,
    access: ConnectionOptions,
    parameters: Parameters,
    batch_rows: int = 0,
    say: Callable[[str], None] = lambda why: None,
    start_s: float = _START_S,
) -> AsyncIterator[ServerModel]:
    """The model `name` of the server at `target`. `say` is told why it is waited for, and "" when it is there.
    `batch_rows`: of a call, if that is given; servers that don't tell how a model is batched get calls of one row
    otherwise. Raises BulkError."""
    tls, token = access.tls or False, access.token
    async with (
        InferenceClient(target, transport="stream", timeout_s=_CALL_S, tls=tls, token=token) as streams,
        InferenceClient(target, timeout_s=_CALL_S, tls=tls, token=token) as calls,
    ):

        def tell(why: str) -> None:
            say(f"server {target}: {why}; trying again" if why else "")

        try:
            tell(await _not_ready(calls))
            try:
                await calls.wait_ready(start_s)
            except DeadlineExceeded as error:
                # While a client waits for a connection, it isn't told why there is none.
                if why := await _not_ready(calls):
                    raise BulkError(f"--server {target}: not ready within {start_s:g} s: {why}") from error
            tell("")
            description = await calls.describe(name)
        except ClientError as error:
            raise BulkError(f"--server {target}: {error}") from error
        if not description.is_configured and _has_rows(description):
            batching = Batching(max(1, batch_rows), True, (), 0, 0, 0, ())
            description = replace(description, batching=batching)
        yield ServerModel(description, streams, calls, parameters, tell)


async def _not_ready(client: InferenceClient) -> str:
    """Why the server isn't ready; "" if it is."""
    try:
        return "" if await client.server_ready(timeout_s=_FIRST_S) else "not ready"
    except (Unavailable, DeadlineExceeded) as error:
        return _shortened(error.message)


def _shortened(message: str) -> str:
    """Without how often gRPC has tried which address."""
    return message.rpartition(": ")[2] if "last error: " in message else message


def _has_rows(description: ModelDescription) -> bool:
    """Whether all tensors may have any number of rows."""
    return all(one.shape[:1] == (-1,) for one in (*description.inputs, *description.outputs))


def _why_not(description: ModelDescription) -> str:
    if not (description.inputs and description.outputs):
        return "the server doesn't say what its inputs and outputs are"
    if description.sequences is not None:
        return "it remembers earlier requests of a sequence, so a row's answer isn't its own"
    if description.is_decoupled:
        return "it may answer a request more than once (model_transaction_policy.decoupled)"
    return ""


def _at_once(description: ModelDescription) -> int:
    """Two full calls for each instance, so that one waits while another executes; more where calls may have few rows,
    as they have no batch axis, or rows of the same shape are few."""
    instances = sum(one.count * max(1, len(one.gpus)) for one in description.instances) or 1
    batching = description.batching
    if batching is None:
        return _MOST_CALLS
    small = min(batching.max_rows, _MOST_CALLS) if batching.lengths else 1
    return 2 * instances * small
