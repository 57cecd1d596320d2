"""The floor: the least that a grpc.aio server in Python can do for an inference request.

Lives here: a server of the same service, messages, options and event loop as the product's, which parses a request and
answers with its tensors. Must not: check, queue, run. What the product takes beyond this is the product's own.

Prints its port; ends when its standard input does, so it can't outlive who started it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from protos.inference_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

# The product's own choices, taken rather than repeated: a floor under other conditions would be no floor.
from server.app import GRPC_OPTIONS
from server.cli import new_loop

__all__ = ["Echo", "serve"]


class Echo(GRPCInferenceServiceServicer):
    """Answers ModelInfer with the inputs as outputs."""

    async def ModelInfer(self, request: ModelInferRequest, context: Any) -> ModelInferResponse:
        response = ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        for tensor in request.inputs:
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.extend(request.raw_input_contents)
        return response


async def serve() -> None:
    """Serve on a free loopback port until standard input ends."""
    server = grpc.aio.server(options=GRPC_OPTIONS)
    add_GRPCInferenceServiceServicer_to_server(Echo(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    await server.stop(0.5)


def main() -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve())


if __name__ == "__main__":
    main()
