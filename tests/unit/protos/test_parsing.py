"""A valid message that there is no room for isn't called faulty, and a faulty one isn't called too large."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from paceline.protos import inference_pb2 as pb
from paceline.protos.wire import parse
from tests.rlimits import room_for

LARGE_BYTES = 256 * 2**20
"""More than threads of earlier tests give back when they end meanwhile."""


def test_lack_of_room_is_no_fault_of_a_message() -> None:
    message = pb.ModelInferRequest(raw_input_contents=[bytes(LARGE_BYTES)])
    data = message.SerializeToString()
    with room_for(LARGE_BYTES // 2):
        with pytest.raises(MemoryError, match="no room for"):
            parse(pb.ModelInferRequest, data)
        with pytest.raises(DecodeError):
            parse(pb.ModelInferRequest, b"\x2a\x07")
        assert parse(pb.ModelInferRequest, pb.ModelInferRequest(id="a").SerializeToString()).id == "a"
    assert len(parse(pb.ModelInferRequest, data).raw_input_contents[0]) == LARGE_BYTES


def test_large_faulty_message_is_faulty() -> None:
    with pytest.raises(DecodeError):
        parse(pb.ModelInferRequest, bytes(2**20))
