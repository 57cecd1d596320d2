"""What is remembered of requests, so that later ones like them needn't be parsed, stays small whatever callers send."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.bounded_cache import BoundedCache
from paceline.server.codec.adapting_codec import codec_for
from paceline.server.codec.wire_request import RequestReader, WireRequest
from paceline.server.errors import InvalidRequest
from tests.rlimits import room_for
from tests.wire import infer, rows_of_floats

_PAGE_BYTES = 4_096
_HEAD_BYTES = 4_000
_MAX_BYTES = 40 * 2**20


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def many_inputs(number: int) -> bytes:
    """A request of 2000 inputs, two bytes each, that no model has."""
    return pb.ModelInferRequest(model_name=f"{number:04}").SerializeToString() + b"\x2a\x00" * (_HEAD_BYTES // 2)


def many_parameters(number: int) -> bytes:
    """A request that fits a model, with hundreds of parameters without a meaning."""
    own = pb.ModelInferRequest()
    own.parameters["number"].int64_param = number
    return _MODEL_AND_PARAMETERS + own.SerializeToString() + _TENSORS


_MODEL_AND_PARAMETERS = pb.ModelInferRequest(
    model_name="m", parameters={f"{key:x}": pb.InferParameter(bool_param=True) for key in range(350)}
).SerializeToString()
_TENSORS = pb.ModelInferRequest(
    inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 1])],
    raw_input_contents=[bytes(4)],
).SerializeToString()


@pytest.mark.parametrize("make", [many_inputs, many_parameters])
def test_hundreds_of_different_heads_take_little_memory(make: Callable[[int], bytes]) -> None:
    reader = RequestReader()
    codec = codec_for("m", "1", ModelSpec((TensorSpec("x", "FP32", (1,)),), (), batched=True), 4)
    before_bytes = rss_bytes()
    for number in range(600):
        data = make(number)
        first, again = reader(data), reader(data)
        assert isinstance(first, pb.ModelInferRequest)
        assert isinstance(again, WireRequest)
        if make is many_parameters:
            codec.read(again)
    assert rss_bytes() - before_bytes < _MAX_BYTES


def test_parameters_of_a_head_are_those_of_its_first_request() -> None:
    reader = RequestReader()
    reader(many_parameters(7))
    again = reader(many_parameters(7))
    assert isinstance(again, WireRequest)
    assert again.parameters == again.message().parameters
    assert not again.form.plain


@pytest.mark.parametrize("where", ["", "inputs", "outputs"])
def test_request_is_plain_if_neither_it_nor_any_of_its_tensors_has_parameters(where: str) -> None:
    message = infer("m", {"a": rows_of_floats(1), "b": rows_of_floats(1)}, outputs=["x", "y"])
    if where:
        getattr(message, where)[1].parameters["mine"].string_param = "here"
    reader = RequestReader()
    for _ in range(2):
        again = reader(message.SerializeToString())
    assert isinstance(again, WireRequest)
    assert again.form.plain is (not where)


@pytest.mark.parametrize("known", ["ab", "other"], ids=["of a known length", "of another length"])
def test_id_that_is_not_utf8_is_a_decode_error_whatever_is_known_of_the_head(known: str) -> None:
    reader = RequestReader()
    for _ in range(2):
        reader(infer("m", {"a": rows_of_floats(1)}, id=known).SerializeToString())
    good = infer("m", {"a": rows_of_floats(1)}, id="ab").SerializeToString()
    assert isinstance(reader(good.replace(b"ab", b"\xff\xfe")), InvalidRequest)


def test_heads_are_forgotten_when_they_are_many_or_large() -> None:
    few, large = BoundedCache[bytes, int](), BoundedCache[bytes, int]()
    for number in range(1_001):
        few.remember(b"%d" % number, number, 4)
    assert dict(few) == {b"1000": 1_000}
    for number in range(257):
        large.remember(b"%04096d" % number, number, 4_096)
    assert len(large) == 1
    large.remember(b"another", 1, 4_096)
    assert len(large) == 2


def test_request_without_room_for_its_copy_is_unread() -> None:
    """Another process has put it into memory that both see; protobuf needs bytes of its own."""
    data = memoryview(bytes(2**30))  # much more than what earlier tests give back meanwhile, and never filled
    with room_for(len(data) // 2):
        assert isinstance(RequestReader()(data), MemoryError)
