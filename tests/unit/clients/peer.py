"""A server to call: real gRPC on its own port, each answer scripted by the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.protos import inference_pb2 as pb
from paceline.protos import inference_pb2_grpc
from paceline.protos.model_config_pb2 import ModelConfig

Answer = Callable[[pb.ModelInferRequest, grpc.ServicerContext], pb.ModelInferResponse]


class Peer(inference_pb2_grpc.GRPCInferenceServiceServicer, health_pb2_grpc.HealthServicer):
    """Echoes inference requests until `answer` is set. `readiness` is used up from the front; the last one stays.
    Without a `config` it has no ModelConfig."""

    def __init__(self) -> None:
        self.target = ""
        self.answer: Answer = echo
        self.readiness: list[bool | grpc.StatusCode] = [True]
        self.model = pb.ModelMetadataResponse(name="m")
        self.index = pb.RepositoryIndexResponse()
        self.config: ModelConfig | None = None
        self.health = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.time_left_s: list[float | None] = []

    def _note(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_left_s.append(context.time_remaining())

    def ModelInfer(self, request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        self._note(request, context)
        return self.answer(request, context)

    def ServerLive(self, request: pb.ServerLiveRequest, context: grpc.ServicerContext) -> pb.ServerLiveResponse:
        self._note(request, context)
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: pb.ServerReadyRequest, context: grpc.ServicerContext) -> pb.ServerReadyResponse:
        self._note(request, context)
        ready = self.readiness.pop(0) if len(self.readiness) > 1 else self.readiness[0]
        if isinstance(ready, grpc.StatusCode):
            context.abort(ready, "scripted")
        return pb.ServerReadyResponse(ready=bool(ready))

    def ModelReady(self, request: pb.ModelReadyRequest, context: grpc.ServicerContext) -> pb.ModelReadyResponse:
        self._note(request, context)
        return pb.ModelReadyResponse(ready=request.name == "m")

    def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: grpc.ServicerContext
    ) -> pb.ServerMetadataResponse:
        self._note(request, context)
        return pb.ServerMetadataResponse(name="peer", version="7", extensions=["statistics"])

    def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: grpc.ServicerContext
    ) -> pb.ModelMetadataResponse:
        self._note(request, context)
        return self.model

    def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, context: grpc.ServicerContext
    ) -> pb.RepositoryIndexResponse:
        self._note(request, context)
        return self.index

    def ModelConfig(self, request: pb.ModelConfigRequest, context: grpc.ServicerContext) -> pb.ModelConfigResponse:
        self._note(request, context)
        if self.config is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        return pb.ModelConfigResponse(config=self.config)

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        self._note(request, context)
        if request.service == "unknown":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return self.health

    def takes(self, **inputs: tuple[str, list[int]]) -> None:
        """Scripts the model's metadata: datatype and shape by the name of the input."""
        del self.model.inputs[:]
        for name, (datatype, shape) in inputs.items():
            self.model.inputs.add(name=name, datatype=datatype, shape=shape)


def echo(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
    """Every input as an output of the same name, in the raw form."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version="3", id=request.id)
    for tensor in request.inputs:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    response.raw_output_contents.extend(request.raw_input_contents)
    return response


def refuse(
    status: grpc.StatusCode, message: str = "scripted", trailing: tuple[tuple[str, str | bytes], ...] = ()
) -> Answer:
    """Ends every inference with `status`."""

    def answer(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        context.set_trailing_metadata(trailing)
        context.abort(status, message)

    return answer


class Stall:
    """An answer that never comes; `started` and `ended` are set when the server sees the call begin and end."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.ended = threading.Event()

    def __call__(self, request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        over = threading.Event()
        if not context.add_callback(over.set):  # it is over already
            over.set()
        self.started.set()
        over.wait(60)
        self.ended.set()
        return pb.ModelInferResponse()


@contextmanager
def serving(peer: Peer, address: str = "127.0.0.1:0") -> Iterator[Peer]:
    """Serves until the block ends; `peer.target` is the address."""
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(peer, server)
    health_pb2_grpc.add_HealthServicer_to_server(peer, server)
    peer.target = f"127.0.0.1:{server.add_insecure_port(address)}"
    server.start()
    try:
        yield peer
    finally:
        server.stop(None).wait()


@contextmanager
def serving_bytes(answer: bytes) -> Iterator[str]:
    """The address of a server that answers every call, and every message of a stream, with these bytes."""

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            if str(handler_call_details.method).endswith("ModelStreamInfer"):
                return grpc.stream_stream_rpc_method_handler(lambda requests, context: (answer for _ in requests))
            return grpc.unary_unary_rpc_method_handler(lambda request, context: answer)

    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
