"""The scan of a request's bytes agrees with protobuf, or leaves them to it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from paceline.protos import inference_pb2 as pb
from paceline.protos.wire import delimited, scan_request, varint
from tests.property.wire_messages import messages


@given(messages)
def test_scan_separates_head_from_id_and_tensors(message: pb.ModelInferRequest) -> None:
    data = message.SerializeToString()
    fields = scan_request(data)
    assert fields is not None
    assert scan_request(memoryview(data)) == fields
    assert fields.id == message.id.encode()
    assert [data[start:end] for start, end in fields.raw] == list(message.raw_input_contents)
    head = pb.ModelInferRequest.FromString(fields.signature)
    assert (head.id, list(head.raw_input_contents)) == ("", [])
    head.id = message.id
    head.raw_input_contents.extend(message.raw_input_contents)
    assert head == message


@given(st.one_of(st.binary(max_size=60), st.lists(messages, max_size=3)), st.integers(0, 80))
def test_scan_of_other_bytes_agrees_with_protobuf(source: Any, cut: int) -> None:
    data = source if isinstance(source, bytes) else b"".join(one.SerializeToString() for one in source)[: cut or None]
    fields = scan_request(data)
    if fields is None:
        return
    try:
        message = pb.ModelInferRequest.FromString(data)
        head = pb.ModelInferRequest.FromString(fields.signature)
    except DecodeError:
        return
    assert fields.id == message.id.encode()
    assert [data[start:end] for start, end in fields.raw] == list(message.raw_input_contents)
    assert list(head.inputs) == list(message.inputs)
    assert (head.model_name, head.model_version) == (message.model_name, message.model_version)


@pytest.mark.parametrize(
    "data",
    [
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x3a" + b"\xff" * 1_000_000,
        b"\x0a",
        b"\x0a\x80",
        b"\x0a\x02m",
        b"\x3a\x01a\x0a\x01m",
        b"\x1a\x01a\x1a\x01b",
        b"\x0d\x00\x00\x00\x00",
        b"\xfa\x01\x01a",
        b"\x08\x01a",
        b"\x42\x01a",
    ],
    ids=[
        "length over 64 bits",
        "length without end",
        "tag alone",
        "half a length",
        "short",
        "order",
        "ids",
        "type",
        "tag",
        "type with a length's look",
        "unknown field",
    ],
)
def test_scan_leaves_odd_messages_to_protobuf(data: bytes) -> None:
    assert scan_request(data) is None


@given(st.integers(0, 2**31))
def test_varint_is_what_protobuf_writes(number: int) -> None:
    written = pb.InferParameter(uint64_param=number).SerializeToString()
    assert varint(number) == (written[1:] if number else b"\0")
    assert delimited(b"\x0a", b"x" * 200) == pb.ModelInferRequest(model_name="x" * 200).SerializeToString()
