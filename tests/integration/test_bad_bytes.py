"""Bytes that aren't a message, and calls of unknown methods: they get a clean status, and the server keeps serving."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceServicer
from paceline.server.config import Settings
from tests.integration.http2 import call_by_hand
from tests.integration.serving import Served, echo_model, failure_of, serving
from tests.wire import infer, rows_of_floats

Code = grpc.StatusCode

GOOD = infer("m", {"a": rows_of_floats(1)})
SERVED = {"ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStatistics"}
SERVED |= {"RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"}
SERVED |= {f"{kind}SharedMemory{what}" for kind in ("System", "Cuda") for what in ("Status", "Register", "Unregister")}
SERVED |= {"ModelConfig", "LogSettings", "TraceSetting"}
HEALTH = ("grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch")
REFLECTION = tuple(f"grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha"))
WITHOUT = "expected one request message, got none"
STREAMED = {"ModelStreamInfer"}
ALL = {name for name in vars(GRPCInferenceServiceServicer) if not name.startswith("_")}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path, {"m": echo_model()}) as served:
        yield served
        assert list((await served.infer(GOOD)).outputs[0].shape) == [1, 2]
        assert await served.metric("nv_inference_pending_request_count") == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"\x0a\xff\xff\xff\xff\x0f",  # a name of 4 GiB
        b"\x0a\x02\xff\xfe",  # a name that isn't UTF-8
        b"\x0b" * 10_000,  # groups within groups
        GOOD.SerializeToString()[:-1],
        GOOD.SerializeToString()[:7],
    ],
    ids=["stray byte", "huge length", "no text", "nested groups", "last byte missing", "cut in the middle"],
)
async def test_infer_of_bytes_that_are_not_a_message_is_refused(served: Served, data: bytes) -> None:
    code, text = await failure_of(served.raw_call("ModelInfer", data))
    assert code is Code.INVALID_ARGUMENT
    # Newer versions of protobuf add to the text.
    assert text.startswith("Error parsing message with type 'inference.ModelInferRequest'")


@pytest.mark.parametrize("method", sorted(SERVED))
async def test_call_of_any_method_with_bytes_that_are_not_a_message_is_refused(served: Served, method: str) -> None:
    code, text = await failure_of(served.raw_call(method, b"\xff"))
    assert code is Code.INVALID_ARGUMENT
    assert text.startswith(f"Error parsing message with type 'inference.{method}Request'")


@pytest.mark.parametrize("path", [*HEALTH, *REFLECTION])
async def test_health_or_reflection_call_with_bytes_that_are_not_a_message_is_refused(
    served: Served, path: str
) -> None:
    call: Any = served.channel.stream_stream(f"/{path}")(timeout=20)
    await call.write(b"\xff")
    code, text = await failure_of(call.read())
    assert code is Code.INVALID_ARGUMENT
    assert text.startswith("Error parsing message with type 'grpc.")


@pytest.mark.parametrize("frontends", [1, 2])
async def test_call_that_ends_without_a_message_is_refused_and_no_longer_in_progress(
    tmp_path: Path, frontends: int
) -> None:
    def used(metrics: dict[str, float]) -> list[float]:
        return [metrics[f'paceline_limit_used{{limit="{limit}"}}'] for limit in ("rpcs", "streams")]

    settings = Settings(paths=(tmp_path,), frontends=frontends)
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        for path in [*(f"inference.GRPCInferenceService/{one}" for one in sorted(SERVED)), *HEALTH]:
            call: Any = served.channel.stream_stream(f"/{path}")(timeout=20)
            await call.done_writing()
            assert await failure_of(call.read()) == (Code.UNIMPLEMENTED, WITHOUT), path
        until_s = time.monotonic() + 20
        while used(await served.metrics()) != [0, 0]:
            assert time.monotonic() < until_s
        assert list((await served.infer(GOOD)).outputs[0].shape) == [1, 2]


async def test_infer_ignores_unknown_fields(served: Served) -> None:
    unknown = b"\xfa\x7f\x03abc"  # field 2047
    answer = pb.ModelInferResponse.FromString(
        await served.raw_call("ModelInfer", unknown + GOOD.SerializeToString() + unknown)
    )
    assert answer.raw_output_contents[0] == rows_of_floats(1).tobytes()


async def test_infer_of_an_empty_message_is_a_request_for_an_unknown_model(served: Served) -> None:
    code, text = await failure_of(served.raw_call("ModelInfer", b""))
    assert (code, text) == (Code.NOT_FOUND, "Request for unknown model: '' is not found; this server has ['m']")


async def test_infer_of_damaged_messages_always_ends_with_an_answer_or_a_refusal(served: Served) -> None:
    dice = random.Random(7)
    clean = GOOD.SerializeToString()
    seen = set()
    for _ in range(300):
        damaged = bytearray(clean)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            await served.raw_call("ModelInfer", bytes(damaged))
            seen.add(Code.OK)
        except grpc.aio.AioRpcError as error:
            seen.add(error.code())
    assert seen == {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND}


@pytest.mark.parametrize(
    "path", ["/inference.GRPCInferenceService/Nope", "/other.Service/ModelInfer", "/grpc.health.v1.Health/Nope"]
)
async def test_call_of_an_unknown_method_is_unimplemented(served: Served, path: str) -> None:
    call: Any = served.channel.unary_unary(path)
    code, _ = await failure_of(call(b"", timeout=20))
    assert code is Code.UNIMPLEMENTED


def test_rpcs_listed_here_are_all_of_the_protocol() -> None:
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    assert methods == ALL == SERVED | STREAMED


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 4096,
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client's hello
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x00\x08\x01\x25\x00\x00",
    ],
    ids=["nothing", "zeros", "HTTP/1", "TLS", "bad frame", "cut headers"],
)
async def test_connection_that_does_not_speak_grpc_harms_nobody(served: Served, data: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", served.server.grpc_port)
    writer.write(data)
    await writer.drain()
    assert list((await served.infer(GOOD)).outputs[0].shape) == [1, 2]
    writer.close()


async def test_silent_connection_does_not_delay_the_stop(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.server.grpc_port)
        began = time.monotonic()
        assert await served.server.stop(100)
        assert time.monotonic() - began < 50
        writer.close()


@pytest.mark.parametrize(("timeout", "answered"), [("99999999H", True), ("99S", True), ("0n", False), ("1x", False)])
async def test_infer_with_any_timeout_header_is_answered_or_refused(
    served: Served, timeout: str, answered: bool
) -> None:
    """Written by hand, since clients send only valid headers."""
    received = await call_by_hand(served.server.grpc_port, GOOD.SerializeToString(), {"grpc-timeout": timeout})
    assert (GOOD.raw_input_contents[0] in received) is answered
