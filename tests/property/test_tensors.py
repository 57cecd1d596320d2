"""Properties of the tensor codec: what is encoded comes back, and any input gives an array or an error."""

from __future__ import annotations

import math
import struct
import tracemalloc
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from tritonclient import utils as triton  # type: ignore[import-untyped]

from paceline.protos.datatypes import DATATYPES, Datatype
from paceline.protos.inference_pb2 import InferTensorContents
from paceline.protos.tensors import (
    TensorError,
    bf16_from_float32,
    decode_contents,
    decode_raw,
    encode_contents,
    encode_raw,
    float32_from_bf16,
)

BYTES = DATATYPES["BYTES"]
FIXED = [datatype for datatype in DATATYPES.values() if datatype.item_bytes]
TYPED_FIXED = [datatype for datatype in FIXED if datatype.contents_field]

datatypes = st.sampled_from(list(DATATYPES.values()))
shapes = st.lists(st.integers(0, 4), max_size=4)
# Dimensions that a hostile client would send beside harmless ones; any int64 fits on the wire.
wild_dims = st.one_of(
    st.integers(-2, 6), st.sampled_from([2**31, 2**32, 2**61, 2**63 - 1, -(2**63)]), st.integers(0, 70)
)
wild_shapes = st.one_of(st.lists(wild_dims, max_size=5), st.lists(st.just(1), min_size=60, max_size=70))
elements = st.one_of(st.binary(max_size=12), st.binary(min_size=250, max_size=260))


@st.composite
def fixed_tensors(draw: st.DrawFn) -> tuple[Datatype, list[int], bytes]:
    datatype, shape = draw(st.sampled_from(FIXED)), draw(shapes)
    size = math.prod(shape) * datatype.item_bytes
    data = draw(st.binary(min_size=size, max_size=size))
    return datatype, shape, bytes(byte & 1 for byte in data) if datatype.name == "BOOL" else data


@st.composite
def bytes_tensors(draw: st.DrawFn) -> tuple[list[int], list[bytes]]:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    return shape, draw(st.lists(elements, min_size=count, max_size=count))


def objects(values: list[Any], shape: list[int]) -> np.ndarray[Any, np.dtype[Any]]:
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)


@given(fixed_tensors())
def test_raw_fixed_size_bytes_come_back(tensor: tuple[Datatype, list[int], bytes]) -> None:
    datatype, shape, data = tensor
    decoded = decode_raw(data, datatype, shape)
    assert decoded.shape == tuple(shape)
    assert decoded.dtype == datatype.dtype
    assert not decoded.flags.writeable
    assert encode_raw(decoded, datatype) == data


@given(bytes_tensors())
def test_raw_bytes_elements_come_back_and_agree_with_tritonclient(tensor: tuple[list[int], list[bytes]]) -> None:
    shape, values = tensor
    array = objects(values, shape)
    data = encode_raw(array, BYTES)
    assert data == (triton.serialize_byte_tensor(array).item() if values else b"")
    decoded = decode_raw(data, BYTES, shape)
    assert decoded.shape == tuple(shape)
    assert decoded.ravel().tolist() == values
    assert triton.deserialize_bytes_tensor(data).tolist() == values


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=8))
def test_raw_text_agrees_with_tritonclient(values: list[str]) -> None:
    array = objects(values, [len(values)])
    assert encode_raw(array, BYTES) == (triton.serialize_byte_tensor(array).item() if values else b"")


@given(st.binary(max_size=64), datatypes, wild_shapes)
@example(b"\xff\xff\xff\xff", BYTES, [1])
@example(b"", DATATYPES["FP64"], [2**61, 0])
@example(b"\x02", DATATYPES["BOOL"], [1])
def test_decode_raw_any_input_gives_an_array_or_a_tensor_error(
    data: bytes, datatype: Datatype, shape: list[int]
) -> None:
    try:
        decoded = decode_raw(data, datatype, shape)
    except TensorError:
        return
    assert decoded.shape == tuple(shape)
    assert encode_raw(decoded, datatype) == data


