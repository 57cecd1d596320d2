"""How many fields a serialized message has, counted before they become objects.

Lives here: walking protobuf's wire format. Must not: read values, or judge messages: what is malformed is protobuf's to
report. The rule: whatever the bytes are, the walk takes no memory, and no longer than its limits allow.

A field takes two bytes on the wire, or one if it begins or ends a group, which no message here has. Parsed, an empty
text takes 16 bytes and an empty tensor 88, and what Python makes of them takes more.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Final, TypeAlias

from google.protobuf.descriptor import Descriptor

from paceline.protos.inference_pb2 import InferTensorContents

__all__ = ["MAX_FIELDS", "TooManyElements", "TooManyFields", "check_fields"]

MAX_FIELDS: Final = 65_536
"""The most fields of a message besides the elements of typed contents. 13,000 inputs have as many; parsed, they take 10
MiB at most."""

_LEAST_BYTES: Final = 2
_LONGEST_VARINT: Final = 10
_DELIMITED: Final = 2
# What a value of each other wire type takes. Groups are counted by their fields, and by their beginning and end.
_SIZES: Final = {1: 8, 3: 0, 4: 0, 5: 4}
_TEXT_TAG: Final = InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER << 3 | _DELIMITED

_Nested: TypeAlias = "dict[int, _Nested | None]"
"""The fields of a message that are messages, by tag; None for typed contents."""


class TooManyFields(ValueError):
    """More than MAX_FIELDS."""


class TooManyElements(ValueError):
    """More elements of typed contents than allowed."""


def check_fields(data: bytes, message: Descriptor, max_elements: int) -> None:
    """Raise TooManyFields or TooManyElements for more of them than a `message` may have. An element is a text, or a
    value that isn't packed; packed values are one field, and take little. Constant time for small messages, else linear
    in the number of fields, whatever their sizes."""
    if len(data) <= _LEAST_BYTES * min(MAX_FIELDS, max_elements):
        return
    with suppress(IndexError):  # malformed, and with few fields up to there
        _Count(data, max_elements).fields(0, len(data), _nested(message))


@cache
def _nested(message: Descriptor) -> _Nested:
    nested: _Nested = {}
    for field in message.fields:
        if (inner := field.message_type) is not None:
            nested[field.number << 3 | _DELIMITED] = None if inner.name == _CONTENTS else _nested(inner)
    return nested


_CONTENTS: Final = InferTensorContents.DESCRIPTOR.name


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
        tag, at = self._varint(at)
        wire_type = tag & 7
        if wire_type == 0:
            return tag, at, self._varint(at)[1]
        if wire_type == _DELIMITED:
            length, at = self._varint(at)
            return tag, at, at + length
        if wire_type not in _SIZES:
            raise IndexError
        return tag, at, at + _SIZES[wire_type]

    def _varint(self, at: int) -> tuple[int, int]:
        value = 0
        for number in range(_LONGEST_VARINT):
            byte = self._data[at + number]
            value |= (byte & 0x7F) << 7 * number
            if byte < 0x80:
                return value, at + number + 1
        raise IndexError
