"""A request with more rows than a batch may have, executed in parts and put together again.

For models whose configuration says `paceline.split_oversized`. The parts are views; the joined outputs are one copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from backends.base import Array, Tensors
from scheduler.batcher import Batcher, Pending
from scheduler.errors import ExecutionFailed

__all__ = ["submit_parts"]


async def submit_parts(
    batcher: Batcher[Tensors, Tensors], inputs: Tensors, rows: int, key: Hashable, *, size_bytes: int, **how: Any
) -> tuple[Tensors, Pending[Tensors, Tensors]]:
    """Execute `inputs` in parts of full batches; the joined results, and the last part.

    `how` goes to `Batcher.submit`. Whatever one part meets, the request meets, and its other parts are taken back.
    """
    limit = batcher.policy.max_batch_rows
    parts: list[Pending[Tensors, Tensors]] = []
    try:
        for start in range(0, rows, limit):
            share = min(limit, rows - start)
            part = tuple(array[start : start + share] for array in inputs)
            parts.append(batcher.submit(part, share, key, size_bytes=size_bytes * share // rows, **how))
        results = await asyncio.gather(*parts)
    except BaseException:
        for pending in parts:
            pending.cancel()
        raise
    return [_joined(number, column) for number, column in enumerate(zip(*results, strict=True))], parts[-1]


def _joined(number: int, parts: Sequence[Array]) -> Array:
    try:
        return np.concatenate(parts)
    except ValueError:
        shapes = [list(part.shape) for part in parts]
        what = f"the parts of a split request don't fit together: output {number} has {shapes}"
        raise ExecutionFailed(what) from None
