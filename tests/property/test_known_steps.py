"""Steps of sequences that are read without parsing are what protobuf says, however their parameters are written."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends.spec import ModelSpec, SequenceSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.protos.wire import STEP_KEYS, delimited, scan_request, varint
from paceline.scheduler.errors import NoSequence
from paceline.server.codec.adapting_codec import codec_for
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.parameters import step_of
from paceline.server.codec.wire_request import AnyRequest, RequestReader, WireRequest
from paceline.server.errors import InvalidRequest, NotSupported, ServerError
from tests.lengths import LONG
from tests.wire import infer, rows_of_floats

_KEY, _VALUE, _TEXT = b"\x0a", b"\x12", b"\x1a"
_TENSORS = infer("", {"a": rows_of_floats(1)}).SerializeToString()

numbers = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 127, 128, 300, 2**63, 2**64 - 1])
overlong = st.sampled_from([b"\x80\x00", b"\xff\x80\x00", b"\x80" * 9 + b"\x02", b"\x80" * 10 + b"\x01", b"\x80", b""])
ids = st.one_of(
    st.builds(lambda number: b"\x10" + varint(number), numbers),
    st.builds(lambda text: delimited(_TEXT, text.encode()), st.text(max_size=4) | st.just("x" * 129)),
)
flags = st.sampled_from([b"\x08\x00", b"\x08\x01"])
odd_values = st.one_of(
    ids,
    flags,
    st.builds(lambda number: b"\x28" + varint(number), numbers),
    st.builds(lambda written: b"\x10" + written, overlong),
    st.builds(lambda text: delimited(_TEXT, text), st.binary(max_size=3)),
    st.sampled_from(
        [b"", b"\x08", b"\x08\x02", b"\x08\x7f", b"\x08\x80\x00", b"\x08\x01\x08\x00", b"\x10\x05\x08\x01"]
    ),
    st.just(b"\x21" + bytes(8)),
)


@st.composite
def entries(draw: st.DrawFn) -> bytes:
    """One parameter, as serializers write it or almost."""
    key = draw(st.sampled_from([*STEP_KEYS, *STEP_KEYS, "mine", ""])).encode()
    usual = ids if key == b"sequence_id" else flags
    fields = [delimited(_KEY, key), delimited(_VALUE, draw(usual if draw(st.integers(0, 3)) else odd_values))]
    if draw(st.integers(0, 9)) == 0:
        fields = draw(st.permutations(fields))
    if draw(st.integers(0, 9)) == 0:
        again = st.sampled_from(
            [delimited(_KEY, b"sequence_start"), delimited(_VALUE, b"\x08\x01"), b"\x18\x01", *fields]
        )
        fields = [*fields, draw(again)]
    elif draw(st.integers(0, 19)) == 0:
        fields = fields[: draw(st.integers(0, 1))]
    return delimited(b"\x22", b"".join(fields))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    head = pb.ModelInferRequest(model_name="m", id=draw(st.sampled_from(["", "a", "b", "cc"]))).SerializeToString()
    return head + b"".join(draw(st.lists(entries(), max_size=5))) + _TENSORS


def codec(*, steps: bool) -> ModelCodec:
    inputs, outputs = (TensorSpec("a", "FP32", (2,)),), (TensorSpec("x", "FP32", (2,)),)
    return codec_for("m", "1", ModelSpec(inputs, outputs, True, sequence=SequenceSpec() if steps else None), 4)


def outcome(codec: ModelCodec, request: AnyRequest) -> Any:
    try:
        group = codec.read(request)
    except (InvalidRequest, NotSupported, NoSequence) as error:
        return type(error), str(error)
    return group.steps, group.options.parameters, group.options.rows, group.inputs[0][0].tolist()  # type: ignore[union-attr]


@settings(max_examples=2_000 if LONG else 300)
@given(st.lists(requests(), min_size=1, max_size=6), st.booleans())
def test_step_is_what_protobuf_says_whatever_was_known_before(sent: list[bytes], steps: bool) -> None:
    reader, known = RequestReader(), codec(steps=steps)
    reader(infer("m", {"a": rows_of_floats(1)}).SerializeToString())
    for data in [*sent, *sent]:
        read = reader(data)
        try:
            message = pb.ModelInferRequest.FromString(data)
        except DecodeError:
            assert isinstance(read, InvalidRequest)
            continue
        assert not isinstance(read, ServerError | MemoryError)
        assert read.id == message.id
        if isinstance(read, WireRequest):
            assert read.step == step_of(message.parameters)
            assert dict(read.parameters) == {k: v for k, v in message.parameters.items() if k not in STEP_KEYS}
        assert outcome(known, read) == outcome(codec(steps=steps), message)


@given(numbers | st.text(max_size=128), st.booleans(), st.booleans(), st.permutations([*STEP_KEYS, "mine"]))
def test_step_as_clients_write_it_is_known(sequence: int | str, start: bool, end: bool, order: list[str]) -> None:
    if isinstance(sequence, str) and len(sequence.encode()) > 128:
        sequence = sequence[:32]
    value = b"\x10" + varint(sequence) if isinstance(sequence, int) else delimited(_TEXT, sequence.encode())
    values = dict(zip((*STEP_KEYS, "mine"), (value, b"\x08%c" % start, b"\x08%c" % end, b"\x08\x01"), strict=True))
    written = [delimited(b"\x22", delimited(_KEY, k.encode()) + delimited(_VALUE, values[k])) for k in order]
    fields = scan_request(b"\x0a\x01m" + b"".join(written) + _TENSORS)
    assert fields is not None
    assert fields.step is not None
    assert fields.step.values(b"\x0a\x01m" + b"".join(written) + _TENSORS) == (sequence, start, end)
    assert list(pb.ModelInferRequest.FromString(fields.signature).parameters) == ["mine"]


@pytest.mark.parametrize("other", [pb.InferParameter(bool_param=True), pb.InferParameter(double_param=1)])
def test_step_with_an_id_of_another_type_is_left_to_protobuf(other: pb.InferParameter) -> None:
    request = infer("m", {"a": rows_of_floats(1)}, parameters={"sequence_id": other})
    assert scan_request(request.SerializeToString()) is None
