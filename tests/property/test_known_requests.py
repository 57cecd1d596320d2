"""Known requests aren't parsed, without any visible difference: same arrays, same answers, same errors."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.batching import Outputs, Share
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.protos.datatypes import DATATYPES, by_name
from paceline.protos.tensors import encode_raw
from paceline.server.codec.adapting_codec import codec_for
from paceline.server.codec.answers import Envelope
from paceline.server.codec.codec import ModelCodec, memory_bytes
from paceline.server.codec.known_requests import Group
from paceline.server.codec.wire_request import AnyMessage, RequestReader, WireRequest
from paceline.server.errors import InvalidRequest, RegionNotFound, ServerError
from paceline.server.memory.region_tensors import RegionTensor
from paceline.server.memory.regions import Regions
from paceline.server.memory.system_region import open_system_region
from paceline.server.rpc.handlers import serialized
from tests.codecs import encoded, encoded_as_message
from tests.property.wire_messages import parameters, texts
from tests.shared_objects import SharedObject, add_shared_input, held_by, request_shared_output, shared_object

Array = np.ndarray[Any, np.dtype[Any]]


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    def tensors(prefix: str) -> tuple[TensorSpec, ...]:
        kinds = draw(st.lists(st.sampled_from(list(DATATYPES)), min_size=1, max_size=3))
        return tuple(
            TensorSpec(
                f"{prefix}{number}",
                kind,
                tuple(draw(st.lists(st.sampled_from([-1, 0, 1, 3]), max_size=2))),
                optional=prefix == "i" and number > 0 and draw(st.booleans()),
            )
            for number, kind in enumerate(kinds)
        )

    return ModelSpec(tensors("i"), tensors("o"), batched=draw(st.booleans()))


def some(draw: st.DrawFn, tensor: TensorSpec, shape: Sequence[int]) -> Array:
    datatype, count = by_name(tensor.datatype), int(np.prod(shape))
    if not datatype.item_bytes:
        words = draw(st.lists(st.binary(max_size=4), min_size=count, max_size=count))
        return np.fromiter(words, np.dtype(object), count).reshape(shape)
    size = count * datatype.item_bytes
    data = draw(st.binary(min_size=size, max_size=size))
    if datatype.name == "BOOL":
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, datatype.dtype).reshape(shape)


def shape_of(draw: st.DrawFn, tensor: TensorSpec, rows: int, spec: ModelSpec) -> tuple[int, ...]:
    dims = [draw(st.integers(0, 3)) if dim == -1 else dim for dim in tensor.dims]
    return (rows, *dims) if spec.batched else tuple(dims)


def outcome(codec: ModelCodec, request: AnyMessage) -> Group | str:
    try:
        return codec.read(request)
    except InvalidRequest as error:
        return str(error)


def apart_from_inputs(decoded: Group) -> Any:
    size_bytes = sum(map(memory_bytes, decoded.inputs[0]))
    assert decoded.options.size_bytes in (-1, size_bytes)
    return replace(decoded.options, size_bytes=size_bytes), decoded.targets[0]


def assert_same(one: Group | str, other: Group | str) -> None:
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    assert apart_from_inputs(one) == apart_from_inputs(other)
    for left, right in zip(one.inputs[0], other.inputs[0], strict=True):
        assert type(left) is type(right)
        if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
            assert (left.dtype, left.shape) == (right.dtype, right.shape)
            assert left.tolist() == right.tolist() if left.dtype == object else left.tobytes() == right.tobytes()


@given(st.data())
def test_known_requests_are_answered_like_the_first(data: st.DataObject) -> None:
    draw = data.draw
    spec = draw(models())
    rows = draw(st.integers(1, 3)) if spec.batched else 1
    shapes = [shape_of(draw, tensor, rows, spec) for tensor in spec.inputs]
    given_inputs = [n for n, tensor in enumerate(spec.inputs) if not tensor.optional or draw(st.booleans())]
    wanted = draw(st.lists(st.sampled_from([t.name for t in spec.outputs]), unique=True, max_size=2))
    told = draw(parameters.filter(lambda some: len(some) < 2))  # if two are wrong, either may be named
    reader, codec = RequestReader(), codec_for("m", "3", spec, 4 if spec.batched else 0)
    for number in range(4):
        message = pb.ModelInferRequest(model_name="m", id=draw(texts), parameters=told)
        for index in draw(st.permutations(given_inputs)) if number == 0 else given_inputs:
            tensor = spec.inputs[index]
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shapes[index])
            raw = encode_raw(some(draw, tensor, shapes[index]), by_name(tensor.datatype))
            if draw(st.integers(0, 9)) == 0:
                raw = draw(st.binary(max_size=8))
            message.raw_input_contents.append(raw)
        if draw(st.integers(0, 9)) == 0:
            message.raw_input_contents.append(b"")
        for name in wanted:
            message.outputs.add(name=name)
        sent = message.SerializeToString()
        read = reader(memoryview(sent) if draw(st.booleans()) else sent)  # in other processes' memory, or not
        assert not isinstance(read, ServerError)
        fresh = codec_for("m", "3", spec, 4 if spec.batched else 0)
        decoded, expected = outcome(codec, read), outcome(fresh, message)
        assert_same(decoded, expected)
        if isinstance(decoded, str) or isinstance(expected, str):
            continue
        results = tuple(some(draw, tensor, shape_of(draw, tensor, rows, spec)) for tensor in spec.outputs)
        answer = serialized(encoded(codec, read, decoded, results))
        whole = encoded_as_message(fresh, message, expected, results)
        assert pb.ModelInferResponse.FromString(answer) == whole
        if spec.batched and not any(one.shape_tensor for one in spec.outputs):
            share = among_others(draw, results, rows)
            answer = serialized(encoded(codec, read, decoded, share))
            assert pb.ModelInferResponse.FromString(answer) == whole
            packed = encoded(codec, read, decoded, share, IN_STREAM)
            if isinstance(packed, bytes):
                assert pb.ModelStreamInferResponse.FromString(packed).infer_response == with_more(whole)


MORE = pb.ModelInferResponse(parameters={"p": pb.InferParameter(bool_param=True)})
IN_STREAM = Envelope(b"\x12", MORE.SerializeToString())


def with_more(response: Any) -> pb.ModelInferResponse:
    whole = pb.ModelInferResponse.FromString(serialized(response))
    whole.parameters["p"].bool_param = True
    return whole


def among_others(draw: Any, results: Sequence[Array], rows: int) -> Share:
    """The same results as a request's share of a larger batch."""
    before, behind = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    outputs = Outputs([np.concatenate([one[:1]] * before + [one] + [one[:1]] * behind) for one in results])
    return Share(outputs, before, before + rows)


