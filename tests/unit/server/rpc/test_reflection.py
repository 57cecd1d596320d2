"""The reflection service itself: what its pool knows, and how its streams end. Clients of it are tested elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2

from paceline.server.rpc.standard_services import INFERENCE_SERVICE, SERVICES, Reflection

Request = reflection_pb2.ServerReflectionRequest
Response = reflection_pb2.ServerReflectionResponse
NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


@dataclass
class Bench:
    reflection: Reflection
    channel: grpc.aio.Channel

    def stream(self, name: str) -> Any:
        call: Any = self.channel.stream_stream(
            f"/{name}/ServerReflectionInfo",
            request_serializer=Request.SerializeToString,
            response_deserializer=Response.FromString,
        )
        return call(timeout=10)

    async def ask(self, name: str, **request: str) -> Any:
        stream = self.stream(name)
        await stream.write(Request(**request))
        await stream.done_writing()
        return await stream.read()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    server = grpc.aio.server()
    reflection = Reflection()
    reflection.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Bench(reflection, channel)
    reflection.close()
    await server.stop(None)


@pytest.fixture(params=NAMES, ids=["v1", "v1alpha"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_services_are_listed_under_both_names(bench: Bench, name: str) -> None:
    response = await bench.ask(name, list_services="")
    assert {one.name for one in response.list_services_response.service} == set(SERVICES)
    assert set(NAMES) < set(SERVICES)


@pytest.mark.parametrize("service", SERVICES)
async def test_services_can_all_be_built_in_an_empty_pool_from_the_answers(
    bench: Bench, name: str, service: str
) -> None:
    pool = descriptor_pool.DescriptorPool()
    wanted = [{"file_containing_symbol": service}]
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    while wanted:
        response = await bench.ask(name, **wanted.pop())
        for data in response.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name not in files:
                files[file.name] = file
                wanted += [{"file_by_filename": dependency} for dependency in file.dependency]

    def add(file: descriptor_pb2.FileDescriptorProto) -> None:
        for dependency in file.dependency:
            add(files[dependency])
        pool.Add(file)

    for file in files.values():
        add(file)
    assert pool.FindServiceByName(service).methods


async def test_unknown_symbol_is_reported_and_the_stream_stays_open(bench: Bench, name: str) -> None:
    stream = bench.stream(name)
    await stream.write(Request(file_containing_symbol="no.such.Thing"))
    assert (await stream.read()).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    await stream.write(Request(file_containing_symbol=INFERENCE_SERVICE))
    assert (await stream.read()).WhichOneof("message_response") == "file_descriptor_response"


async def test_stream_ends_when_the_client_is_done_writing(bench: Bench, name: str) -> None:
    stream = bench.stream(name)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_close_ends_streams_that_wait_for_a_request(bench: Bench, name: str) -> None:
    stream = bench.stream(name)
    await stream.write(Request(list_services=""))
    await stream.read()
    bench.reflection.close()
    assert await stream.read() is grpc.aio.EOF


async def test_close_ends_later_streams_at_once(bench: Bench, name: str) -> None:
    bench.reflection.close()
    stream = bench.stream(name)
    assert await stream.read() is grpc.aio.EOF


def test_pool_is_not_the_default_one() -> None:
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName("grpc/reflection/v1/reflection.proto")
