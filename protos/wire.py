"""Protobuf's wire format: inference requests and responses read and written without making message objects, fields
counted before they become objects, and messages parsed where memory may be short.

Lives here: fields, tags and lengths. Must not: models, checks whether a request makes sense; what is malformed is
protobuf's to report. What `scan_request` can't read, it leaves to protobuf. The rule: whatever the bytes are, nothing
here takes memory for what a length claims, and no walk takes longer than its limits allow. Source of the layout:
protobuf's "Encoding" guide, and the fields' numbers in inference.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from paceline.protos.inference_pb2 import InferParameter, InferTensorContents

MessageT = TypeVar("MessageT", bound=Message)
Data: TypeAlias = bytes | memoryview
"""A serialized message, maybe in memory that another process has written: read-only, a byte each."""

_DELIMITED: Final = 2
# Field number and wire type, as every field of these messages has it.
_ID_TAG: Final = 3 << 3 | _DELIMITED
_PARAMETERS_TAG: Final = 4 << 3 | _DELIMITED
_OUTPUTS_TAG: Final = 6 << 3 | _DELIMITED
_RAW_TAG: Final = 7 << 3 | _DELIMITED
RAW_INPUT_TAG: Final = bytes([_RAW_TAG])
RESPONSE_ID_TAG: Final = bytes([3 << 3 | _DELIMITED])
OUTPUT_TAG: Final = bytes([5 << 3 | _DELIMITED])
RAW_OUTPUT_TAG: Final = bytes([6 << 3 | _DELIMITED])
# Of an entry of a map, and of a parameter's value.
_KEY_TAG: Final = 1 << 3 | _DELIMITED
_VALUE_TAG: Final = 2 << 3 | _DELIMITED
_BOOL_TAG: Final = InferParameter.BOOL_PARAM_FIELD_NUMBER << 3
_NUMBER_TAGS: Final = (InferParameter.INT64_PARAM_FIELD_NUMBER << 3, InferParameter.UINT64_PARAM_FIELD_NUMBER << 3)
_STRING_TAG: Final = InferParameter.STRING_PARAM_FIELD_NUMBER << 3 | _DELIMITED
_TEXT_TAG: Final = InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER << 3 | _DELIMITED

_LONGEST_VARINT: Final = 10
# A message has less than 2 GiB, so a length of more bytes than that needs isn't worth reading to its end.
_MAX_SHIFT: Final = 28
# What a value of each other wire type takes. Groups are counted by their fields, and by their beginning and end.
_SIZES: Final = {1: 8, 3: 0, 4: 0, 5: 4}

_MAX_SCANNED: Final = 4_096
"""More than models have tensors. Empty fields take two bytes each, and processor time only in Python."""
MAX_FIELDS: Final = 65_536
"""The most fields of a message besides the elements of typed contents. 13,000 inputs have as many; parsed, they take 10
MiB at most. A field takes two bytes on the wire, or one if it begins or ends a group, which no message here has. An
empty text takes 16 bytes once parsed, an empty tensor 88, and what Python makes of them takes more."""
_LEAST_BYTES: Final = 2
_MOST_PARSED: Final = 16
"""How much a message takes once parsed, by its bytes: a packed integer of one byte takes eight, and an array that grows
leaves its smaller predecessors behind."""


STEP_KEYS: Final = ("sequence_id", "sequence_start", "sequence_end")
"""The parameters that say what a request is in its sequence; they differ from step to step."""
LONGEST_SEQUENCE_ID_BYTES: Final = 128
"""Triton's limit for a `sequence_id` that is a text."""
_STEP_KEYS: Final = tuple(key.encode() for key in STEP_KEYS)


class StepFields(NamedTuple):
    """Where a serialized request has the values of STEP_KEYS: `id` begins and ends, as a `text` or else as a varint;
    `start_at` and `end_at` are a byte each. 0: it has none. `spans`: the same in the order of the message."""

    id: tuple[int, int]
    text: bool
    start_at: int
    end_at: int
    spans: tuple[tuple[int, int], ...]

    # hot path: see bench/
    def values(self, data: Data) -> tuple[int | str, bool, bool]:
        """The id, an integer without a sign or a text, whether the step is the first, and whether it is the last.
        Raises ValueError for what is to be left to protobuf."""
        begin, end = self.id
        sequence = str(data[begin:end], "utf-8") if self.text else _number(bytes(data[begin:end]))
        starts, ends = self.start_at and data[self.start_at], self.end_at and data[self.end_at]
        if starts > 1 or ends > 1:
            raise ValueError("not a bool as it is usually written")
        return sequence, starts == 1, ends == 1


