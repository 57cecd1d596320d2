"""Steps of sequences that are read without parsing are what protobuf says, however their parameters are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
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
from paceline.server.codec.wire_request import AnyMessage, RequestReader, WireRequest
from paceline.server.errors import InvalidRequest, NotSupported, ServerError
from tests.lengths import LONG
from tests.wire import infer, rows_of_floats

_KEYS = (*STEP_KEYS, "mine")
_TENSORS = infer("", {"a": rows_of_floats(1)}).SerializeToString()

FALSE, TRUE = b"\x08\x00", b"\x08\x01"
ODD_VALUES = [
    b"", b"\x08", b"\x08\x02", b"\x08\x7f", b"\x08\x80\x00", b"\x08\x80\x01", b"\x08\x01\x08\x00", b"\x10\x05\x08\x01",
    FALSE, TRUE, b"\x10", b"\x10\x80", b"\x10\x80\x00", b"\x10\x85\x80\x00", b"\x10" + b"\x80" * 9 + b"\x02",
    b"\x10" + b"\x80" * 10 + b"\x01", b"\x10\x05\x10\x06", b"\x28\x05", b"\x28" + b"\xff" * 9 + b"\x01", b"\x1a\x00",
    b"\x1a\x01a", b"\x1a\x02a", b"\x1a\x01ab", b"\x1a\x02\xc3\x28", b"\x1a\x80\x01" + b"x" * 128,
    b"\x1a\x81\x01" + b"x" * 129, b"\x21" + bytes(8), b"\x18\x01", b"\x2a\x00",
]  # fmt: skip


def key_field(key: str) -> bytes:
    return delimited(b"\x0a", key.encode())


def value_field(value: bytes) -> bytes:
    return delimited(b"\x12", value)


def entry(*fields: bytes) -> bytes:
    return delimited(b"\x22", b"".join(fields))


def request(entries: Iterable[bytes], request_id: str = "") -> bytes:
    head = pb.ModelInferRequest(model_name="m", id=request_id).SerializeToString()
    return head + b"".join(entries) + _TENSORS


def odd_entries(key: str) -> Iterable[bytes]:
    """Parameters that aren't as serializers write them, or aren't what they should be."""
    usual = value_field(b"\x10\x07" if key == "sequence_id" else TRUE)
    named = key_field(key)
    yield from (entry(named, value_field(odd)) for odd in ODD_VALUES)
    yield from (entry(usual, named), entry(named), entry(usual), entry())
    others = [*map(key_field, _KEYS), value_field(FALSE), value_field(b"\x10\x08"), b"\x18\x01"]
    for other in others:
        yield from (entry(named, usual, other), entry(other, named, usual), entry(named, other, usual))


def codec(*, steps: bool) -> ModelCodec:
    inputs, outputs = (TensorSpec("a", "FP32", (2,)),), (TensorSpec("x", "FP32", (2,)),)
    return codec_for("m", "1", ModelSpec(inputs, outputs, True, sequence=SequenceSpec() if steps else None), 4)


def outcome(codec: ModelCodec, request: AnyMessage) -> Any:
    try:
        group = codec.read(request)
    except (InvalidRequest, NotSupported, NoSequence) as error:
        return type(error), str(error)
    (array,) = group.inputs[0]
    assert not isinstance(array, bytes)
    return group.steps, group.options.parameters, group.options.rows, array.shape


def assert_read_as_parsed(sent: Sequence[bytes], *, steps: bool) -> None:
    """Each of the requests, read after those before it and then once more, is what protobuf says it is."""
    reader, known = RequestReader(), codec(steps=steps)
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


@pytest.mark.parametrize("key", _KEYS)
@pytest.mark.parametrize("steps", [False, True], ids=["one-shot", "sequences"])
def test_odd_parameter_is_what_protobuf_says(key: str, steps: bool) -> None:
    step = entry(key_field("sequence_id"), value_field(b"\x10\x05"))
    first = entry(key_field("sequence_start"), value_field(TRUE))
    for odd in odd_entries(key):
        for entries in ([odd], [step, odd], [odd, step], [first, odd, step]):
            assert_read_as_parsed([request([]), request([first, step]), request(entries)], steps=steps)


numbers = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 127, 128, 300, 2**63, 2**64 - 1])
ids = st.one_of(
    st.builds(lambda number: b"\x10" + varint(number), numbers),
    st.builds(lambda text: delimited(b"\x1a", text.encode()), st.text(max_size=4)),
)
values = {"sequence_id": ids, **dict.fromkeys(_KEYS[1:], st.sampled_from([FALSE, TRUE]))}


@st.composite
def steps_of_sequences(draw: st.DrawFn) -> bytes:
    keys = draw(st.lists(st.sampled_from(_KEYS), unique=True))
    written = [entry(key_field(key), value_field(draw(values[key]))) for key in keys]
    if draw(st.integers(0, 3)) == 0:
        odd = st.sampled_from([*odd_entries(draw(st.sampled_from(_KEYS)))])
        written.insert(draw(st.integers(0, len(written))), draw(odd))
    return request(written, draw(st.sampled_from(["", "a", "b", "cc"])))


@settings(max_examples=2_000 if LONG else 200)
@given(st.lists(steps_of_sequences(), min_size=1, max_size=6), st.booleans())
def test_step_is_what_protobuf_says_whatever_was_known_before(sent: list[bytes], steps: bool) -> None:
    assert_read_as_parsed([request([]), *sent], steps=steps)


@given(numbers | st.text(max_size=32), st.booleans(), st.booleans(), st.permutations(_KEYS))
def test_step_as_clients_write_it_is_known(sequence: int | str, start: bool, end: bool, order: list[str]) -> None:
    wanted = b"\x10" + varint(sequence) if isinstance(sequence, int) else delimited(b"\x1a", sequence.encode())
    told = dict(zip(_KEYS, (wanted, b"\x08%c" % start, b"\x08%c" % end, TRUE), strict=True))
    data = request(entry(key_field(key), value_field(told[key])) for key in order)
    fields = scan_request(data)
    assert fields is not None
    assert fields.step is not None
    assert fields.step.values(data) == fields.step.values(memoryview(data)) == (sequence, start, end)
    assert list(pb.ModelInferRequest.FromString(fields.signature).parameters) == ["mine"]


@pytest.mark.parametrize(("key", "value"), [*product(STEP_KEYS, [b"\x21" + bytes(8)]), ("sequence_start", b"\x10\x01")])
def test_step_of_another_type_is_left_to_protobuf(key: str, value: bytes) -> None:
    assert scan_request(request([entry(key_field(key), value_field(value))])) is None
