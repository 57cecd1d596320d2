"""Outputs for a client's memory, which may be gone by then: they are only reported as written if they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from paceline.backends.batching import Outputs, Share
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.wire_request import AnyMessage, RequestReader, WireRequest
from paceline.server.errors import InvalidRequest
from paceline.server.memory.regions import Regions
from paceline.server.memory.system_region import open_system_region
from tests.codecs import encoded
from tests.shared_objects import SharedObject, request_shared_output, shared_object
from tests.wire import infer, rows_of_floats

SPEC = ModelSpec(
    (TensorSpec("a", "FP32", (-1,)),), (TensorSpec("x", "FP32", (-1,)), TensorSpec("y", "FP32", (2,))), batched=True
)
GONE = "^model 'm': output 'x': shared memory region 'r': expected "


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(64) as made:
        yield made


@pytest.fixture
def codec(memory: SharedObject) -> ModelCodec:
    regions = Regions(limit=1)
    regions.add(open_system_region("r", memory.key, 0, 64))
    return ModelCodec("m", "1", SPEC, 8, regions=regions)


def wanted_there() -> pb.ModelInferRequest:
    message = infer("m", {"a": rows_of_floats(1)})
    request_shared_output(message, "x", "r", 8)
    return message


def learned(codec: ModelCodec, message: pb.ModelInferRequest) -> AnyMessage:
    """A request like earlier ones, which needn't be made into a message."""
    read = RequestReader()
    for _ in range(3):
        request = read(message.SerializeToString())
        assert not isinstance(request, Exception)
        codec.read(request)
    assert isinstance(request, WireRequest)
    return request


def test_output_for_truncated_memory_is_refused_before_anything_is_queued(
    codec: ModelCodec, memory: SharedObject
) -> None:
    memory.resize(0)
    with pytest.raises(InvalidRequest, match=GONE):
        codec.read(wanted_there())


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "of a batch"])
def test_output_for_memory_truncated_meanwhile_is_refused_and_not_reported_as_written(
    codec: ModelCodec, memory: SharedObject, batched: bool
) -> None:
    request = learned(codec, wanted_there())
    decoded = codec.read(request)
    memory.resize(0)
    results = Share(Outputs([rows_of_floats(2)] * 2), 1, 2) if batched else (rows_of_floats(1),) * 2
    with pytest.raises(InvalidRequest, match=GONE):
        encoded(codec, request, decoded, results)


def test_output_that_turns_out_too_large_is_refused_and_writes_nothing(codec: ModelCodec, memory: SharedObject) -> None:
    request = learned(codec, wanted_there())
    with pytest.raises(InvalidRequest, match=r"^model 'm': output 'x': .* at least 12 bytes .*, got 8$"):
        encoded(codec, request, codec.read(request), (np.ones((1, 3), np.float32), rows_of_floats(1)))
    assert memory.get(64) == bytes(64)


def test_outputs_in_memory_and_in_the_response_are_each_where_they_were_requested(
    codec: ModelCodec, memory: SharedObject
) -> None:
    message = wanted_there()
    message.outputs.add(name="y")
    request = learned(codec, message)
    x, y = rows_of_floats(1), rows_of_floats(1, first=5)
    answer = encoded(codec, request, codec.read(request), (x, y))
    assert isinstance(answer, bytes)
    assert list(pb.ModelInferResponse.FromString(answer).raw_output_contents) == [b"", y.tobytes()]
    assert memory.get(8) == x.tobytes()
