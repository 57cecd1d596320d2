"""Inference requests and responses in protobuf's wire format, read and written without making message objects.

Lives here: fields, tags and lengths. Must not: models, checks whether a request makes sense. What `scan_request` can't
read, it leaves to protobuf. Source of the layout: protobuf's "Encoding" guide, and the fields' numbers in
inference.proto.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

__all__ = [
    "OUTPUT_TAG",
    "RAW_INPUT_TAG",
    "RAW_OUTPUT_TAG",
    "RESPONSE_ID_TAG",
    "RequestFields",
    "delimited",
    "scan_request",
    "varint",
]

# Field number and wire type 2, "length-delimited", as every field here has it.
_ID_TAG: Final = 3 << 3 | 2
_OUTPUTS_TAG: Final = 6 << 3 | 2
_RAW_TAG: Final = 7 << 3 | 2
# A message has less than 2 GiB, so a length of more bytes than that needs isn't worth reading to its end.
_MAX_SHIFT: Final = 28
_MAX_FIELDS: Final = 4_096
"""More than models have tensors. Empty fields take two bytes each, and processor time only in Python."""
RAW_INPUT_TAG: Final = bytes([_RAW_TAG])
RESPONSE_ID_TAG: Final = bytes([3 << 3 | 2])
OUTPUT_TAG: Final = bytes([5 << 3 | 2])
RAW_OUTPUT_TAG: Final = bytes([6 << 3 | 2])


class RequestFields(NamedTuple):
    """A serialized ModelInferRequest: its `signature`, all of it except the id and the tensors; the `id` in UTF-8, and
    where it begins (0 if there is none); and where the entries of raw_input_contents begin and end. Requests of equal
    signatures are equal but for id and tensors."""

    signature: bytes
    id: bytes
    id_at: int
    raw: list[tuple[int, int]]


# hot path: see bench/
def scan_request(data: bytes) -> RequestFields | None:
    """The fields of a ModelInferRequest that has them in the order of their numbers, as serializers write them. None
    for anything else, valid or not, and for one with very many fields. Linear in the number of fields, whatever their
    sizes."""
    at, end, previous = 0, len(data), 0
    id_at = id_value_at = id_end = 0
    signature_end = end
    raw: list[tuple[int, int]] = []
    try:
        for _ in range(_MAX_FIELDS):
            if at >= end:
                break
            start, tag, length = at, data[at], data[at + 1]
            at += 2
            if length > 0x7F:
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
            elif tag & 7 != 2 or tag > _OUTPUTS_TAG:
                return None
            if tag < previous or (tag == previous and tag <= _ID_TAG):
                return None
            previous = tag
            at += length
    except IndexError:
        return None
    if at != end:
        return None
    if id_end:
        return RequestFields(data[:id_at] + data[id_end:signature_end], data[id_value_at:id_end], id_value_at, raw)
    return RequestFields(data[:signature_end], b"", 0, raw)


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
