"""Which requests are known and form a group: they are read in one step, with the same result as one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.backends.batching import Outputs, Packed, Share
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.codec.answers import AnswerPlans, Envelope
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.known_requests import Group
from paceline.server.codec.parameters import NO_PARAMETERS, RequestOptions
from paceline.server.codec.wire_request import AnyMessage, RequestReader, WireRequest
from paceline.server.errors import InvalidRequest
from paceline.server.limits import LARGEST_MESSAGE_BYTES
from paceline.server.memory.cuda_region import CudaRegions
from paceline.server.memory.region_tensors import RegionTensor
from paceline.server.memory.regions import Regions
from paceline.server.memory.system_region import open_system_region
from paceline.server.rpc.handlers import serialized
from tests.codecs import encoded
from tests.shared_objects import SharedObject, add_shared_input, request_shared_output, shared_object
from tests.unit.backends.cuda.fake_driver import HANDLE, Driver
from tests.wire import bytes_element, infer, rows_of_floats

INPUTS = TensorSpec("a", "FP32", (-1, -1)), TensorSpec("t", "BOOL", (1,))
OUTPUTS = TensorSpec("x", "FP32", (-1, -1)), TensorSpec("y", "FP32", (-1, -1))
SPEC = ModelSpec(INPUTS, OUTPUTS, batched=True)
FLOATS = ModelSpec(INPUTS[:1], OUTPUTS, batched=True)


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(256) as made:
        yield made


@pytest.fixture
def regions(memory: SharedObject) -> Regions:
    made = Regions(limit=8)
    for number in range(4):
        made.add(open_system_region(f"r{number}", memory.key, 0, 256))
    return made


class Sender:
    """A codec and the requests that it has learned."""

    def __init__(self, spec: ModelSpec, regions: Regions | None = None) -> None:
        self.codec = ModelCodec("m", "1", spec, 8, regions=regions)
        self.read = RequestReader()

    def learned(self, message: pb.ModelInferRequest) -> AnyMessage:
        data = message.SerializeToString()
        for _ in range(3):
            read = self.read(data)
            assert not isinstance(read, Exception)
            self.codec.read(read)
        return read

    def group(self, *requests: AnyMessage) -> Group | None:
        """As many of the first requests as are known and ask for the same; None if the first one has to be parsed."""
        first, *more = requests
        assert isinstance(first, WireRequest)
        return self.codec._known.read(first, more)

    def together(self, *requests: AnyMessage) -> int:
        """How many those are."""
        found = self.group(*requests)
        return len(found.inputs) if found is not None else 0


def _message(shape: Sequence[int] = (1, 2, 3), outputs: str = "", **parameters: int) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="a", datatype="FP32", shape=shape)
    message.raw_input_contents.append(np.ones(shape, np.float32).tobytes())
    for name in outputs:
        message.outputs.add(name=name)
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    return message


def _in_region(region: str, target: str = "", offset: int = 0) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m")
    add_shared_input(message, "a", "FP32", [1, 2, 3], region, 24, offset)
    if target:
        request_shared_output(message, "x", target, 24)
    return message


def test_messages_that_ask_for_the_same_are_a_group() -> None:
    sender = Sender(FLOATS)
    one = sender.learned(_message())
    assert sender.together(one, one, one) == 3
    described = _message()
    described.parameters["mine"].string_param = "another signature"
    assert sender.together(one, sender.learned(described), one) == 3


@pytest.mark.parametrize(
    "other",
    [_message((2, 2, 3)), _message((1, 3, 2)), _message(outputs="y"), _message(outputs="yx"), _message(priority=1)],
    ids=["rows", "shape", "an output", "order of outputs", "priority"],
)
def test_request_for_something_else_ends_the_group(other: pb.ModelInferRequest) -> None:
    sender = Sender(FLOATS)
    one, another = sender.learned(_message()), sender.learned(other)
    assert sender.together(one, one, another, one) == 2
    assert sender.together(another, one) == 1


def test_request_with_tensors_of_the_wrong_length_ends_the_group() -> None:
    sender = Sender(FLOATS)
    one, short = sender.learned(_message()), _message()
    short.raw_input_contents[0] = b"1234"
    odd = sender.read(short.SerializeToString())
    assert not isinstance(odd, Exception)
    assert sender.together(one, odd, one) == 1
    assert sender.together(odd, one) == 0


@pytest.mark.parametrize("wish", ["classification", "binary_data_output", "paceline_batch_info"])
def test_request_for_more_than_raw_outputs_gets_it_however_often_it_is_repeated(wish: str) -> None:
    message = _message(outputs="x")
    if wish == "classification":
        message.outputs[0].parameters[wish].int64_param = 1
    else:
        message.parameters[wish].bool_param = wish == "paceline_batch_info"
    sender, results = Sender(FLOATS), (np.array([[[1, 5, 3]]], np.float32),) * 2
    first = encoded(sender.codec, message, sender.codec.read(message), results)
    wants = sender.learned(message)
    assert isinstance(wants, WireRequest)
    assert encoded(sender.codec, wants, sender.codec.read(wants), results) == first  # a message: more is added to it


def test_request_not_yet_learned_ends_the_group() -> None:
    sender = Sender(FLOATS)
    one, message = sender.learned(_message()), _message((1, 3, 2))
    new = [sender.read(message.SerializeToString()) for _ in range(2)][1]
    assert isinstance(new, WireRequest)
    assert sender.together(one, new, one) == 1
    assert sender.together(new, one) == 0


def test_tensor_offsets_are_found_again_when_the_model_has_another_order_of_inputs() -> None:
    """As after a reload: the requests are the same, but the notes about them are about the previous model."""
    pair = TensorSpec("a", "FP32", (2,)), TensorSpec("b", "FP32", (2,))
    before, after = (Sender(ModelSpec(inputs, OUTPUTS, batched=True)) for inputs in (pair, pair[::-1]))
    after.read = before.read
    message = infer("m", {"a": rows_of_floats(1), "b": rows_of_floats(1, first=5)})
    request = before.learned(message)
    assert _values(before, request) == [[[0, 1]], [[5, 6]]]
    after.learned(message)
    assert _values(after, request) == [[[5, 6]], [[0, 1]]]
    assert _values(before, request) == [[[0, 1]], [[5, 6]]]


def _values(sender: Sender, request: AnyMessage) -> list[object]:
    """The values of a request's inputs, the same whether it is decoded with one like it or alone."""
    found = sender.group(request, request)
    assert found is not None
    _, inputs = ([tensor.tolist() for tensor in inputs] for inputs in found.inputs)
    alone = sender.codec.read(request).inputs[0]
    assert inputs == [tensor.tolist() for tensor in alone]  # type: ignore[union-attr]
    return inputs


