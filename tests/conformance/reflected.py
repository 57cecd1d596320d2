"""A client that knows nothing but server reflection: it learns services and messages from the server, and calls with
JSON.

grpcurl and similar programs do the same; this one is in Python. Must not: import generated code other than reflection's
own.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2

__all__ = ["PROTOCOLS", "ReflectedClient", "ReflectionStream"]

PROTOCOLS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The two names of the service; the messages are the same on the wire."""


class ReflectionStream:
    """One open reflection stream. Iterating it yields further responses until the server ends the stream."""

    def __init__(self, channel: grpc.Channel, protocol: str, timeout_s: float = 20) -> None:
        call = channel.stream_stream(
            f"/{protocol}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        self._requests: queue.Queue[Any] = queue.Queue()
        self._responses: Any = call(iter(self._requests.get, None), timeout=timeout_s)

    def __enter__(self) -> ReflectionStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end_requests()
        self._responses.cancel()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._responses)

    def ask(self, **request: Any) -> Any:
        """The response to one request."""
        self._requests.put(reflection_pb2.ServerReflectionRequest(**request))
        return next(self._responses)

    def end_requests(self) -> None:
        """Half-close: there will be no more requests."""
        self._requests.put(None)

    def services(self) -> list[str]:
        return [service.name for service in self.ask(list_services="*").list_services_response.service]

    def files(self, **request: str) -> list[descriptor_pb2.FileDescriptorProto]:
        """The files in the response to `request`."""
        response = self.ask(**request).file_descriptor_response
        return [descriptor_pb2.FileDescriptorProto.FromString(file) for file in response.file_descriptor_proto]


class ReflectedClient:
    """Calls any unary method of any service with JSON, as dicts."""

    def __init__(self, channel: grpc.Channel, protocol: str) -> None:
        self._channel = channel
        self._protocol = protocol
        self._pool = descriptor_pool.DescriptorPool()
        self._known: set[str] = set()

    def call(self, method: str, request: dict[str, Any], timeout_s: float = 20) -> dict[str, Any]:
        """The response of `package.Service/Method` to `request`. Raises grpc.RpcError."""
        descriptor = self._method(method)
        message = json_format.ParseDict(request, self._message(descriptor.input_type), descriptor_pool=self._pool)
        rpc = self._channel.unary_unary(
            f"/{method}",
            request_serializer=type(message).SerializeToString,
            response_deserializer=type(self._message(descriptor.output_type)).FromString,
        )
        response: Message = rpc(message, timeout=timeout_s)
        return json_format.MessageToDict(response, always_print_fields_with_no_presence=True)

    def _method(self, method: str) -> Any:
        service, _, name = method.partition("/")
        with ReflectionStream(self._channel, self._protocol) as stream:
            self._learn(stream, file_containing_symbol=service)
        return self._pool.FindServiceByName(service).methods_by_name[name]

    def _message(self, descriptor: Any) -> Message:
        return message_factory.GetMessageClass(descriptor)()

    def _learn(self, stream: ReflectionStream, **request: str) -> None:
        """Add the first file of a response, and ask for each that it depends on: servers needn't send any others
        along."""
        file = stream.files(**request)[0]
        if file.name in self._known:
            return
        self._known.add(file.name)
        for name in file.dependency:
            self._learn(stream, file_by_filename=name)
        self._pool.AddSerializedFile(file.SerializeToString())
