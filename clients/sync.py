"""The blocking client. Thread-safe: one client serves many threads over one connection.

Lives here: calling with grpc, waiting, closing. What the methods take, send and read is in methods.py, for this client
and its asyncio twin in aio.py.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any, ClassVar, Self

import grpc

from paceline.clients import methods
from paceline.clients.answers import Answers
from paceline.clients.base import BaseClient, Timeout, blocking, blocking_each
from paceline.clients.connection import Metadata
from paceline.clients.errors import rpc_failure
from paceline.clients.messages import InferResult, infer_result
from paceline.clients.sequences import InferenceSequence
from paceline.protos.inference_pb2 import ModelInferRequest, ModelInferResponse


class InferenceClient(BaseClient[InferenceSequence]):
    """Calls a server of the Open Inference Protocol (KServe v2) over gRPC and waits for the answer.

    The constructor's arguments are those of `BaseClient`. Every method raises `clients.errors.InferenceError` or a
    subclass when the call ends with a status other than OK, ResponseError when the answer contradicts the protocol, and
    ClientClosed after close(). On every method, `timeout_s` is in seconds: None means no timeout, left out it is the
    client's own, and 0 or less ends the call with DeadlineExceeded at once. `metadata` is sent in addition to the
    client's own.
    """

    _transport: ClassVar[ModuleType] = grpc
    _new_sequence = InferenceSequence

    infer = blocking(methods.infer)
    stream_infer = blocking_each(methods.stream_infer)
    generate = blocking_each(methods.generate)
    sequence = methods.sequence
    server_live = blocking(methods.server_live)
    server_ready = blocking(methods.server_ready)
    model_ready = blocking(methods.model_ready)
    server_metadata = blocking(methods.server_metadata)
    model_metadata = blocking(methods.model_metadata)
    model_config = blocking(methods.model_config)
    describe = blocking(methods.describe)
    models = blocking(methods.models)
    repository_index = blocking(methods.repository_index)
    health = blocking(methods.health)
    wait_ready = blocking(methods.wait_ready)

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; calls still in flight raise Cancelled. Closing twice does nothing."""
        channel = self._detach()
        if channel is not None:
            channel.close()

    async def _call(
        self, method: str, request: object, timeout_s: Timeout, metadata: Metadata, wait_for_ready: bool | None = None
    ) -> Any:
        try:
            return self._start(method, request, timeout_s, metadata, wait_for_ready)
        except grpc.RpcError as error:
            raise rpc_failure(error) from error

    async def _infer(
        self, request: ModelInferRequest, timeout_s: Timeout, metadata: Metadata, turn: Any
    ) -> InferResult:
        return infer_result(await self._call("ModelInfer", request, timeout_s, metadata))

    async def _answers(
        self, request: ModelInferRequest, timeout_s: Timeout, metadata: Metadata
    ) -> AsyncGenerator[ModelInferResponse, None]:
        answers, stream = Answers(), await self._call("ModelStreamInfer", iter((request,)), timeout_s, metadata)
        try:
            for message in stream:
                if (answer := answers.read(message)) is not None:
                    yield answer
            answers.end()
        except grpc.RpcError as error:
            raise rpc_failure(error) from error
        finally:
            stream.cancel()

    async def _sleep(self, pause_s: float) -> None:
        time.sleep(pause_s)