@lru_cache(maxsize=4_096)
def _number(written: bytes) -> int:
    """The 64 bits of a varint, 0 for no bytes. Raises ValueError if it isn't exactly one."""
    if not written:
        return 0
    if len(written) > _LONGEST_VARINT or [one > 0x7F for one in written] != [True] * (len(written) - 1) + [False]:
        raise ValueError("not a varint")
    number = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(written))
    if number >= 1 << 64:
        raise ValueError("more than 64 bits")
    return number


class RequestFields(NamedTuple):
    """A serialized ModelInferRequest: its `signature`, all of it except the id, the parameters in STEP_KEYS and the
    tensors; the `id` in UTF-8, and where it begins (0 if there is none); where the entries of raw_input_contents begin
    and end; and where those parameters are, None if it has none. Requests of equal signatures are equal but for
    these."""

    signature: bytes
    id: bytes
    id_at: int
    raw: list[tuple[int, int]]
    step: StepFields | None


# hot path: see bench/
def scan_request(data: Data) -> RequestFields | None:
    """The fields of a ModelInferRequest that has them in the order of their numbers, as serializers write them. None
    for anything else, valid or not, and for one with very many fields. Linear in the number of fields, whatever their
    sizes."""
    at, end, previous = 0, len(data), 0
    id_at = id_value_at = id_end = 0
    signature_end = end
    raw: list[tuple[int, int]] = []
    parameters: list[tuple[int, int, int]] = []
    try:
        for _ in range(_MAX_SCANNED):
            if at >= end:
                break
            start, tag, length = at, data[at], data[at + 1]
            at += 2
            if length > 0x7F:
                # As `_varint`, which as a call would make this a fifth slower.
                length, shift = length & 0x7F, 7
                while (byte := data[at]) > 0x7F and shift < _MAX_SHIFT:
                    length |= (byte & 0x7F) << shift
                    shift += 7
                    at += 1
                length |= byte << shift
                at += 1
            if tag == _RAW_TAG:
                if not raw:
                    signature_end = start
                raw.append((at, at + length))
            elif tag == _ID_TAG:
                id_at, id_value_at, id_end = start, at, at + length
            elif tag == _PARAMETERS_TAG:
                parameters.append((start, at, at + length))
            elif tag & 7 != _DELIMITED or tag > _OUTPUTS_TAG:
                return None
            if tag < previous or (tag == previous and tag <= _ID_TAG):
                return None
            previous = tag
            at += length
    except IndexError:
        return None
    if at != end:
        return None
    if parameters:
        return _with_step(data, parameters, (id_at, id_value_at, id_end), signature_end, raw)
    if id_end:
        signature = bytes(data[:id_at]) + data[id_end:signature_end]
        return RequestFields(signature, bytes(data[id_value_at:id_end]), id_value_at, raw, None)
    return RequestFields(bytes(data[:signature_end]), b"", 0, raw, None)


def _with_step(
    data: Data,
    parameters: Sequence[tuple[int, int, int]],
    id_place: tuple[int, int, int],
    signature_end: int,
    raw: list[tuple[int, int]],
) -> RequestFields | None:
    """The rest of `scan_request` for a request with `parameters`, each from its tag to its end. None unless each of
    them is a key and a value and nothing else: then those with other keys say nothing of its step."""
    id_at, id_value_at, id_end = id_place
    found: dict[bytes, tuple[int, int]] = {}
    pieces, kept_at, text = [data[:id_at]], id_end, False
    try:
        for start, entry_at, end in parameters:
            key_at, key_end = _content(data, entry_at, _KEY_TAG)
            value_at, value_end = _content(data, key_end, _VALUE_TAG)
            key = bytes(data[key_at:key_end])
            if value_end != end:
                return None
            if key not in _STEP_KEYS:
                continue
            kind, value_at = data[value_at], value_at + 1
            if key == _STEP_KEYS[0] and kind == _STRING_TAG:
                text, (value_at, string_end) = True, _content(data, value_at - 1, _STRING_TAG)
                fits = string_end == end <= value_at + LONGEST_SEQUENCE_ID_BYTES
            elif key == _STEP_KEYS[0]:
                fits = kind in _NUMBER_TAGS and value_at < end
            else:
                fits = kind == _BOOL_TAG and value_at + 1 == end
            if not fits or key in found:
                return None
            found[key] = value_at, end
            pieces.append(data[kept_at:start])
            kept_at = end
    except IndexError:
        return None
    pieces.append(data[kept_at:signature_end])
    step = None
    if found:
        places = [found.get(key, (0, 0)) for key in _STEP_KEYS]
        step = StepFields(places[0], text, places[1][0], places[2][0], tuple(found.values()))
    return RequestFields(b"".join(pieces), bytes(data[id_value_at:id_end]), id_value_at, raw, step)


