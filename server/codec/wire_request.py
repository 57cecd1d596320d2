"""Reading requests from their bytes; those like earlier ones without parsing them.

Clients send the same again and again: model, names, datatypes, shapes and parameters stay, id and tensors change, and
where a step is in its sequence. What stays is the *signature* (`protos.wire`). The first request with a signature is
parsed and checked like any other. Later ones are only split into fields, and those of the same *form*, in which what
changes has the same lengths, are merely compared with it. By the signature, their model's codec knows what to do with
the tensors (`server.codec.known_requests`).

Lives here: telling which requests have a signature and a form in common. Must not: know models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from paceline.protos.inference_pb2 import InferParameter, ModelInferRequest
from paceline.protos.tensors import MAX_RANK
from paceline.protos.wire import (
    MAX_FIELDS,
    STEP_KEYS,
    Data,
    RequestFields,
    StepFields,
    TooManyElements,
    TooManyFields,
    check_fields,
    parse,
    scan_request,
)
from paceline.scheduler.request import SequenceStep
from paceline.server.bounded_cache import BoundedCache
from paceline.server.codec.array_request import ArrayRequest
from paceline.server.codec.parameters import step_of
from paceline.server.errors import InvalidRequest, MessageTooLarge, ServerError
from paceline.server.limits import Limits

_LONGEST_SIGNATURE = 4_096
_FORMS_OF_ONE_LENGTH = 8
"""Parameters are written in any order, another one in each process of clients, and steps have three."""
_PART_BYTES = 32
_LENGTH_BYTES = 4

_NO_PARAMETERS = ModelInferRequest().parameters

_Named = tuple[str, str, Mapping[str, InferParameter]]
"""Model, version and parameters."""


@dataclass(slots=True, eq=False)
class Form:
    """What requests have in common that differ in nothing but the values of id, tensors and of the parameters that say
    what they are in a sequence, all of the same lengths.

    `parts` are the bytes that they share, each with its beginning and end. Together with the id, from `id_at` to
    `id_end`, the values in `step`, and the entries of raw_input_contents, whose beginnings and ends are in `raw`, they
    are the whole request. `plain`: neither the request nor any of its tensors has other parameters. `note` is for the
    code that reads such requests: it stays from one request to the next.
    """

    parts: tuple[tuple[int, int, bytes], ...]
    id_at: int
    id_end: int
    raw: list[tuple[int, int]]
    signature: bytes
    named: _Named
    plain: bool
    step: StepFields | None = None
    note: Any = None

    @classmethod
    def of(cls, data: Data, fields: RequestFields, named: _Named, plain: bool) -> Form:
        """The form of the request in `data`."""
        id_end = fields.id_at + len(fields.id)
        between = [*fields.step.spans, *fields.raw] if fields.step is not None else fields.raw
        starts = [0, id_end, *(end for _, end in between)]
        ends = [fields.id_at, *(start for start, _ in between), len(data)]
        places = zip(starts, ends, strict=True)
        parts = tuple((start, end, bytes(data[start:end])) for start, end in places if start < end)
        return cls(parts, fields.id_at, id_end, fields.raw, fields.signature, named, plain, fields.step)

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        return sum(_PART_BYTES + len(part) for _, _, part in self.parts)


class WireRequest:
    """A serialized ModelInferRequest with the signature of one that protobuf has parsed. `step`: what its parameters
    say of its sequence, None if nothing; its `parameters` are the others. Raises ValueError for values that are to be
    left to protobuf."""

    __slots__ = ("data", "form", "id", "model_name", "model_version", "parameters", "step")

    # hot path: see bench/
    def __init__(self, data: Data, form: Form) -> None:
        self.data = data
        self.form = form
        self.id = str(data[form.id_at : form.id_end], "utf-8")
        self.step = SequenceStep(*form.step.values(data)) if form.step is not None else None
        self.model_name, self.model_version, self.parameters = form.named

    def message(self) -> ModelInferRequest:
        """The request as protobuf sees it."""
        return parse(ModelInferRequest, bytes(self.data))


AnyMessage = ModelInferRequest | WireRequest | ArrayRequest
"""What was sent: parsed, in bytes, or arrays from within the server."""


def message_of(request: AnyMessage) -> ModelInferRequest:
    """`request` as a message, parsed if it wasn't; of one from within, without its tensors' contents."""
    return request if isinstance(request, ModelInferRequest) else request.message()


# hot path: see bench/
def step_in(request: AnyMessage) -> SequenceStep | None:
    """What a request says of its sequence; None if nothing."""
    return step_of(request.parameters) if isinstance(request, ModelInferRequest) else request.step


MessageT = TypeVar("MessageT", bound=Message)
Unread = ServerError | MemoryError
"""What stands for a message that can't be read."""


