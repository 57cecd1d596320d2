"""What a codec makes of requests and results, in one call each, for tests."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from paceline.protos import inference_pb2 as pb
from paceline.server.codec.answers import Envelope
from paceline.server.codec.codec import AnyResponse, ModelCodec
from paceline.server.codec.known_requests import Group
from paceline.server.codec.wire_request import AnyMessage

__all__ = ["encoded", "encoded_as_message"]


def encoded(
    codec: ModelCodec, request: AnyMessage, group: Group, results: Any, envelope: Envelope | None = None
) -> AnyResponse:
    """The answer to `request`, which was read as `group`."""
    (answer,) = codec.encode(
        [
            SimpleNamespace(
                message=request, options=group.options, value=results, targets=group.targets[0], envelope=envelope
            )
        ]
    )
    if isinstance(answer, Exception):
        raise answer
    return answer


def encoded_as_message(codec: ModelCodec, request: AnyMessage, group: Group, results: Any) -> pb.ModelInferResponse:
    """The answer as a message, as if not only raw outputs were wanted."""
    answer = encoded(codec, request, group._replace(options=replace(group.options, plain=False)), results)
    assert isinstance(answer, pb.ModelInferResponse)
    return answer
