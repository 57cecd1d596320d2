"""Requests like others before them, of which no message needs to be made.

Clients send the same again and again: model, names, datatypes, shapes and parameters stay, id and tensors change. What
stays is the *head* (`protos.wire`). The first request of a head is parsed and checked like any other. The next ones are
only taken apart, and their model's codec knows from the head what to do with the tensors (`server.shortcuts`).

Lives here: telling which requests are alike. Must not: know models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.message import DecodeError

from protos.inference_pb2 import InferParameter, ModelInferRequest
from protos.wire import RequestFields, scan_request

__all__ = ["AnyRequest", "Heads", "RequestReader", "WireRequest", "message_of"]

_MOST_HEADS = 1_000
_LONGEST_HEAD = 4_096
_MOST_HEAD_BYTES = 2**20
"""What is known of a head may take a hundred times its bytes, and callers choose heads."""

_Known = tuple[str, str, Mapping[str, InferParameter], bool]
_NO_PARAMETERS = ModelInferRequest().parameters

T = TypeVar("T")


class WireRequest:
    """A serialized ModelInferRequest with the head of one that protobuf has parsed. `plain`: there are no parameters,
    neither its own nor any of its tensors."""

    __slots__ = ("data", "head", "id", "model_name", "model_version", "parameters", "plain", "raw")

    def __init__(self, data: bytes, fields: RequestFields, request_id: str, known: _Known) -> None:
        self.data = data
        self.head = fields.head
        self.raw = fields.raw
        self.id = request_id
        self.model_name, self.model_version, self.parameters, self.plain = known

    def message(self) -> ModelInferRequest:
        """The request as protobuf sees it."""
        return ModelInferRequest.FromString(self.data)


AnyRequest = ModelInferRequest | WireRequest


def message_of(request: AnyRequest) -> ModelInferRequest:
    """`request` as a message, parsed if it wasn't."""
    return request.message() if isinstance(request, WireRequest) else request


class Heads(dict[bytes, T]):
    """What is known by heads of requests; all of it is forgotten when that has become many, or many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._size_bytes = 0

    def remember(self, head: bytes, known: T) -> None:
        """`known` is what `get` gives for `head` from now on, for a while."""
        if len(self) >= _MOST_HEADS or self._size_bytes + len(head) > _MOST_HEAD_BYTES:
            self.clear()
            self._size_bytes = 0
        self._size_bytes += len(head)
        self[head] = known


class RequestReader:
    """Reads requests, remembering heads; as many as fit into a few MiB."""

    def __init__(self) -> None:
        self._known = Heads[_Known]()

    # hot path: see bench/
    def __call__(self, data: bytes) -> AnyRequest | DecodeError:
        """The request in `data`, or what protobuf has against it."""
        fields = scan_request(data)
        if fields is None:
            return self._parse(data)
        known = self._known.get(fields.head)
        if known is None:
            return self._parse_first(data, fields)
        try:
            return WireRequest(data, fields, fields.id.decode(), known)
        except UnicodeDecodeError:
            return self._parse(data)  # protobuf has the words for it

    def _parse(self, data: bytes) -> ModelInferRequest | DecodeError:
        try:
            return ModelInferRequest.FromString(data)
        except DecodeError as error:
            return error

    def _parse_first(self, data: bytes, fields: RequestFields) -> ModelInferRequest | DecodeError:
        request = self._parse(data)
        if isinstance(request, ModelInferRequest) and _comes_again(request, fields):
            # Parts of a message keep all of it, names and tensors included: parameters are copied to one of their own.
            parameters = _NO_PARAMETERS
            if request.parameters:
                parameters = ModelInferRequest(parameters=request.parameters).parameters
            named = [one.parameters for one in request.inputs] + [one.parameters for one in request.outputs]
            plain = not (parameters or any(named))
            self._known.remember(fields.head, (request.model_name, request.model_version, parameters, plain))
        return request


def _comes_again(request: ModelInferRequest, fields: RequestFields) -> bool:
    """Whether more requests are likely to have this head: not where tensors are in it."""
    if len(fields.head) > _LONGEST_HEAD:
        return False
    return bool(fields.raw) or not any(tensor.HasField("contents") for tensor in request.inputs)