def _content(data: Data, at: int, tag: int) -> tuple[int, int]:
    """Where the content of the field at `at` begins and ends. Raises IndexError if the field has another tag."""
    if data[at] != tag:
        raise IndexError
    length, start = _varint(data, at + 1)
    return start, start + length


def _varint(data: Data, at: int) -> tuple[int, int]:
    """The varint at `at`, and where it ends. Raises IndexError if there is none."""
    value = 0
    for number in range(_LONGEST_VARINT):
        byte = data[at + number]
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value, at + number + 1
    raise IndexError


@lru_cache(maxsize=4_096)
def varint(number: int) -> bytes:
    """`number`, not negative, as a protobuf varint."""
    if number < 0x80:
        return bytes((number,))
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def delimited(tag: bytes, content: bytes) -> bytes:
    """A length-delimited field with its content."""
    return tag + varint(len(content)) + content


class TooManyFields(ValueError):
    """More than MAX_FIELDS."""


class TooManyElements(ValueError):
    """More elements of typed contents than allowed."""


def check_fields(data: bytes, message: Descriptor, max_elements: int) -> None:
    """Raise TooManyFields or TooManyElements for more of them than a `message` may have. An element is a text, or a
    value that isn't packed; packed values are one field, and take little. Takes no memory; constant time for small
    messages, else linear in the number of fields, whatever their sizes."""
    if len(data) <= _LEAST_BYTES * min(MAX_FIELDS, max_elements):
        return
    with suppress(IndexError):  # malformed, and with few fields up to there
        _Count(data, max_elements).fields(0, len(data), _nested(message))


_Nested: TypeAlias = "dict[int, _Nested | None]"
"""The fields of a message that are messages, by tag; None for typed contents."""


@cache
def _nested(message: Descriptor) -> _Nested:
    contents = InferTensorContents.DESCRIPTOR.name
    return {
        field.number << 3 | _DELIMITED: None if inner.name == contents else _nested(inner)
        for field in message.fields
        if (inner := field.message_type) is not None
    }


class _Count:
    """Counts down. Its methods raise IndexError at the end of the data and where no field begins."""

    def __init__(self, data: bytes, max_elements: int) -> None:
        self._data = data
        self._fields_left = MAX_FIELDS
        self._elements_left = max_elements

    def fields(self, at: int, end: int, nested: _Nested) -> None:
        while at < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise TooManyFields
            tag, start, at = self._field(at)
            if tag not in nested:
                continue
            if (inner := nested[tag]) is None:
                self._elements(start, at)
            else:
                self.fields(start, at, inner)

    # hot path: 0.1 us per text
    def _elements(self, at: int, end: int) -> None:
        data, left = self._data, self._elements_left
        while at < end:
            left -= 1
            if left < 0:
                raise TooManyElements
            if data[at] == _TEXT_TAG and (length := data[at + 1]) < 0x80:
                at += 2 + length
            else:
                _, _, at = self._field(at)
        self._elements_left = left

    def _field(self, at: int) -> tuple[int, int, int]:
        """The tag of the field at `at`, and where its value begins and ends."""
        tag, at = _varint(self._data, at)
        wire_type = tag & 7
        if wire_type == 0:
            return tag, at, _varint(self._data, at)[1]
        if wire_type == _DELIMITED:
            length, at = _varint(self._data, at)
            return tag, at, at + length
        if wire_type not in _SIZES:
            raise IndexError
        return tag, at, at + _SIZES[wire_type]


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """The message in `data`. Raises DecodeError if it is no such message, MemoryError if there is no room for it, which
    protobuf calls faulty. Where protobuf finds no room for bytes to add to a message or for what it writes, the process
    ends: whoever does that with large ones calls `ensure_room` before."""
    try:
        return kind.FromString(data)
    except DecodeError:
        ensure_room(_MOST_PARSED * len(data))
        raise


def ensure_room(size_bytes: int) -> None:
    """Raise MemoryError if the address space has no room for so many bytes. Takes no memory."""
    try:
        np.empty(size_bytes, np.uint8)
    except MemoryError:
        raise MemoryError(f"no room for {size_bytes} bytes") from None
