"""Fuzz targets: an inference request from its bytes to an answer, and the tensors in it.

Lives here: running the server's own steps, in their order. Must not: judge memory or time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from paceline.backends.spec import MISSING, Tensors
from paceline.protos.datatypes import DATATYPES
from paceline.protos.inference_pb2 import InferTensorContents, ModelInferRequest, ModelInferResponse
from paceline.protos.tensors import TensorError, decode_contents, decode_raw, encode_raw
from paceline.server.codec.known_requests import Group
from paceline.server.codec.parameters import parse_parameters
from paceline.server.codec.wire_request import AnyMessage, RequestReader, WireRequest, message_of
from paceline.server.errors import ServerError
from paceline.server.memory.regions import Regions
from paceline.server.memory.system_region import open_system_region
from paceline.server.rpc.calls import HeaderRules, add_headers
from paceline.server.rpc.handlers import serialized
from tests.codecs import encoded
from tests.fuzz.judging import Finding, Target, refused
from tests.fuzz.models import MAX_ROWS, FuzzedModel, open_model
from tests.shared_objects import SharedObject

__all__ = ["REGION_BYTES", "targets"]

REGION_BYTES = 256
"""The size of the only registered region, `r`."""

_CONTENT = bytes(range(REGION_BYTES))
_DATATYPES = list(DATATYPES.values())


def targets() -> list[Target]:
    """All targets of this module, ready to run."""
    return [
        Target("infer", _infer(), times=1000),
        Target("tensor", _tensor),
        Target("contents", _contents),
        Target("headers", _headers),
    ]


def _infer() -> Callable[[bytes], None]:
    # Kept as long as the process lives; its prefix keeps it out of other tests' counts.
    memory = SharedObject(REGION_BYTES, "paceline-fuzz-")
    regions = Regions(4)
    regions.add(open_system_region("r", memory.key, 0, REGION_BYTES))
    memory.unlink()  # it is gone with the process, however that ends

    def run(data: bytes) -> None:
        read = RequestReader()
        request = read(data)
        if isinstance(request, ServerError):
            return
        model = open_model(request.model_name, regions)
        outcomes = []
        # Parsed; taken apart, which has to be checked first; taken apart again, with what is known by then.
        for one in (message_of(request), _taken_apart(read, data), _taken_apart(read, data)):
            memory.put(_CONTENT)
            outcomes.append(_outcome(model, one))
        # And known from another request that looks like it.
        model, read = open_model(request.model_name, regions), RequestReader()
        for like in (_like(request), data):
            memory.put(_CONTENT)
            last = _outcome(model, _taken_apart(read, like))
        if outcomes != [last] * 3:
            raise Finding(f"one request, and {outcomes}, {last}")

    return run


def _taken_apart(read: RequestReader, data: bytes) -> AnyMessage:
    """The request as read the second time."""
    request = read(data)
    request = read(data) if not isinstance(request, WireRequest) else request
    assert not isinstance(request, ServerError)
    return request


def _like(request: AnyMessage) -> bytes:
    """A request with other tensors, mostly of the same sizes, and another id."""
    like = ModelInferRequest()
    like.CopyFrom(message_of(request))
    like.id = "another"
    for number, raw in enumerate(like.raw_input_contents):
        like.raw_input_contents[number] = bytes(len(raw))
    return like.SerializeToString()


def _outcome(model: FuzzedModel, request: AnyMessage) -> object:
    """The answer, or how the request was refused.

    A request that is admitted can be executed, alone and beside another of its key, with the same outcome.
    """
    try:
        decoded = model.codec.read(request)
        alone = _executed(model, decoded, 1)[0]
        if model.spec.batched and 2 * decoded.options.rows <= MAX_ROWS:
            for both in _executed(model, decoded, 2):
                if not _equal(both, alone):
                    raise Finding(f"alone {alone}, in a batch {both}")
        data = serialized(encoded(model.codec, request, decoded, alone))
    except Finding:
        raise
    except Exception as error:  # noqa: BLE001 - `refused` tells them apart
        refused(error)
        return type(error), str(error)
    return ModelInferResponse.FromString(data).SerializeToString(deterministic=True), decoded.steps


def _executed(model: FuzzedModel, decoded: Group, times: int) -> list[Tensors]:
    results = []
    for one in model.execute([decoded.inputs[0]] * times, 0).results:
        if isinstance(one, Exception):
            raise one
        results.append(one)
    return results


def _equal(one: Tensors, other: Tensors) -> bool:
    return all(
        (a is MISSING and b is MISSING) or (a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist())
        or (a.dtype.kind == "f" and np.array_equal(a, b, equal_nan=True))
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip


def _shape(data: bytes) -> tuple[Sequence[int], bytes]:
    """A shape from the first bytes, which may be hostile or harmless, and the remaining bytes."""
    rank, data = data[0] % 6, data[1:]
    sizes: list[int] = []
    for _ in range(rank):
        if data[:1] > b"\xf0":
            sizes.append(struct.unpack("<q", data[1:9].ljust(8, b"\xff"))[0])
            data = data[9:]
        else:
            sizes.append(data[0] - 1 if data else 1)
            data = data[1:]
    return sizes, data


def _tensor(data: bytes) -> None:
    """The first bytes select datatype and shape, the others are the tensor."""
    if len(data) < 2:
        return
    datatype = _DATATYPES[data[0] % len(_DATATYPES)]
    shape, rest = _shape(data[1:])
    try:
        array = decode_raw(rest, datatype, shape)
    except TensorError:
        return
    if encode_raw(array, datatype) != rest:
        raise Finding("decoded and encoded again it is something else")


def _contents(data: bytes) -> None:
    """The same for typed contents, which are a message."""
    if len(data) < 2:
        return
    datatype = _DATATYPES[data[0] % len(_DATATYPES)]
    shape, rest = _shape(data[1:])
    try:
        message = InferTensorContents.FromString(rest)
    except Exception:  # noqa: BLE001 - as above
        return
    try:
        array = decode_contents(message, datatype, shape)
    except TensorError:
        return
    if array.shape != tuple(shape) or array.dtype != datatype.dtype:
        raise Finding(f"expected {datatype} {shape}, got {array.dtype} {array.shape}")


class _Call:
    """A call with headers."""

    def __init__(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._metadata


def _headers(data: bytes) -> None:
    """Each two adjacent lines are a header's key and value; all are forwarded with the request in the last line."""
    *lines, rest = data.split(b"\n")
    # As in grpc: UTF-8 where possible, and bytes under keys that end in -bin.
    pairs = [
        (key.decode("latin-1"), value if key.endswith(b"-bin") else value.decode("latin-1"))
        for key, value in pairwise(lines)
    ]
    try:
        request = ModelInferRequest.FromString(rest)
    except Exception:  # noqa: BLE001
        request = ModelInferRequest()
    try:
        add_headers(request, HeaderRules(".*").forwarded(_Call(pairs)))
        parameters = parse_parameters(request.parameters)
    except Exception as error:  # noqa: BLE001
        refused(error)
        return
    if min(parameters.timeout_ns, parameters.deadline_ns, parameters.priority) < 0:
        raise Finding(f"below 0: {parameters}")
