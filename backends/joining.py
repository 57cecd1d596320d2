"""Joining arrays into existing memory.

Lives here: that copy, and when it is better not done by numpy. Must not: know whose memory it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import Array

__all__ = ["MIN_ELEMENTS", "join_bytes_into", "join_into"]

MIN_ELEMENTS = 500
"""From this many elements on, numpy releases the GIL for each array that it copies. Beside a busy event loop, each
release may cost as long as threads keep the GIL: half a millisecond, for a copy of half a microsecond."""

_MAX_BYTES = 2**20
"""The most bytes of one request that are copied without releasing the GIL. Between two copies other threads get it once
they have waited for the switch interval, half a millisecond; releasing it may cost as much for each copy."""


def join_into(target: Array, arrays: Sequence[Array], padding: int) -> None:
    """Write `arrays` one after the other along axis 0 of `target`, and copies of the last row into its `padding` last
    rows.

    One copy, whatever their layout. `target` is C-contiguous, with as many rows as all of these. ExecutionError if they
    don't fit.
    """
    # hot path
    own = target[: len(target) - padding] if padding else target
    if arrays[0].size < MIN_ELEMENTS or arrays[0].nbytes > _MAX_BYTES or not _join_holding_on(own, arrays):
        _join_by_numpy(own, arrays)
    if padding:
        target[-padding:] = arrays[-1][-1:]


def join_bytes_into(target: Array, pieces: Sequence[bytes | memoryview]) -> None:
    """Write `pieces` one after the other into `target`, which is C-contiguous and has as many bytes as all of them."""
    flat = target.reshape(-1).view(np.uint8)
    if max(map(len, pieces)) > _MAX_BYTES:
        np.concatenate([np.frombuffer(one, np.uint8) for one in pieces], out=flat)
        return
    buffer, begin = flat.data, 0
    for one in pieces:
        end = begin + len(one)
        buffer[begin:end] = one
        begin = end


def _join_holding_on(target: Array, arrays: Sequence[Array]) -> bool:
    """Join without releasing the GIL during a copy. False, with `target` partly written, if the arrays aren't laid out
    like `target`."""
    dtype, dims = target.dtype, target.shape[1:]
    buffer, begin = target.data.cast("B"), 0
    try:
        for array in arrays:
            if array.dtype != dtype or array.shape[1:] != dims:
                return False
            data = array.data.cast("B")
            end = begin + data.nbytes
            buffer[begin:end] = data
            begin = end
    except TypeError:  # not in C order, or without elements
        return False
    return True


def _join_by_numpy(target: Array, arrays: Sequence[Array]) -> None:
    try:
        if len(arrays) == 1:
            np.copyto(target, arrays[0], casting="no")
        else:
            np.concatenate(arrays, out=target, casting="no")
    except (ValueError, TypeError) as error:
        raise ExecutionError(f"requests of one batch don't fit together: {error}") from error
