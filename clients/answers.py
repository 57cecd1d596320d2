"""The answers to one request of a stream, as messages: which is an error, which is the last, what an early end means.

Lives here: pure reading. Must not live here: streams, or anything that waits.
"""

from __future__ import annotations

from typing import Final

import grpc

from paceline.clients.errors import InferenceError, Unavailable, inference_error
from paceline.protos.inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

FINAL: Final = "triton_final_response"
_EMPTY_FINAL: Final = "triton_enable_empty_final_response"
_STATUS: Final = "paceline_status"


def enable_empty_final(request: ModelInferRequest) -> None:
    """Ask for an answer without outputs where the model says that it is done only after its last answer."""
    request.parameters[_EMPTY_FINAL].bool_param = True


def stream_error(message: ModelStreamInferResponse) -> InferenceError | None:
    """The error that a message carries, if it does; of status UNKNOWN where only paceline would tell the status."""
    if not message.error_message:
        return None
    status = message.infer_response.parameters[_STATUS].string_param
    code = grpc.StatusCode.__members__.get(status, grpc.StatusCode.UNKNOWN)
    return inference_error(code, message.error_message)


class Answers:
    """The answers to the only request of a stream. A server that never marks the final one says by the stream's end
    that there are no more."""

    def __init__(self) -> None:
        self._is_marked = self._is_final = False
        self._count = 0

    def read(self, message: ModelStreamInferResponse) -> ModelInferResponse | None:
        """The answer in a message; None for a final message without outputs. Raises InferenceError."""
        error = stream_error(message)
        if error is not None:
            raise error
        response = message.infer_response
        self._count += 1
        if FINAL in response.parameters:
            self._is_marked, self._is_final = True, response.parameters[FINAL].bool_param
            del response.parameters[FINAL]
        return None if self._is_final and not response.outputs else response

    def end(self) -> None:
        """The stream has ended with the status OK. Raises Unavailable if answers are missing."""
        if not self._count or (self._is_marked and not self._is_final):
            raise Unavailable(grpc.StatusCode.UNAVAILABLE, "the server ended the stream before the final answer")
