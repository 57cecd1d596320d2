"""Calls whose message there is no room for: gRPC raises MemoryError while it reads, and would answer for itself."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from paceline.server.rpc.calls import HeaderRules
from paceline.server.rpc.gate import Admission, Gate
from paceline.server.rpc.streaming import Streaming

SHORT = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the server is short of memory: no room for what this request needs")


class Ended(Exception):
    """What gRPC raises when a handler ends its call."""


class Context:
    """A call whose message gRPC finds no room for."""

    def __init__(self) -> None:
        self.status: list[object] = []

    async def read(self) -> bytes:
        raise MemoryError

    async def write(self, message: bytes) -> None:
        raise AssertionError("there is no answer")

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.status += [code, text]
        raise Ended

    def set_code(self, code: grpc.StatusCode) -> None:
        self.status.append(code)

    def set_details(self, text: str) -> None:
        self.status.append(text)

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> None:
        return None


class Serving:
    """Steps that no request reaches."""

    reads_parents = False

    def check_serving(self) -> None:
        pass

    announce = finish = give_up = check_serving


async def test_stream_without_room_says_so(caplog: pytest.LogCaptureFixture) -> None:
    context = Context()
    await Streaming(Serving(), 4, HeaderRules()).ModelStreamInfer(None, context)
    assert tuple(context.status) == SHORT
    assert [record.getMessage() for record in caplog.records] == [f"ModelStreamInfer failed: {SHORT[1]}"]


class Details:
    method = "/inference.GRPCInferenceService/ModelInfer"
    invocation_metadata = ()


async def test_call_without_room_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def never(request: object, context: object) -> None:
        raise AssertionError("there is no request")

    gate = Gate(Admission(4, 4))
    handler = grpc.unary_unary_rpc_method_handler(never)
    gate.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": handler})]
    )
    context = Context()
    with pytest.raises(Ended):
        await asyncio.create_task(call(gate, context))
    assert tuple(context.status) == SHORT
    assert [record.getMessage() for record in caplog.records] == [f"reading a request failed: {SHORT[1]}"]


async def call(gate: Gate, context: Context) -> Any:
    picked: Any = gate.service(Details())  # type: ignore[arg-type]
    return await picked.stream_unary(None, context)
