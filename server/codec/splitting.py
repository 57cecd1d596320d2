"""A request with more rows than a batch may have, executed in parts and joined again.

For models whose configuration has `paceline.split_oversized`. The parts are views; the joined outputs are one copy.

Lives here: cutting, submitting the parts while there is room, joining. Must not: decide which requests are split.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from paceline.backends.spec import Array, Tensors
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.errors import ExecutionFailed
from paceline.scheduler.pending import Pending
from paceline.scheduler.policy import BatchPolicy
from paceline.server.memory.region_tensors import Inputs

__all__ = ["joined", "submit_parts"]

_MANY = 2**31


async def submit_parts(
    batcher: Batcher[Any, Tensors],
    inputs: Inputs,
    rows: int,
    key: Hashable,
    *,
    size_bytes: int,
    payload_of: Callable[[Any], Any] | None = None,
    join: Callable[[Sequence[Any], Sequence[int]], Any] | None = None,
    **how: Any,
) -> tuple[Tensors, Pending[Any, Tensors]]:
    """Execute `inputs` in parts, as large as batches may be. Returns the joined results, and the last part.

    `payload_of` makes the batcher's payload of a part's inputs, which by default is these inputs. `join` joins results
    that aren't plain arrays; it also gets the rows of each part. `how` goes to `Batcher.submit`. If a part fails, the
    request fails with its error, and the other parts are cancelled.
    """
    limit = batcher.policy.max_batch_rows
    shares = [min(limit, rows - start) for start in range(0, rows, limit)]
    parts: list[Pending[Any, Tensors]] = []
    try:
        for start, share in zip(range(0, rows, limit), shares, strict=True):
            part: Any = tuple(array[start : start + share] for array in inputs)
            part = payload_of(part) if payload_of else part
            bytes_of_part = size_bytes * share // rows
            await _until_room(parts, _parts_at_once(batcher.policy, bytes_of_part, how.get("priority", 0)))
            parts.append(batcher.submit(part, share, key, size_bytes=bytes_of_part, **how))
        results = await asyncio.gather(*parts)
    except BaseException:
        # Emptied, so that the error's traceback doesn't lead back to the error, and keep shared memory open.
        while parts:
            parts.pop().cancel()
        raise
    whole = join(results, shares) if join else [joined(*column) for column in enumerate(zip(*results, strict=True))]
    return whole, parts[-1]


def _parts_at_once(policy: BatchPolicy, bytes_of_part: int, priority: int) -> int:
    """How many parts fit into an empty queue: a request must not be refused for the room that it takes up itself."""
    bounds = (
        policy.queue_policy(policy.level_of(priority)).max_queue_size,
        policy.limits.max_rows and max(1, policy.limits.max_rows // policy.max_batch_rows),
        policy.limits.max_bytes and max(1, policy.limits.max_bytes // max(1, bytes_of_part)),
    )
    return min((bound for bound in bounds if bound), default=_MANY)


async def _until_room(parts: Sequence[Pending[Any, Tensors]], at_once: int) -> None:
    """Wait until fewer than `at_once` parts are unfinished; raises the error of one that failed."""
    while len(out := [pending for pending in parts if not pending.done()]) >= at_once:
        done, _ = await asyncio.wait(out, return_when=asyncio.FIRST_COMPLETED)
        for pending in done:
            pending.result()


def joined(number: int, parts: Sequence[Array]) -> Array:
    """The parts of output `number` as one array. Raises ExecutionFailed if they don't fit."""
    try:
        return np.concatenate(parts)
    except ValueError:
        shapes = [list(part.shape) for part in parts]
        what = f"the parts of a split request can't be joined: output {number} has shapes {shapes}"
        raise ExecutionFailed(what) from None