def parsed(kind: type[MessageT], data: Data, max_elements: int) -> MessageT | Unread:
    """The message in `data`, or why there is none: gRPC would put its own words in place of an error raised here."""
    try:
        data = bytes(data)  # a copy, unless it is
        check_fields(data, kind.DESCRIPTOR, max_elements)  # type: ignore[arg-type]  # either implementation's
        return parse(kind, data)
    except TooManyElements:
        return _too_many_elements("in typed contents", max_elements, "more")
    except TooManyFields:
        return MessageTooLarge(f"expected a message of at most {MAX_FIELDS} fields (such as tensors), got more")
    except DecodeError as error:
        return InvalidRequest(str(error))
    except MemoryError as error:
        return error.with_traceback(None)


def _too_many_elements(where: str, most: int, got: object) -> MessageTooLarge:
    return MessageTooLarge(f"expected at most {most} elements {where} (--max-request-elements), got {got}")


class RequestReader:
    """Reads requests of up to `max_elements` elements, and remembers what they have in common, within a few MiB."""

    def __init__(self, max_elements: int = Limits().request_elements) -> None:
        self._max_elements = max_elements
        # By signatures.
        self._known = BoundedCache[bytes, tuple[_Named, bool]]()
        # By the lengths of requests, the latest first.
        self._forms = BoundedCache[int, tuple[Form, ...]]()

    # hot path: see bench/
    def __call__(self, data: Data) -> AnyMessage | Unread:
        """The request in `data`, or why it isn't read. Its tensors stay there, if it has a signature in common with an
        earlier one."""
        for form in self._forms.get(len(data), ()):
            for start, end, part in form.parts:
                if data[start:end] != part:
                    break
            else:
                try:
                    return WireRequest(data, form)
                except ValueError:
                    return self._parse(data)  # for protobuf's error text
        return self._read_fields(data)

    def _read_fields(self, data: Data) -> AnyMessage | Unread:
        """A request unlike the latest ones of its length."""
        fields = scan_request(data)
        if fields is None:
            return self._parse(data)
        known = self._known.get(fields.signature)
        if known is None:
            return self._parse_first(data, fields)
        form = Form.of(data, fields, *known)
        try:
            request = WireRequest(data, form)
        except ValueError:
            return self._parse(data)
        if form.size_bytes <= _LONGEST_SIGNATURE:
            others = self._forms.get(len(data), ())[: _FORMS_OF_ONE_LENGTH - 1]
            self._forms.remember(len(data), (form, *others), form.size_bytes)
        return request

    def _parse(self, data: Data) -> ModelInferRequest | Unread:
        most = self._max_elements
        request = parsed(ModelInferRequest, data, most)
        # In raw form, each element takes at least the bytes of its length.
        if len(data) > _LENGTH_BYTES * most and isinstance(request, ModelInferRequest):
            count = _text_elements(request)
            if count > most:
                return _too_many_elements(f"of BYTES for model '{request.model_name}'", most, count)
        return request

    def _parse_first(self, data: Data, fields: RequestFields) -> ModelInferRequest | Unread:
        request = self._parse(data)
        if isinstance(request, ModelInferRequest) and _may_come_again(request, fields):
            # A part of a message keeps all of it, names and tensors included, so parameters are copied to a message of
            # their own.
            parameters = _NO_PARAMETERS
            if own := {key: value for key, value in request.parameters.items() if key not in STEP_KEYS}:
                parameters = ModelInferRequest(parameters=own).parameters
            of_tensors = [one.parameters for one in request.inputs] + [one.parameters for one in request.outputs]
            plain = not (parameters or any(of_tensors))
            named = request.model_name, request.model_version, parameters
            self._known.remember(fields.signature, (named, plain), len(fields.signature))
        return request


def _text_elements(request: ModelInferRequest) -> int:
    """How many elements of BYTES its shapes promise. Its codec judges the shapes."""
    shapes = [tensor.shape for tensor in request.inputs if tensor.datatype == "BYTES"]
    return sum(math.prod(shape) for shape in shapes if len(shape) <= MAX_RANK)


def _may_come_again(request: ModelInferRequest, fields: RequestFields) -> bool:
    """Whether more requests are likely to have this signature; not if tensors are in it."""
    if len(fields.signature) > _LONGEST_SIGNATURE:
        return False
    return bool(fields.raw) or not any(tensor.HasField("contents") for tensor in request.inputs)
