"""Fields are counted before they become objects: neither too many nor too few, whatever surrounds them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from paceline.protos import inference_pb2 as pb
from paceline.protos.wire import MAX_FIELDS, TooManyElements, TooManyFields, check_fields, delimited

INPUTS, CONTENTS, TEXTS = b"\x2a", b"\x2a", b"\x42"
MANY = MAX_FIELDS + 1


def check(data: bytes, max_elements: int = 2**20, kind: type[Message] = pb.ModelInferRequest) -> None:
    check_fields(data, kind.DESCRIPTOR, max_elements)


def in_contents(fields: bytes) -> bytes:
    return delimited(INPUTS, delimited(CONTENTS, fields))


@given(texts=st.lists(st.lists(st.binary(max_size=200), max_size=6), max_size=3), most=st.integers(1, 12))
def test_texts_of_all_inputs_count(texts: Sequence[Sequence[bytes]], most: int) -> None:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(100)])
    for one in texts:
        request.inputs.add(name="a", shape=[len(one)], contents=pb.InferTensorContents(bytes_contents=one))
    if sum(map(len, texts)) > most:
        with pytest.raises(TooManyElements):
            check(request.SerializeToString(), most)
    else:
        check(request.SerializeToString(), most)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(b"\x42\x00" * 9, id="empty"),
        pytest.param(b"\xc2\x00\x00" * 9, id="a longer tag"),
        pytest.param(b"\x42\x80\x00" * 9, id="a longer length"),
        pytest.param(delimited(TEXTS, bytes(200)) * 9, id="long"),
        pytest.param(b"\x08\x01" * 9, id="unpacked booleans"),
        pytest.param(b"\x35\x00\x00\x00\x00" * 9, id="unpacked FP32"),
        pytest.param(b"\x3d" + bytes(4) + b"\x39" + bytes(8) + b"\x42\x00" * 7, id="unpacked FP64 and texts"),
        pytest.param(b"\x7b\x42\x00\x7c" * 6, id="groups"),
    ],
)
@pytest.mark.parametrize("rest", [b"", b"\x07", b"\x42", b"\x42\x09"], ids=["whole", "garbage", "cut", "cut text"])
def test_no_spelling_hides_elements(fields: bytes, rest: bytes) -> None:
    with pytest.raises(TooManyElements):
        check(in_contents(fields + rest), 8)
    with pytest.raises(TooManyElements):
        check(
            in_contents(fields[: len(fields) // 2]) + in_contents(fields[len(fields) // 2 :]) + in_contents(fields), 8
        )


@pytest.mark.parametrize("field", [1, 2, 3, 4, 5, 6, 7])
def test_packed_values_are_one_field(field: int) -> None:
    check(in_contents(delimited(bytes([field << 3 | 2]), b"\x01" * 4000)), 1)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        pytest.param(pb.ModelInferRequest, b"\x2a\x00" * MANY, id="inputs"),
        pytest.param(pb.ModelInferRequest, b"\x32\x00" * MANY, id="outputs"),
        pytest.param(pb.ModelInferRequest, b"\x3a\x00" * MANY, id="raw contents"),
        pytest.param(pb.ModelInferRequest, b"\x22\x00" * MANY, id="parameters"),
        pytest.param(pb.ModelInferRequest, delimited(b"\x2a", b"\x22\x00" * MANY), id="parameters of an input"),
        pytest.param(pb.ModelInferRequest, delimited(b"\x32", b"\x12\x00" * MANY), id="parameters of an output"),
        pytest.param(pb.ModelInferRequest, b"\x78\x00" * MANY, id="unknown"),
        pytest.param(pb.RepositoryModelLoadRequest, b"\x1a\x00" * MANY, id="parameters of a load"),
        pytest.param(pb.TraceSettingRequest, b"\x0a\x00" * MANY, id="settings"),
        pytest.param(pb.TraceSettingRequest, delimited(b"\x0a", delimited(b"\x12", b"\x0a\x00" * MANY)), id="values"),
        pytest.param(pb.LogSettingsRequest, b"\x0a\x00" * MANY, id="log settings"),
    ],
)
def test_every_repeated_field_is_bounded(kind: Any, data: bytes) -> None:
    with pytest.raises(TooManyFields):
        check(data, kind=kind)


def test_counting_takes_no_memory() -> None:
    data = in_contents(b"\x42\x00" * 2**21)
    tracemalloc.start()
    try:
        with pytest.raises(TooManyElements):
            check(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**16


@given(data=st.binary(max_size=300), prefix=st.sampled_from([b"", b"\x2a\x7f", b"\x2a\x70\x2a\x60", b"\x22\x50"]))
def test_any_bytes_are_counted_to_their_end(data: bytes, prefix: bytes) -> None:
    """Whatever protobuf can parse and this lets through has no more elements than allowed."""
    try:
        check(prefix + data, 2)
        request = pb.ModelInferRequest.FromString(prefix + data)
    except (TooManyElements, DecodeError):
        return
    assert sum(len(one.contents.bytes_contents) for one in request.inputs) <= 2
