"""What `scan_request` leaves to protobuf. That what it takes is right, property/test_shortcuts shows."""

from __future__ import annotations

import pytest

from protos.wire import scan_request
from tests.wire import infer, rows_of_floats

GOOD = infer("m", {"a": rows_of_floats(1)}).SerializeToString()


@pytest.mark.parametrize("empty", [b"\x2a\x00", b"\x32\x00", b"\x3a\x00"], ids=["input", "output", "raw"])
def test_scan_of_more_fields_than_models_have_tensors_is_given_up(empty: bytes) -> None:
    """In Python each takes as much time as in protobuf a thousand."""
    head = b"" if empty < b"\x3a" else GOOD
    fields = 0 if empty < b"\x3a" else 3  # model, input, tensor
    assert scan_request(head + (4_096 - fields) * empty) is not None
    assert scan_request(head + 4_097 * empty) is None