def test_texts_that_must_be_utf8_are_checked_each_time() -> None:
    sender = Sender(ModelSpec((TensorSpec("a", "BYTES", (1,), utf8=True),), OUTPUTS, batched=True))
    sender.learned(infer("m", {"a": np.array([[b"good"]], object)}))
    bad = sender.read(infer("m", {"a": np.array([[b"\xff\xfe\xff\xfe"]], object)}).SerializeToString())
    assert isinstance(bad, WireRequest)
    with pytest.raises(InvalidRequest, match="expected UTF-8 text"):
        sender.codec.read(bad)


def test_texts_too_short_for_their_lengths_are_refused_each_time() -> None:
    sender = Sender(ModelSpec((TensorSpec("a", "BYTES", (1,)),), OUTPUTS, batched=True))
    message = infer("m", {"a": np.array([[b"good"]], object)})
    sender.learned(message)
    message.raw_input_contents[0] = b""
    bad = sender.read(message.SerializeToString())
    assert isinstance(bad, WireRequest)
    with pytest.raises(InvalidRequest, match="input 'a': expected at least 4 bytes for the lengths"):
        sender.codec.read(bad)


@pytest.mark.parametrize("outputs", ["x", "xy"])
def test_answers_from_shares_of_several_batches_have_the_rows_of_each_share(outputs: str) -> None:
    spec = ModelSpec((TensorSpec("a", "FP32", (2,)),), tuple(TensorSpec(one, "FP32", (2,)) for one in outputs), True)
    sender = Sender(spec)
    for start, stop in ((1, 2), (0, 3), (0, 1), (1, 2)):
        request = sender.learned(infer("m", {"a": rows_of_floats(stop - start)}))
        batch = [rows_of_floats(3, first=first) for first in range(len(outputs))]
        share = Share(Outputs(batch), start, stop)
        answer = pb.ModelInferResponse.FromString(
            serialized(encoded(sender.codec, request, sender.codec.read(request), share))
        )
        assert [list(one.shape) for one in answer.outputs] == [[stop - start, 2]] * len(outputs)
        assert list(answer.raw_output_contents) == [one[start:stop].tobytes() for one in batch]


@pytest.mark.parametrize("of_a_batch", [False, True])
def test_answers_can_have_texts_beside_numbers(of_a_batch: bool) -> None:
    outputs = TensorSpec("x", "FP32", (2,)), TensorSpec("y", "BYTES", (1,))
    sender = Sender(ModelSpec((TensorSpec("a", "FP32", (2,)),), outputs, batched=True))
    request = sender.learned(infer("m", {"a": rows_of_floats(1)}))
    batch = rows_of_floats(2), np.array([[b"no"], [b"yes"]], object)
    results = Share(Outputs(batch), 1, 2) if of_a_batch else tuple(one[1:] for one in batch)
    answer = pb.ModelInferResponse.FromString(
        serialized(encoded(sender.codec, request, sender.codec.read(request), results))
    )
    assert list(answer.raw_output_contents) == [rows_of_floats(2)[1:].tobytes(), bytes_element(b"yes")]