@given(st.data(), bytes_tensors())
def test_decode_raw_damaged_bytes_gives_an_array_or_a_tensor_error(
    data: st.DataObject, tensor: tuple[list[int], list[bytes]]
) -> None:
    shape, values = tensor
    damaged = bytearray(encode_raw(objects(values, shape), BYTES))
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    try:
        decoded = decode_raw(bytes(damaged[:cut]), BYTES, shape)
    except TensorError:
        return
    assert encode_raw(decoded, BYTES) == bytes(damaged[:cut])


@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1)), max_size=40), st.binary(max_size=64), wild_shapes
)
def test_decode_raw_bytes_takes_no_more_memory_than_the_input_accounts_for(
    prefixes: list[int], tail: bytes, shape: list[int]
) -> None:
    data = b"".join(struct.pack("<I", prefix) for prefix in prefixes) + tail
    tracemalloc.start()
    try:
        decode_raw(data, BYTES, shape)
    except TensorError:
        pass
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 50_000 + 32 * len(data)


@st.composite
def contents(draw: st.DrawFn) -> InferTensorContents:
    filled = draw(st.lists(st.sampled_from(list(TYPED_VALUES)), max_size=2, unique=True))
    return InferTensorContents(**{field: draw(st.lists(TYPED_VALUES[field], max_size=6)) for field in filled})


TYPED_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool_contents": st.booleans(),
    "int_contents": st.integers(-(2**31), 2**31 - 1),
    "int64_contents": st.integers(-(2**63), 2**63 - 1),
    "uint_contents": st.integers(0, 2**32 - 1),
    "uint64_contents": st.integers(0, 2**64 - 1),
    "fp32_contents": st.floats(width=32),
    "fp64_contents": st.floats(),
    "bytes_contents": st.binary(max_size=6),
}


@given(contents(), datatypes, st.one_of(st.lists(st.integers(0, 6), max_size=1), wild_shapes))
def test_decode_contents_any_input_gives_an_array_or_a_tensor_error(
    message: InferTensorContents, datatype: Datatype, shape: list[int]
) -> None:
    try:
        decoded = decode_contents(message, datatype, shape)
    except TensorError:
        return
    assert decoded.shape == tuple(shape)
    assert decoded.dtype == datatype.dtype
    assert decoded.ravel().tolist() == getattr(message, str(datatype.contents_field)) or np.isnan(decoded).any()


@given(fixed_tensors())
def test_contents_fixed_size_values_come_back(tensor: tuple[Datatype, list[int], bytes]) -> None:
    datatype, shape, data = tensor
    if datatype not in TYPED_FIXED:
        return
    array = decode_raw(data, datatype, shape)
    message = InferTensorContents.FromString(encode_contents(array, datatype).SerializeToString())
    # NaNs come back as NaNs: a protobuf float goes through a C double, which may quiet them.
    np.testing.assert_array_equal(decode_contents(message, datatype, shape), array)


@given(bytes_tensors())
def test_contents_bytes_elements_come_back(tensor: tuple[list[int], list[bytes]]) -> None:
    shape, values = tensor
    message = encode_contents(objects(values, shape), BYTES)
    assert decode_contents(message, BYTES, shape).ravel().tolist() == values


@given(st.floats(width=32, allow_nan=False))
def test_bf16_from_float32_result_is_the_nearest_of_its_neighbours(value: float) -> None:
    pattern = int(bf16_from_float32(np.array([value], "<f4"))[0])
    sign, magnitude = pattern & 0x8000, pattern & 0x7FFF
    around = [sign | near for near in (magnitude - 1, magnitude, magnitude + 1) if 0 <= near <= 0x7F7F]
    distances = {near: abs(_exact(near) - value) for near in around}
    if magnitude == 0x7F80:  # infinity: the value is at least half a step above the largest finite one
        assert abs(value) >= _exact(0x7F7F) + (_exact(0x7F7F) - _exact(0x7F7E)) / 2
    else:
        assert distances[pattern] == min(distances.values())


def _exact(pattern: int) -> float:
    return float(float32_from_bf16(np.array([pattern], "<u2"))[0])
