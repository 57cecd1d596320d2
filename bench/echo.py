"""The floor: the least that a grpc.aio server in Python can do for an inference request.

Lives here: a server with the same service, messages, options, event loop and C library settings as the product, which
parses a request and answers with the first bytes of its tensor, as many as the model's output has. Must not: check,
queue, run. What the product takes beyond this is the product's own. It also answers what NVIDIA's perf_analyzer asks
before it begins: metadata and configuration of the models.

Prints its port; ends when its standard input does, so it can't outlive the process that started it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from bench.models import INPUT, MAX_ROWS, MODELS, OUTPUT
from paceline.protos import inference_pb2 as pb
from paceline.protos import model_config_pb2 as config_pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

# The product's own choices, imported rather than repeated: a floor under other conditions would be no floor.
from paceline.server.limits import Limits
from paceline.server.memory import huge_pages
from paceline.server.tuning import keep_freed_memory, new_loop

__all__ = ["Echo", "run"]

_OPTIONS = (("grpc.so_reuseport", 0), *Limits().grpc_options())


class Echo(GRPCInferenceServiceServicer):
    """Answers requests to the models of `bench.models`, each call or message of a stream by itself."""

    def __init__(self) -> None:
        self._output_bytes = {
            name: None if -1 in model.output_dims else model.output_bytes(0) for name, model in MODELS.items()
        }

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        return self._answer(request)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for request in requests:
            yield pb.ModelStreamInferResponse(infer_response=self._answer(request))

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=True)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=True)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="echo", version="1")

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        model, response = MODELS[request.name], pb.ModelMetadataResponse(name=request.name, versions=["1"])
        response.inputs.add(name=INPUT, datatype="FP32", shape=(-1, *model.dims))
        response.outputs.add(name=OUTPUT, datatype="FP32", shape=(-1, *model.output_dims))
        return response

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Any) -> pb.ModelConfigResponse:
        model, config = MODELS[request.name], config_pb.ModelConfig(name=request.name, max_batch_size=MAX_ROWS)
        config.input.add(name=INPUT, data_type=config_pb.TYPE_FP32, dims=model.dims)
        config.output.add(name=OUTPUT, data_type=config_pb.TYPE_FP32, dims=model.output_dims)
        return pb.ModelConfigResponse(config=config)

    def _answer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        content, output_bytes = request.raw_input_contents[0], self._output_bytes[request.model_name]
        if output_bytes is not None and output_bytes < len(content):
            content = content[:output_bytes]
        response.outputs.add(name=OUTPUT, datatype="FP32", shape=(1, len(content) // 4))
        response.raw_output_contents.append(content)
        return response


async def _serve(make: Callable[[], Echo]) -> None:
    server = grpc.aio.server(options=_OPTIONS)
    add_GRPCInferenceServiceServicer_to_server(make(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    await server.stop(0.5)


def run(make: Callable[[], Echo]) -> None:
    """Serve what `make` makes on a free loopback port until standard input ends."""
    huge_pages.ask()
    keep_freed_memory()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(make))


if __name__ == "__main__":
    run(Echo)
