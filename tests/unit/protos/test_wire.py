"""What `scan_request` leaves to protobuf, and fields of any length. property/test_shortcuts shows that it reads
everything else correctly."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.protos.wire import scan_request
from tests.wire import infer, rows_of_floats

GOOD = infer("m", {"a": rows_of_floats(1)}).SerializeToString()


@pytest.mark.parametrize("empty", [b"\x2a\x00", b"\x32\x00", b"\x3a\x00"], ids=["input", "output", "raw"])
def test_scan_of_more_fields_than_models_have_tensors_is_left_to_protobuf(empty: bytes) -> None:
    """In Python, one takes as much time as a thousand in protobuf."""
    head = b"" if empty < b"\x3a" else GOOD
    fields = 0 if empty < b"\x3a" else 3  # model, input, tensor
    assert scan_request(head + (4_096 - fields) * empty) is not None
    assert scan_request(head + 4_097 * empty) is None


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 255, 16_383, 16_384, 2**21 - 1, 2**21, 2**21 + 300])
def test_scan_finds_tensors_of_any_length(size: int) -> None:
    message = infer("m", {"a": np.zeros(size, np.uint8), "b": np.ones(3, np.uint8)}, id="i" * min(size, 300))
    fields = scan_request(message.SerializeToString())
    assert fields is not None
    data = message.SerializeToString()
    assert [data[start:end] for start, end in fields.raw] == [bytes(size), b"\1\1\1"]
    assert fields.id == message.id.encode()
    del message.raw_input_contents[:]
    message.id = ""
    assert fields.signature == message.SerializeToString()