def floats(*values: float, shape: Sequence[int] = (1, 2), request_id: str = "") -> bytes:
    message = pb.ModelInferRequest(model_name="m", id=request_id)
    message.inputs.add(name="x", datatype="FP32", shape=shape)
    message.raw_input_contents.append(struct.pack(f"<{len(values)}f", *values))
    return message.SerializeToString()


def float_codec() -> ModelCodec:
    return ModelCodec("m", "1", ModelSpec((TensorSpec("x", "FP32", (2,)),), (TensorSpec("y", "FP32", (2,)),), True), 8)


def test_third_request_needs_no_message_or_copy() -> None:
    reader, codec = RequestReader(), float_codec()
    assert isinstance(reader(floats(1, 2)), pb.ModelInferRequest)
    for number in range(3):
        data = floats(number, 7, request_id=f"r{number}")
        request = reader(data)
        assert isinstance(request, WireRequest)
        decoded = codec.read(request)
        assert decoded.inputs[0][0].tolist() == [[number, 7]]  # type: ignore[union-attr]
        answer = encoded(codec, request, decoded, (np.full((1, 2), number, "<f4"),))
        assert not isinstance(answer, pb.ModelInferResponse)
        parsed = pb.ModelInferResponse.FromString(answer)
        assert (parsed.id, parsed.model_name, list(parsed.outputs[0].shape)) == (f"r{number}", "m", [1, 2])
        in_stream = pb.ModelStreamInferResponse.FromString(IN_STREAM.around((answer,)))
        assert in_stream.infer_response == with_more(parsed)
    array = decoded.inputs[0][0]
    assert isinstance(array, np.ndarray)
    assert array.base is data
    assert not array.flags.writeable


