"""A batch as a message to another server of the Open Inference Protocol, and the splitting of its answer.

Lives here: pure conversion. Must not: send anything. The rule: a row is copied once, from the request that brought it
into the bytes that gRPC sends; rows of an answer are views of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from paceline.backends.batching import rows_of, split
from paceline.backends.errors import ExecutionError
from paceline.backends.spec import MISSING, Array, ModelSpec, Tensors
from paceline.protos.datatypes import UnknownDatatypeError, by_name
from paceline.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from paceline.protos.tensors import TensorError, decode_contents, decode_raw, raw_buffer
from paceline.protos.wire import RAW_INPUT_TAG, parse, varint

_MAX_BYTES = 2**31 - 1
"""protobuf's limit for a message."""

Headers = tuple[tuple[str, str | bytes], ...]


class RemoteRequest(NamedTuple):  # made for each request
    """One request of a batch for another server.

    `outputs` are the indices of the wanted ones, `deadline_ns` is when its caller gives up (monotonic clock). `headers`
    and `extras` are the same for all requests of a batch; `extras` is a serialized ModelInferRequest with parameters
    only: the request's, and those of tensors by name. `spec` is the same for all, too; it is set if the model has none:
    the inputs that are sent, and the names of outputs, if some were named. `tracing` are headers that may differ.
    `step`: the sequence that it is a step of, an integer without a sign or a text, and whether it is the first and the
    last of it; such a request is a batch by itself.
    """

    inputs: Tensors
    outputs: tuple[int, ...]
    deadline_ns: int
    id: str = ""
    headers: Headers = ()
    tracing: Headers = ()
    extras: bytes = b""
    spec: ModelSpec | None = None
    step: tuple[int | str, bool, bool] | None = None


class UndeclaredTensor(NamedTuple):
    """An output of a model that doesn't declare its tensors."""

    name: str
    datatype: str
    array: Array


UndeclaredOutputs = tuple[UndeclaredTensor, ...]


def call_headers(requests: Sequence[RemoteRequest]) -> Headers:
    """The headers of a batch: those that all have in common. The trace of one request isn't that of the others."""
    first = requests[0]
    if first.tracing and all(one.tracing == first.tracing for one in requests):
        return first.headers + first.tracing
    return first.headers


def wanted_outputs(requests: Sequence[RemoteRequest]) -> tuple[int, ...]:
    """The indices of the outputs that any request wants."""
    first = requests[0].outputs
    if all(one.outputs == first for one in requests):
        return tuple(sorted(first))
    return tuple(sorted({place for one in requests for place in one.outputs}))


def encode_request(
    model: str, version: str, spec: ModelSpec, requests: Sequence[RemoteRequest], wanted: Sequence[int]
) -> bytes:
    """The serialized ModelInferRequest of `requests`, joined along axis 0. All agree in datatypes, trailing dimensions
    and in which inputs are MISSING. ExecutionError if it is too large for a message."""
    request_id = requests[0].id if len(requests) == 1 else ""
    message = ModelInferRequest(model_name=model, model_version=version, id=request_id)
    extras = ModelInferRequest.FromString(requests[0].extras)
    message.parameters.MergeFrom(extras.parameters)
    if requests[0].step is not None:
        sequence, start, end = requests[0].step
        parameters = message.parameters
        if isinstance(sequence, str):
            parameters["sequence_id"].string_param = sequence
        else:  # as Triton wants it: the same 64 bits, with a sign
            parameters["sequence_id"].int64_param = sequence - (1 << 64) if sequence >> 63 else sequence
        parameters["sequence_start"].bool_param, parameters["sequence_end"].bool_param = start, end
    of_input = {tensor.name: tensor for tensor in extras.inputs}
    of_output = {tensor.name: tensor for tensor in extras.outputs}
    pieces: list[Any] = [b""]
    for number, tensor in enumerate(spec.inputs):
        column = [one.inputs[number] for one in requests]
        if column[0] is MISSING:
            continue
        shape = column[0].shape
        if len(column) > 1:
            shape = (sum(array.shape[0] for array in column), *shape[1:])
        added = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        if tensor.name in of_input:
            added.parameters.MergeFrom(of_input[tensor.name].parameters)
        datatype = by_name(tensor.datatype)
        buffers = [raw_buffer(array, datatype) for array in column]
        pieces += (RAW_INPUT_TAG, varint(sum(map(len, buffers))), *buffers)
    if len(wanted) < len(spec.outputs) or of_output or requests[0].spec:
        for place in wanted:
            output = message.outputs.add(name=spec.outputs[place].name)
            if output.name in of_output:
                output.parameters.MergeFrom(of_output[output.name].parameters)
    pieces[0] = message.SerializeToString()
    size_bytes = sum(map(len, pieces))
    if size_bytes > _MAX_BYTES:
        raise ExecutionError(
            f"expected a batch of at most {_MAX_BYTES} bytes, got {size_bytes}: larger than a message can be"
        )
    return b"".join(pieces)


