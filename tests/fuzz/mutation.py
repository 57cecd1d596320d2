"""Random changes to inputs, the same for the same seed.

Lives here: changes to bytes of any kind, and the choice between these and changes inside messages.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

from tests.fuzz.shapes import changed

__all__ = ["mutated"]

_MAX_BYTES = 4096
_NUMBERS = [b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x80\x80\x80\x80\x08", b"\x00", b"\x7f", b"\xff"]
_NUMBERS += [struct.pack("<q", number) for number in (-1, 2**31, 2**32 - 1, 2**62, -(2**63))]
_TEXTS = [b"-1", b"2147483647", b"4294967295", b"9223372036854775807", b"1e999", b"nan", b"{", b"}", b'"', b"\\"]


_INSIDE = 0.8


def mutated(name: str, chance: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One of `corpus`, inputs of target `name`, with a few changes, up to 4 KiB."""
    data = chance.choice(corpus)
    inside = changed(name, data, chance) if chance.random() < _INSIDE else None
    if inside is None or len(inside) > _MAX_BYTES:
        return _shuffled(chance, data, corpus)
    return inside


def _shuffled(chance: random.Random, given: bytes, corpus: Sequence[bytes]) -> bytes:
    data = bytearray(given)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(7):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[at : at + chance.choice((1, 1, 4, 32))]
            case 2:
                data[at:at] = chance.choice(_NUMBERS + _TEXTS)
            case 3:
                piece = chance.choice(_NUMBERS + _TEXTS)
                data[at : at + len(piece)] = piece
            case 4:
                other = chance.choice(corpus)
                start = chance.randrange(len(other) + 1)
                data[at:] = other[start:]
            case 5:
                data[at:at] = data[at : at + chance.choice((1, 8, 64))] * chance.choice((1, 2, 16))
            case _:
                if at < len(data):
                    data[at] ^= 1 << chance.randrange(8)
    return bytes(data[:_MAX_BYTES])