def test_number_of_remembered_signatures_is_bounded() -> None:
    reader, codec = (
        RequestReader(),
        ModelCodec("m", "1", ModelSpec((TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),), True), 8),
    )
    for size in range(2_500):
        for _ in range(2):
            request = reader(floats(*([0.0] * size), shape=(1, size)))
            assert not isinstance(request, ServerError)
            encoded(codec, request, codec.read(request), (np.zeros((1, size), "<f4"),))
    assert len(reader._known) <= 1_000
    assert len(codec._known._plans) <= 1_000
    assert len(codec._known._layouts) <= 1_000
    assert len(codec._answers._plans) <= 1_000


def test_number_of_remembered_id_lengths_is_bounded() -> None:
    reader, codec = RequestReader(), float_codec()
    for length in range(200):
        for _ in range(3):
            request = reader(floats(1, 2, request_id="i" * length))
            assert not isinstance(request, ServerError)
            answer = encoded(codec, request, codec.read(request), (np.zeros((1, 2), "<f4"),))
            assert pb.ModelInferResponse.FromString(serialized(answer)).id == "i" * length
    (plan,) = codec._answers._plans.values()
    assert len(plan.starts) == 64


def test_known_request_with_non_utf8_id_is_refused() -> None:
    reader = RequestReader()
    reader(floats(1, 2, request_id="ab"))
    good = floats(1, 2, request_id="ab")
    assert isinstance(reader(good), WireRequest)
    assert isinstance(reader(good.replace(b"ab", b"\xff\xfe")), InvalidRequest)


def test_known_signature_refuses_contents_beside_raw_ones() -> None:
    reader, codec = RequestReader(), float_codec()
    both = pb.ModelInferRequest.FromString(floats(1, 2))
    both.inputs[0].contents.fp32_contents.extend((3, 4))
    typed = pb.ModelInferRequest.FromString(both.SerializeToString())
    typed.ClearField("raw_input_contents")
    for _ in range(3):
        request = reader(both.SerializeToString())
        assert not isinstance(request, ServerError)
        with pytest.raises(InvalidRequest, match="expected either contents or raw_input_contents"):
            codec.read(request)
        request = reader(typed.SerializeToString())
        assert not isinstance(request, ServerError)
        assert content_of(codec.read(request).inputs[0][0])[-1] == [[3, 4]]


def test_results_of_any_memory_layout_are_answered() -> None:
    reader, codec = RequestReader(), float_codec()
    reader(floats(1, 2))
    request = reader(floats(1, 2))
    assert isinstance(request, WireRequest)
    decoded = codec.read(request)
    for result in (np.array([[1, 2]], ">f4"), np.array([[1, 9, 2, 9]], "<f4")[:, ::2]):
        answer = pb.ModelInferResponse.FromString(serialized(encoded(codec, request, decoded, (result,))))
        assert answer.raw_output_contents[0] == struct.pack("<2f", 1, 2)


REGION_BYTES, CUT_BYTES = 256, 64


def register(regions: Regions, memory: SharedObject, change: str) -> None:
    """Bring the region `r` into the state `change`. "cut short" shrinks its memory while it stays registered."""
    memory.resize(CUT_BYTES if change == "cut short" else REGION_BYTES)
    if change == "cut short":
        return
    regions.clear()
    if change != "gone":
        regions.add(open_system_region("r", memory.key, 0, CUT_BYTES if change == "smaller" else REGION_BYTES))


