"""gRPC's handlers of the inference service, for whoever registers it.

Lives here: making handlers from methods of the service. Must not: know what the methods do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from paceline.protos import inference_pb2 as pb
from paceline.server.codec.wire_request import RequestReader, parsed
from paceline.server.rpc.gate import Handler, Registry

_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
METHODS: Sequence[MethodDescriptor] = tuple(_SERVICE.methods)


def add_handlers(server: Registry, handlers: dict[str, Handler]) -> None:
    """Register the service with `server`, each of its methods by name."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))


def handler_of(method: MethodDescriptor, behaviour: Callable[..., Awaitable[object]], max_elements: int) -> Handler:
    """gRPC's handler of a method. `behaviour` gets an error (`Unread`) in place of bytes that are no message, or one of
    more than `max_elements` elements, or that there is no room for."""
    streams = method.client_streaming and method.server_streaming
    make = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    request = GetMessageClass(method.input_type)
    if request is pb.ModelInferRequest:
        return make(behaviour, RequestReader(max_elements), None)  # its answers are bytes
    return make(behaviour, partial(parsed, request, max_elements=max_elements), serialized)


def serialized(response: Message | bytes) -> bytes:
    """`response` as it goes on the wire."""
    return response if isinstance(response, bytes) else response.SerializeToString()
