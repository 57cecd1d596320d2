"""A peer with sequences and with answers over streams: real gRPC on its own port, as `peer.py` has without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from paceline.protos import inference_pb2 as pb
from tests.unit.clients.peer import Peer, echo

__all__ = ["Sums", "Talking", "answer", "final", "flags"]

Script = Callable[[pb.ModelInferRequest, grpc.ServicerContext], Iterator[pb.ModelStreamInferResponse]]


def flags(request: pb.ModelInferRequest) -> str:
    """START and END of a request, as letters."""
    parameters = request.parameters
    return "S" * parameters["sequence_start"].bool_param + "E" * parameters["sequence_end"].bool_param


class Sums:
    """Answers each step with the sum of the sequence's steps so far, and refuses steps of unknown sequences as Triton
    does. Fails the steps whose values are in `failures`, with their status and `text`."""

    def __init__(self) -> None:
        self.live: dict[Any, float] = {}
        self.failures: dict[float, grpc.StatusCode] = {}
        self.text = "scripted"
        self.seen: list[tuple[str, float]] = []

    def __call__(self, request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        outcome = self.step(request)
        if isinstance(outcome, tuple):
            context.abort(*outcome)
        assert isinstance(outcome, pb.ModelInferResponse)
        return outcome

    def step(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse | tuple[grpc.StatusCode, str]:
        """The answer, or the status and the text of the error."""
        parameter = request.parameters["sequence_id"]
        own_id = getattr(parameter, str(parameter.WhichOneof("parameter_choice")))
        raw = {tensor.name: raw for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
        (value,) = memoryview(raw["x"]).cast("f")
        self.seen.append((flags(request), value))
        if value in self.failures:
            return self.failures[value], self.text
        if not request.parameters["sequence_start"].bool_param and own_id not in self.live:
            text = (
                f"inference request for sequence {own_id} to model 'm' must specify the START flag on the first request"
            )
            return grpc.StatusCode.INVALID_ARGUMENT, text
        if request.parameters["sequence_start"].bool_param:
            self.live[own_id] = 0.0
        self.live[own_id] += value
        response = pb.ModelInferResponse(model_name="m", id=request.id)
        response.outputs.add(name="sum", datatype="FP32", shape=[1]).contents.fp32_contents.append(self.live[own_id])
        if request.parameters["sequence_end"].bool_param:
            del self.live[own_id]
        return response


class Talking(Peer):
    """Answers calls to its model as Triton does for a decoupled one, and each request of a stream with what `script`
    yields."""

    def __init__(self) -> None:
        super().__init__()
        self.script: Script = lambda request, context: iter([answer(request), final(answer(request))])

    def ModelInfer(self, request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        self._note(request, context)
        context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
        )
        raise AssertionError

    def ModelStreamInfer(
        self, requests: Iterator[pb.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ModelStreamInferResponse]:
        for request in requests:
            self._note(request, context)
            yield from self.script(request, context)


def answer(request: pb.ModelInferRequest) -> pb.ModelStreamInferResponse:
    """The inputs as outputs, said not to be the last answer."""
    message = pb.ModelStreamInferResponse(infer_response=echo(request, None))  # type: ignore[arg-type]
    message.infer_response.parameters["triton_final_response"].bool_param = False
    return message


def final(message: pb.ModelStreamInferResponse) -> pb.ModelStreamInferResponse:
    """`message` as the last answer."""
    message.infer_response.parameters["triton_final_response"].bool_param = True
    return message
