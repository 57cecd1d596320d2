"""The input of magika's model: the first and the last kilobyte of a file, as integers.

The constants are those of the model's `config.min.json`; white space at both ends of the file is ignored.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

_BLOCK_BYTES = 4096
_END_BYTES = 1024
_PADDING = 256
SHORTEST_BYTES = 8
"""Files with fewer bytes, leading white space aside, aren't classified by the model."""


def features(path: Path) -> np.ndarray | None:
    """INT32 [1, 2048]: one row of bytes, padded with 256. None for files too short to be classified."""
    with path.open("rb") as file:
        size = path.stat().st_size
        block = min(_BLOCK_BYTES, size)
        beginning = file.read(block).lstrip()[:_END_BYTES]
        file.seek(size - block)
        end = file.read(block).rstrip()[-_END_BYTES:]
    if size < SHORTEST_BYTES or len(beginning) < SHORTEST_BYTES:
        return None
    row = np.full((1, 2 * _END_BYTES), _PADDING, np.int32)
    row[0, : len(beginning)] = np.frombuffer(beginning, np.uint8)
    row[0, row.shape[1] - len(end) :] = np.frombuffer(end, np.uint8)
    return row
