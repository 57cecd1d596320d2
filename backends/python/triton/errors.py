"""Errors of Triton's Python backend: what models raise, and what they answer with.

Lives here: codes, and the statuses that callers get for them. Must not: anything else.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

__all__ = ["TritonError", "TritonModelException", "error_kind"]


class TritonModelException(Exception):
    """Something that the model did, or asked for, can't be."""


class _Code(IntEnum):
    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


_STATUSES = {_Code.INVALID_ARG: "INVALID_ARGUMENT", _Code.UNSUPPORTED: "UNIMPLEMENTED"}
"""Those of gRPC that have other names."""


_CODES = {_STATUSES.get(code, code.name): code for code in _Code} | dict.fromkeys(
    ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"), _Code.UNAVAILABLE
)
"""Triton has no other for a queue that is full, or a timeout. Who gets the error passed on gets gRPC's status."""


class TritonError:
    """An error in place of an answer."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = _Code

    __slots__ = ("_code", "_message", "status")

    def __init__(self, message: str, code: Any = _Code.INTERNAL) -> None:
        if not isinstance(message, str):
            raise TypeError(f"TritonError: expected a message, got {type(message).__name__}")
        self._message = message
        self._code = _Code(code)
        self.status = _STATUSES.get(self._code, self._code.name)
        """What gRPC calls it, which says more than the code of a failed call."""

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message


def error_kind(error: TritonError) -> tuple[str, str]:
    """The name of the server's class for `error`, and of gRPC's status."""
    return "ModelRefused", error.status


def error_of(status: str, text: str) -> TritonError:
    """The error for a call that has failed with gRPC's `status`, which it keeps if it is passed on."""
    error = TritonError(text, _CODES.get(status, _Code.INTERNAL))
    error.status = status
    return error
