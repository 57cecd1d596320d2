"""Requests on one stream: the answers, their order, and how the stream ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.differential.messages import floats, infer, ints, wanting
from tests.differential.pair import Both

ROW = {"INPUT0": floats(1, 3)}
GOOD, LAST = infer("free", ROW, id="a"), infer("free", ROW, id="z")
FAILING = {"INPUT0": -np.ones((1, 4), np.float32)}


@dataclass(frozen=True, slots=True)
class Stream:
    """The requests of one stream, which ends with `status` on both servers."""

    what: str
    requests: Sequence[pb.ModelInferRequest]
    status: str = "OK"
    metadata: Sequence[tuple[str, str]] = ()


STREAMS = [
    Stream("nothing", []),
    Stream("two requests", [GOOD, LAST]),
    Stream("one id twice", [GOOD, GOOD]),
    Stream("no ids", [infer("free", ROW), infer("free", ROW)]),
    Stream("unknown model first", [infer("nobody", ROW, id="x"), LAST]),
    Stream("unknown model in the middle", [GOOD, infer("nobody", ROW, id="x"), LAST]),
    Stream("unknown model without an id", [infer("nobody", ROW)]),
    Stream("wrong datatype", [infer("free", {"INPUT0": ints(1, 3)}, id="x"), LAST]),
    Stream("wrong version", [infer("free", ROW, id="x", version="x"), LAST]),
    Stream("reserved parameter", [infer("free", ROW, id="x", parameters={"triton_x": True}), LAST]),
    Stream("model that raises", [GOOD, infer("fails", FAILING, id="x"), LAST]),
    Stream("classes", [wanting(infer("free", ROW, id="x"), "OUTPUT0", classification=1)]),
    Stream("one output", [wanting(infer("pair", {"INPUT0": ints(1, 4), "INPUT1": ints(1, 4)}, id="x"), "OUTPUT1")]),
    Stream("empty final response", [infer("free", ROW, parameters={"triton_enable_empty_final_response": True})]),
    Stream("triton_grpc_error: false", [infer("nobody", ROW, id="x"), LAST], "OK", [("triton_grpc_error", "false")]),
    Stream("triton_grpc_error: 1", [infer("nobody", ROW, id="x"), LAST], "OK", [("triton_grpc_error", "1")]),
    Stream("triton_grpc_error and no error", [GOOD, LAST], "OK", [("triton_grpc_error", "true")]),
]


def answered(channel: grpc.Channel, stream: Stream) -> tuple[list[Any], str]:
    """The answers, and the final status. Of an error only its id, which both servers report; this one reports more."""
    rpc = GRPCInferenceServiceStub(channel).ModelStreamInfer  # type: ignore[no-untyped-call]
    call, answers = rpc(iter(stream.requests), timeout=30, metadata=tuple(stream.metadata)), []
    try:
        for message in call:
            reply = MessageToDict(message.infer_response)
            answers.append({"error of": reply.get("id")} if message.error_message else reply)
    except grpc.RpcError as error:
        failure: Any = error
        return answers, failure.code().name
    return answers, "OK"


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.what)
def test_stream_has_the_same_answers_in_the_same_order(stream: Stream, both: Both) -> None:
    triton, here = (answered(one.channel, stream) for one in (both.triton, both.here))
    assert (triton, here) == ((triton[0], stream.status), triton)