def test_remembered_request_options_are_bounded() -> None:
    sender = Sender(FLOATS)
    for priority in range(1_100):
        sender.learned(_message(priority=priority))
    assert len(sender.codec._known._options) < 1_100
    one = sender.learned(_message(priority=1_099))
    assert sender.together(one, one) == 2


def test_request_with_values_to_check_is_known_but_alone() -> None:
    sender = Sender(SPEC)
    message = _message()
    message.inputs.add(name="t", datatype="BOOL", shape=[1, 1])
    message.raw_input_contents.append(b"\1")
    looked_at = sender.learned(message)
    assert sender.together(looked_at, looked_at) == 1


def test_requests_in_shared_memory_are_a_group_whatever_their_regions(regions: Regions) -> None:
    sender = Sender(FLOATS, regions)
    requests = [sender.learned(_in_region(f"r{number}", f"r{number}", 8 * number)) for number in range(4)]
    found = sender.group(*requests)
    assert found is not None
    for request, inputs, targets in zip(requests, found.inputs, found.targets, strict=True):
        alone = sender.codec.read(request)
        assert alone.options is found.options
        assert targets == alone.targets[0]
        (tensor,), (expected,) = inputs, alone.inputs[0]
        assert isinstance(tensor, RegionTensor)
        assert isinstance(expected, RegionTensor)
        assert (tensor.place, tensor.region, tensor.shape) == (expected.place, expected.region, expected.shape)
    assert found.options.size_bytes == 24


def test_requests_in_messages_and_in_shared_memory_are_a_group_if_they_ask_for_the_same(regions: Regions) -> None:
    sender = Sender(FLOATS, regions)
    answered_there = _message(outputs="xy")
    request_shared_output(answered_there, "x", "r1", 24)
    del answered_there.outputs[0]
    requests = [sender.learned(one) for one in (_message(outputs="yx"), answered_there, _in_region("r0"))]
    assert sender.together(*requests[:2]) == 2
    found = sender.group(requests[1])
    assert found is not None
    assert [type(inputs) for inputs in found.inputs] == [Packed]
    assert [[*targets] for targets in found.targets] == [[0]]
    assert sender.together(requests[2], sender.learned(_message()), requests[2]) == 3


def test_request_whose_memory_has_been_truncated_is_refused_naming_the_input(
    regions: Regions, memory: SharedObject
) -> None:
    sender = Sender(FLOATS, regions)
    (tensor,) = sender.codec.read(sender.learned(_in_region("r1"))).inputs[0]
    assert isinstance(tensor, RegionTensor)
    memory.resize(0)
    with pytest.raises(InvalidRequest, match=r"^model 'm': input 'a': shared memory region 'r1'"):
        tensor.read_into(np.empty(tensor.shape, tensor.dtype))


def test_request_in_a_removed_region_ends_the_group(regions: Regions) -> None:
    sender = Sender(FLOATS, regions)
    requests = [sender.learned(_in_region(f"r{number}")) for number in range(4)]
    regions.remove("system", "r2")
    assert sender.together(*requests) == 2
    assert sender.together(*requests[2:]) == 0
    assert sender.together(*requests[3:]) == 1


def test_requests_with_outputs_on_a_gpu_are_a_group_too(regions: Regions) -> None:
    regions.add(CudaRegions(Driver(size=100).load).open("gpu", HANDLE, 0, 100))
    sender = Sender(FLOATS, regions)
    host, gpu = sender.learned(_in_region("r0", "r1")), sender.learned(_in_region("r0", "gpu"))
    assert sender.together(host, gpu, host) == 3


@pytest.mark.parametrize("envelope", [None, Envelope(b"\x12", b"")])
def test_answers_leave_room_in_a_message_for_their_envelope(envelope: Envelope | None) -> None:
    plans = AnswerPlans("m", "1", ModelSpec((), (TensorSpec("x", "UINT8", (-1,)),), batched=False))
    options = RequestOptions(1, (), (0,), NO_PARAMETERS)

    def answer(size_bytes: int) -> bytes | None:
        results = (np.empty(size_bytes, np.uint8),)
        request = SimpleNamespace(message=infer("m"), options=options, value=results, targets={}, envelope=envelope)
        return b"".join(plans.pieces([request])[0])

    if envelope is not None:
        assert answer(LARGEST_MESSAGE_BYTES - 2**11)
    # By itself it would be a few bytes shorter than the longest message.
    assert not answer(LARGEST_MESSAGE_BYTES - 50)
