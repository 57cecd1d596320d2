"""Streams as a client of the bare protocol uses them.

Lives here: opening one, sending, and reading answers in a form short enough for assertions. Must not: assertions about
behaviour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from paceline.protos import inference_pb2 as pb
from tests.integration.scripted import mark_of
from tests.integration.serving import Served

__all__ = ["Stream", "outcome_of"]

Request = pb.ModelInferRequest | bytes


def outcome_of(message: pb.ModelStreamInferResponse) -> float | tuple[str, str]:
    """The mark of an answer, or the status and text of an error."""
    response = message.infer_response
    assert response.parameters["triton_final_response"].bool_param
    if message.error_message:
        assert not response.outputs
        return response.parameters["paceline_status"].string_param, message.error_message
    assert "paceline_status" not in response.parameters
    return mark_of(response)


class Stream:
    """One call of ModelStreamInfer. Requests may be bytes that aren't a message."""

    def __init__(
        self, served: Served, *, timeout_s: float | None = 20, metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> None:
        make: Any = served.channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            lambda request: request if isinstance(request, bytes) else request.SerializeToString(),
            pb.ModelStreamInferResponse.FromString,
        )
        self.call = make(timeout=timeout_s, metadata=metadata)

    async def send(self, *requests: Request) -> None:
        for one in requests:
            await self.call.write(one)

    async def end(self) -> None:
        """Send no more requests."""
        await self.call.done_writing()

    async def message(self) -> pb.ModelStreamInferResponse:
        """The next answer; fails if the stream ends instead."""
        message = await asyncio.wait_for(self.call.read(), 20)
        assert isinstance(message, pb.ModelStreamInferResponse), f"the stream ended: {self.call}"
        return message

    async def next(self) -> float | tuple[str, str]:
        """The mark or error of the next answer."""
        return outcome_of(await self.message())

    async def many(self, count: int) -> list[float | tuple[str, str]]:
        return [await self.next() for _ in range(count)]

    async def rest(self) -> list[float | tuple[str, str]]:
        """The marks or errors of all answers until the stream ends, however it does."""
        answers = []
        try:
            while isinstance(message := await asyncio.wait_for(self.call.read(), 20), pb.ModelStreamInferResponse):
                answers.append(outcome_of(message))
        except grpc.aio.AioRpcError:
            pass  # `status` returns it
        return answers

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the stream has ended."""
        return await self.call.code(), await self.call.details() or ""
