"""Tensors in shared memory against plain slices of bytes: any bounds, and any slices of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protos.datatypes import DATATYPES
from paceline.protos.inference_pb2 import InferParameter
from paceline.protos.tensors import TensorError, decode_raw
from paceline.server.errors import InvalidRequest
from paceline.server.memory.region_tensors import RegionTensor, Span, span_of
from paceline.server.memory.regions import Regions
from paceline.server.memory.system_region import open_system_region
from tests.shared_objects import SharedObject, shared_object

SIZE = 600
CONTENT = np.random.default_rng(7).bytes(SIZE)
EDGES = st.sampled_from([0, 1, SIZE - 1, SIZE, SIZE + 1, 2**31, 2**63 - 1, 2**64 - 1])
ANY_INTEGER = st.one_of(st.integers(0, SIZE + 2), EDGES)


@pytest.fixture(scope="module")
def memory() -> Iterator[SharedObject]:
    with shared_object(SIZE) as made:
        made.put(CONTENT)
        yield made


@given(registered=st.tuples(ANY_INTEGER, ANY_INTEGER), asked=st.tuples(ANY_INTEGER, ANY_INTEGER))
def test_span_equals_a_slice_or_is_refused(
    memory: SharedObject, registered: tuple[int, int], asked: tuple[int, int]
) -> None:
    begin, length = registered
    try:
        region = open_system_region("r", memory.key, begin, length)
    except InvalidRequest:
        assert length == 0 or begin + length > SIZE
        return
    assert length > 0
    content = CONTENT[begin : begin + length]
    assert len(content) == length
    regions = Regions(1)
    regions.add(region)
    offset, size = asked
    parameters = {
        "shared_memory_region": InferParameter(string_param="r"),
        "shared_memory_offset": InferParameter(uint64_param=offset),
        "shared_memory_byte_size": InferParameter(uint64_param=size),
    }
    try:
        span = span_of(parameters, regions)
    except InvalidRequest:
        assert offset >= length or offset + size > length
        return
    assert span is not None
    assert (offset < length, offset + size <= length) == (True, True)
    assert span.read().tobytes() == content[offset : offset + size]


@given(
    datatype=st.sampled_from([row for row in DATATYPES.values() if row.item_bytes and row.name != "BOOL"]),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    offset=st.integers(0, 20),
    surplus=st.integers(-1, 1),
    cut=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_region_tensor_is_read_sliced_and_reshaped_like_the_array_of_its_bytes(
    memory: SharedObject, datatype: object, shape: list[int], offset: int, surplus: int, cut: tuple[int, int]
) -> None:
    kind = next(row for row in DATATYPES.values() if row is datatype)
    region = open_system_region("r", memory.key, 0, SIZE)
    size = int(np.prod(shape)) * kind.item_bytes
    if size + surplus < 0 or offset + size + surplus > SIZE:
        return
    span = Span(region, offset, size + surplus)
    if surplus:
        with pytest.raises(TensorError, match=f"expected {size} bytes for {kind.name} of shape"):
            RegionTensor.of_span("t", span, kind, tuple(shape))
        return
    tensor = RegionTensor.of_span("t", span, kind, tuple(shape))
    array = decode_raw(CONTENT[offset : offset + size], kind, shape)
    start, stop = min(cut), max(cut)
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == (array.shape, array.dtype, array.nbytes)
    assert bytes_of(tensor) == array.tobytes()
    assert bytes_of(tensor.reshape((array.size,))) == array.tobytes()
    assert bytes_of(tensor[start:stop]) == array[start:stop].tobytes()
    assert tensor[start:stop].shape == array[start:stop].shape
    assert bytes_of(tensor[start:stop][1:2]) == array[start:stop][1:2].tobytes()


def bytes_of(tensor: RegionTensor) -> bytes:
    array = np.empty(tensor.shape, tensor.dtype)
    tensor.read_into(array)
    return array.tobytes()
