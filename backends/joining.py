"""Arrays one after the other in memory that is there already.

Lives here: that copy, and when it is better not numpy's. Must not: know whose memory it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.base import Array
from backends.errors import ExecutionError

__all__ = ["LEAST_ELEMENTS", "join_bytes_into", "join_into"]

LEAST_ELEMENTS = 500
"""From so many on numpy lets go of the interpreter for each array that it copies. Beside a busy event loop each time
may cost as long as threads hold on to it: half a millisecond, for a copy of half a microsecond."""

_MOST_BYTES = 2**20
"""Of one request that are copied without letting go of the interpreter. Between two copies others have their turn once
they have waited for the switch interval, half a millisecond; to let go may cost as much for each of them."""


def join_into(target: Array, arrays: Sequence[Array], padding: int) -> None:
    """Write `arrays` one after the other along axis 0 of `target`, and the last row again into its `padding` last rows.

    One copy, whatever their layout. `target` is C-contiguous and has the rows of all of them. ExecutionError if they
    don't fit.
    """
    # hot path
    own = target[: len(target) - padding] if padding else target
    if arrays[0].size < LEAST_ELEMENTS or arrays[0].nbytes > _MOST_BYTES or not _join_holding_on(own, arrays):
        _join_by_numpy(own, arrays)
    if padding:
        target[-padding:] = arrays[-1][-1:]


def join_bytes_into(target: Array, pieces: Sequence[bytes | memoryview]) -> None:
    """Write `pieces`, which are all of the bytes of `target`, C-contiguous, one after the other."""
    flat = target.reshape(-1).view(np.uint8)
    if max(map(len, pieces)) > _MOST_BYTES:
        np.concatenate([np.frombuffer(one, np.uint8) for one in pieces], out=flat)
        return
    room, begin = flat.data, 0
    for one in pieces:
        end = begin + len(one)
        room[begin:end] = one
        begin = end


def _join_holding_on(target: Array, arrays: Sequence[Array]) -> bool:
    """Without letting go of the interpreter during a copy. False, with whatever written, if the arrays aren't laid out
    like `target`."""
    dtype, dims = target.dtype, target.shape[1:]
    room, begin = target.data.cast("B"), 0
    try:
        for array in arrays:
            if array.dtype != dtype or array.shape[1:] != dims:
                return False
            data = array.data.cast("B")
            end = begin + data.nbytes
            room[begin:end] = data
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