def settled(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (InvalidRequest, RegionNotFound) as error:
        return f"{type(error).__name__}: {error}"


def content_of(one: Array | RegionTensor) -> tuple[Any, ...]:
    array = one
    if isinstance(one, RegionTensor):
        array = np.empty(one.shape, one.dtype)
        one.read_into(array)
    return type(one), array.dtype, array.shape, array.tolist()


def outcome_of(
    codec: ModelCodec, request: AnyMessage, result: Array, memory: SharedObject, encode: Callable[..., Any]
) -> list[Any]:
    """What happens to a request that isn't stacked: its inputs, all else that is read, the answer, the memory then."""
    decoded = settled(lambda: codec.read(request))
    if isinstance(decoded, str):
        return [decoded]
    inputs = [settled(lambda one=one: content_of(one)) for one in decoded.inputs[0]]
    answer = settled(lambda: serialized(encode(codec, request, decoded, (result,))))
    if isinstance(answer, bytes):
        answer = pb.ModelInferResponse.FromString(answer)
    return [inputs, apart_from_inputs(decoded), answer, memory.get(REGION_BYTES)]


CONTENTS = {
    "FP32": struct.pack("<2f", 1, 2),
    "BYTES": struct.pack("<I1sI1s", 1, b"a", 1, b"b"),
    "BOOL": b"\0\1",
}


@given(
    kind=st.sampled_from(sorted(CONTENTS)),
    input_at=st.none() | st.sampled_from([0, 8, 100, 250, 256]),
    output_at=st.none() | st.sampled_from([0, 40, 200]),
    output_bytes=st.sampled_from([7, 8, 16, 300]),
    changes=st.lists(st.sampled_from(["as it was", "gone", "smaller", "cut short"]), min_size=3, max_size=6),
)
def test_known_requests_in_shared_memory_equal_the_first(
    kind: str, input_at: int | None, output_at: int | None, output_bytes: int, changes: list[str]
) -> None:
    inputs = (TensorSpec("x", kind, (2,)), TensorSpec("z", "INT8", (1,)))
    spec = ModelSpec(inputs, (TensorSpec("y", "FP32", (2,)),), True)
    content, regions, reader = CONTENTS[kind], Regions(4), RequestReader()
    codec = ModelCodec("m", "1", spec, 8, regions=regions)
    with shared_object(REGION_BYTES) as memory:
        for number, change in enumerate(("as it was", "as it was", *changes)):
            register(regions, memory, change)
            message = pb.ModelInferRequest(model_name="m", id=str(number))
            if input_at is None:
                message.inputs.add(name="x", datatype=kind, shape=(1, 2))
                message.raw_input_contents.append(content)
            else:
                add_shared_input(message, "x", kind, (1, 2), "r", len(content), input_at)
            message.inputs.add(name="z", datatype="INT8", shape=(1, 1))
            message.raw_input_contents.append(bytes([number]))
            if output_at is not None:
                request_shared_output(message, "y", "r", output_bytes, output_at)
            read = reader(message.SerializeToString())
            assert not isinstance(read, ServerError)
            assert isinstance(read, WireRequest) == (number > 0)
            ways = []
            fresh = ModelCodec("m", "1", spec, 8, regions=regions)
            for one, asked, encode in ((codec, read, encoded), (fresh, message, encoded_as_message)):
                there = CUT_BYTES if change == "cut short" else REGION_BYTES
                memory.put(bytes(there))  # both ways find the same, though the first may have overwritten it
                memory.put(content[: max(0, there - (input_at or 0))], input_at or 0)
                ways.append(outcome_of(one, asked, np.array([[number, 5]], "<f4"), memory, encode))
            assert ways[0] == ways[1]


def test_third_shared_memory_request_needs_no_message() -> None:
    regions, reader = Regions(4), RequestReader()
    spec = ModelSpec((TensorSpec("x", "FP32", (2,)),), (TensorSpec("y", "FP32", (2,)),), True)
    codec = ModelCodec("m", "1", spec, 8, regions=regions)
    with shared_object(REGION_BYTES) as memory:
        regions.add(open_system_region("r", memory.key, 0, REGION_BYTES))
        for number in range(3):
            message = pb.ModelInferRequest(model_name="m", id=str(number))
            add_shared_input(message, "x", "FP32", (1, 2), "r", 8)
            request_shared_output(message, "y", "r", 8, 8)
            request = reader(message.SerializeToString())
            assert not isinstance(request, ServerError)
            decoded = codec.read(request)
            answer = encoded(codec, request, decoded, (np.array([[number, 5]], "<f4"),))
        assert isinstance(request, WireRequest)
        assert request.form.signature in codec._known._plans
        assert not isinstance(answer, pb.ModelInferResponse)
        assert memory.get(8, 8) == struct.pack("<2f", 2, 5)
        regions.clear()
        del request, decoded
        assert held_by(key=memory.key) == (1, 0)  # that of the test: no plan keeps a region open


def test_signatures_that_contain_tensors_are_not_remembered() -> None:
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=(1, 2)).contents.fp32_contents.extend([1, 2])
    reader = RequestReader()
    assert all(isinstance(reader(message.SerializeToString()), pb.ModelInferRequest) for _ in range(3))
    assert not reader._known
