"""Requests given to a server's calls and streams directly, without gRPC in front."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpc.aio import EOF  # type: ignore[attr-defined]

from paceline.protos import inference_pb2 as pb
from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.codec.wire_request import AnyMessage
from paceline.server.requests.in_flight import Call, InferenceSteps
from paceline.server.rpc.handlers import serialized

__all__ = ["Context", "called"]


class Context:
    """What a stream reads and writes."""

    def __init__(self, requests: Iterable[Any]) -> None:
        self._requests = iter(requests)
        self.written: list[pb.ModelStreamInferResponse] = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None

    async def read(self) -> Any:
        return next(self._requests, EOF)

    async def write(self, message: Any) -> None:
        self.written.append(pb.ModelStreamInferResponse.FromString(serialized(message)))


async def called(inference: InferenceSteps, request: AnyMessage, remaining_s: float | None = None) -> bytes:
    """The answer to a request sent as its own call."""
    return await Call(inference, request, remaining_s, None, NO_PASSED_HEADERS).response()
