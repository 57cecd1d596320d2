"""Metadata of calls: what gRPC can send.

Lives here: the rules of gRPC's HTTP/2 mapping for keys and values, checked before anything is sent: grpc and grpc.aio
would each fail in a way of its own, and on a stream everybody who shares it would fail. Must not: put a value into the
text of an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

__all__ = ["Metadata", "checked"]

Metadata = Sequence[tuple[str, str | bytes]]
"""Pairs of lower-case key and value; values of keys ending in `-bin` are bytes."""

_KEY: Final = re.compile(r"[a-z0-9_.-]+")
_TEXT: Final = re.compile(r"[ -~]*")


def checked(metadata: Metadata) -> tuple[tuple[str, str | bytes], ...]:
    """The pairs. Raises ValueError or TypeError, naming the key, for what can't be sent."""
    if isinstance(metadata, Mapping | str | bytes) or not isinstance(metadata, Iterable):
        raise TypeError(f"metadata: expected pairs of key and value, got {type(metadata).__name__}")
    return tuple(_checked(pair) for pair in metadata)


def _checked(pair: tuple[str, str | bytes]) -> tuple[str, str | bytes]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError("metadata: expected pairs of key and value, got something else among them")
    key, value = pair
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"metadata: expected keys of lower case letters, digits, '_', '.' and '-', got {key!r}")
    is_binary = key.endswith("-bin")
    if not isinstance(value, bytes if is_binary else (str, bytes)):
        wanted = "bytes" if is_binary else "str or bytes"
        raise TypeError(f"metadata {key!r}: expected {wanted}, got {type(value).__name__}")
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not is_binary and not _TEXT.fullmatch(text):
        raise ValueError(f"metadata {key!r}: expected printable ASCII; a key that ends in '-bin' takes any bytes")
    return key, value