def decode_response(
    data: bytes, spec: ModelSpec, requests: Sequence[RemoteRequest], wanted: Sequence[int]
) -> Sequence[Tensors]:
    """One result per request, shares of `data`'s tensors. Outputs are MISSING if nobody wanted them, or if the model
    leaves them out because of missing optional inputs.

    Raises ExecutionError, naming the output, for an answer that doesn't match what `spec` promises for these requests'
    rows, and MemoryError if there is no room for it.
    """
    message = _message(data)
    if any(array is MISSING for array in requests[0].inputs):
        there = {output.name for output in message.outputs}
        wanted = [place for place in wanted if spec.outputs[place].name in there]
    outputs = _outputs(message, spec, wanted)
    rows = [1]
    if spec.batched:
        rows = rows_of([[array for array in one.inputs if array is not MISSING] for one in requests])
    if len(wanted) == len(spec.outputs):
        return split(outputs, rows, spec)
    narrowed = replace(spec, outputs=tuple(spec.outputs[place] for place in wanted))
    results = []
    for share in split(outputs, rows, narrowed):
        arrays = dict(zip(wanted, share, strict=True))
        results.append(tuple(arrays.get(place, MISSING) for place in range(len(spec.outputs))))
    return results


def decode_undeclared(data: bytes, requests: Sequence[RemoteRequest]) -> list[UndeclaredOutputs]:
    """As `decode_response` if nothing is known about the outputs: those of a single request are passed on as they are,
    those of a batch must have its rows."""
    message = _message(data)
    tensors = [
        UndeclaredTensor(output.name, output.datatype, _array(message, number))
        for number, output in enumerate(message.outputs)
    ]
    if len(requests) == 1:
        return [tuple(tensors)]
    rows = rows_of([one.inputs for one in requests])
    for name, _, array in tensors:
        if array.shape[:1] != (sum(rows),):
            raise ExecutionError(
                f"output '{name}': expected {sum(rows)} rows, those of the batch, got shape {list(array.shape)}"
            )
    return [
        tuple(UndeclaredTensor(name, datatype, array[start:end]) for name, datatype, array in tensors)
        for start, end in pairwise(accumulate(rows, initial=0))
    ]


def _message(data: bytes) -> ModelInferResponse:
    try:
        message = parse(ModelInferResponse, data)
    except DecodeError as error:
        raise ExecutionError(f"the upstream's answer isn't a valid ModelInferResponse: {error}") from None
    raw = message.raw_output_contents
    if raw and len(raw) != len(message.outputs):
        raise ExecutionError(f"the upstream answered with {len(message.outputs)} outputs and {len(raw)} raw contents")
    return message


def _outputs(message: ModelInferResponse, spec: ModelSpec, wanted: Sequence[int]) -> list[Array]:
    numbers = {output.name: number for number, output in enumerate(message.outputs)}
    arrays = []
    for place in wanted:
        tensor = spec.outputs[place]
        if tensor.name not in numbers:
            raise ExecutionError(f"output '{tensor.name}' is not in the upstream's answer, only {list(numbers)}")
        number = numbers[tensor.name]
        if message.outputs[number].datatype != tensor.datatype:
            got = message.outputs[number].datatype
            raise ExecutionError(f"output '{tensor.name}': expected {tensor.datatype}, got {got}")
        arrays.append(_array(message, number))
    return arrays


def _array(message: ModelInferResponse, number: int) -> Array:
    """The tensor of one output, by its own datatype and shape."""
    output, raw = message.outputs[number], message.raw_output_contents
    try:
        datatype, shape = by_name(output.datatype), tuple(output.shape)
        return decode_raw(raw[number], datatype, shape) if raw else decode_contents(output.contents, datatype, shape)
    except (TensorError, UnknownDatatypeError) as error:
        raise ExecutionError(f"output '{output.name}' of the upstream's answer: {error}") from None
