"""A batch as a message to another server of the Open Inference Protocol, and its answer taken apart.

Lives here: pure conversion. Must not: send anything. The rule: a row is copied once, from the request that brought it
into the bytes that gRPC sends; rows of an answer are views of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from backends.base import MISSING, Array, ModelSpec, Tensors
from backends.batching import rows_of, split
from backends.errors import ExecutionError
from protos.datatypes import by_name
from protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from protos.tensors import TensorError, decode_contents, decode_raw, raw_buffer
from protos.wire import RAW_INPUT_TAG, varint

__all__ = ["Headers", "RemoteRequest", "call_headers", "decode_response", "encode_request", "wanted_outputs"]

_MOST_BYTES = 2**31 - 1
"""What protobuf takes for a message."""

Headers = tuple[tuple[str, str | bytes], ...]


class RemoteRequest(NamedTuple):  # made for each request
    """One request of a batch for another server.

    `outputs` are the places of the wanted ones, `deadline_ns` is when its caller gives up (monotonic clock). `headers`
    and `extras` are the same for all requests of a batch; `extras` is a serialized ModelInferRequest of parameters
    alone: the request's, and by name those of tensors. `tracing` are headers that may differ.
    """

    inputs: Tensors
    outputs: tuple[int, ...]
    deadline_ns: int
    id: str = ""
    headers: Headers = ()
    tracing: Headers = ()
    extras: bytes = b""


def call_headers(requests: Sequence[RemoteRequest]) -> Headers:
    """What travels with a batch: what all have in common. A trace of one request is not the others'."""
    first = requests[0]
    if first.tracing and all(one.tracing == first.tracing for one in requests):
        return first.headers + first.tracing
    return first.headers


def wanted_outputs(requests: Sequence[RemoteRequest]) -> tuple[int, ...]:
    """The places of the outputs that somebody wants."""
    first = requests[0].outputs
    if all(one.outputs == first for one in requests):
        return tuple(sorted(first))
    return tuple(sorted({place for one in requests for place in one.outputs}))


def encode_request(
    model: str, version: str, spec: ModelSpec, requests: Sequence[RemoteRequest], wanted: Sequence[int]
) -> bytes:
    """The serialized ModelInferRequest of `requests`, joined along axis 0. All agree in datatypes, trailing dimensions
    and in which inputs are MISSING. ExecutionError if it is too large for a message."""
    message = _head(model, version, requests)
    extras = ModelInferRequest.FromString(requests[0].extras)
    message.parameters.MergeFrom(extras.parameters)
    of_input = {tensor.name: tensor for tensor in extras.inputs}
    of_output = {tensor.name: tensor for tensor in extras.outputs}
    pieces: list[Any] = [b""]
    for number, tensor in enumerate(spec.inputs):
        column = [one.inputs[number] for one in requests]
        if column[0] is MISSING:
            continue
        added = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=_joined_shape(column))
        if tensor.name in of_input:
            added.parameters.MergeFrom(of_input[tensor.name].parameters)
        datatype = by_name(tensor.datatype)
        buffers = [raw_buffer(array, datatype) for array in column]
        pieces += (RAW_INPUT_TAG, varint(sum(map(len, buffers))), *buffers)
    if len(wanted) < len(spec.outputs) or of_output:
        for place in wanted:
            output = message.outputs.add(name=spec.outputs[place].name)
            if output.name in of_output:
                output.parameters.MergeFrom(of_output[output.name].parameters)
    pieces[0] = message.SerializeToString()
    size_bytes = sum(map(len, pieces))
    if size_bytes > _MOST_BYTES:
        raise ExecutionError(f"expected a batch of at most {_MOST_BYTES} bytes, got {size_bytes}: larger than messages")
    return b"".join(pieces)


def _head(model: str, version: str, requests: Sequence[RemoteRequest]) -> ModelInferRequest:
    return ModelInferRequest(model_name=model, model_version=version, id=requests[0].id if len(requests) == 1 else "")


def _joined_shape(column: Sequence[Array]) -> tuple[int, ...]:
    if len(column) == 1:
        return column[0].shape
    return (sum(array.shape[0] for array in column), *column[0].shape[1:])


def decode_response(
    data: bytes, spec: ModelSpec, requests: Sequence[RemoteRequest], wanted: Sequence[int]
) -> list[tuple[Array, ...]]:
    """One result per request, of views of `data`'s tensors; outputs that nobody wanted are MISSING.

    Raises ExecutionError, naming the output, for an answer that isn't what `spec` promises for these requests' rows.
    """
    try:
        outputs = _outputs(ModelInferResponse.FromString(data), spec, wanted)
    except DecodeError as error:
        raise ExecutionError(f"the upstream's answer is no ModelInferResponse: {error}") from None
    rows = rows_of([_present(one.inputs) for one in requests]) if spec.batched else [1]
    if len(wanted) == len(spec.outputs):
        return split(outputs, rows, spec)
    narrowed = replace(spec, outputs=tuple(spec.outputs[place] for place in wanted))
    shares = split(outputs, rows, narrowed)
    return [_widened(share, wanted, len(spec.outputs)) for share in shares]


def _present(inputs: Tensors) -> Tensors:
    return [array for array in inputs if array is not MISSING]


def _widened(share: Sequence[Array], wanted: Sequence[int], count: int) -> tuple[Array, ...]:
    whole = list(repeat(MISSING, count))
    for place, array in zip(wanted, share, strict=True):
        whole[place] = array
    return tuple(whole)


def _outputs(message: ModelInferResponse, spec: ModelSpec, wanted: Sequence[int]) -> list[Array]:
    raw = message.raw_output_contents
    if raw and len(raw) != len(message.outputs):
        raise ExecutionError(f"the upstream answers {len(message.outputs)} outputs with {len(raw)} raw contents")
    numbers = {output.name: number for number, output in enumerate(message.outputs)}
    arrays = []
    for place in wanted:
        tensor = spec.outputs[place]
        if tensor.name not in numbers:
            raise ExecutionError(f"output '{tensor.name}' is not in the upstream's answer, only {list(numbers)}")
        number = numbers[tensor.name]
        output = message.outputs[number]
        if output.datatype != tensor.datatype:
            raise ExecutionError(f"output '{tensor.name}': expected {tensor.datatype}, got {output.datatype}")
        datatype, shape = by_name(tensor.datatype), tuple(output.shape)
        try:
            array = (
                decode_raw(raw[number], datatype, shape) if raw else decode_contents(output.contents, datatype, shape)
            )
        except TensorError as error:
            raise ExecutionError(f"output '{tensor.name}' of the upstream's answer: {error}") from None
        arrays.append(array)
    return arrays
