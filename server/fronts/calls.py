"""RPCs that a front forwards, as the engine's handlers see them.

Lives here: what stands in for gRPC's context. Must not: know any RPC.
"""

from __future__ import annotations

import time
from typing import NoReturn

import grpc

__all__ = ["Aborted", "CallContext"]


class Aborted(Exception):
    """A handler ended its call with a status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class CallContext:
    """What unary handlers use of their context: headers, the time that is left, and `abort`."""

    def __init__(self, headers: tuple[tuple[str, str | bytes], ...], deadline_ns: int | None) -> None:
        self._headers = headers
        self._deadline_ns = deadline_ns

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._headers

    def time_remaining(self) -> float | None:
        if self._deadline_ns is None:
            return None
        return max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise Aborted(code, details)
