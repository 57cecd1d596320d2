"""Many copies in one call: everything arrives, or the call reports that it didn't."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.server.memory.reading import copy_all
from paceline.server.memory.system_region import open_system_region
from tests.shared_objects import shared_object

PAGE = 4096


def test_pieces_are_copied_from_anywhere_and_nothing_else_is_written() -> None:
    source, target = np.arange(1000, dtype=np.uint8), np.zeros(1000, np.uint8)
    to, come = target.ctypes.data, source.ctypes.data
    assert copy_all([(to + 10, come + 500, 90), (to + 200, come + 3, 1), (to + 300, come, 0), (to + 999, come + 7, 1)])
    expected = np.zeros(1000, np.uint8)
    expected[10:100], expected[200], expected[999] = source[500:590], source[3], source[7]
    assert (target == expected).all()


@pytest.mark.parametrize("left", [0, PAGE, 3 * PAGE])
def test_truncated_memory_is_reported_and_does_not_kill_the_process(left: int) -> None:
    target = np.zeros(4 * PAGE, np.uint8)
    with shared_object(4 * PAGE) as memory:
        region = open_system_region("r", memory.key, 0, 4 * PAGE)
        begin = region.mapped_at
        assert begin is not None
        pieces = [(target.ctypes.data + at, begin + at, PAGE) for at in range(0, 4 * PAGE, PAGE)]
        assert copy_all(pieces)
        memory.resize(left)
        assert not copy_all(pieces)


def test_more_than_a_call_can_take_is_declined() -> None:
    source, target = np.ones(2000, np.uint8), np.zeros(2000, np.uint8)
    pieces = [(target.ctypes.data + at, source.ctypes.data + at, 1) for at in range(2000)]
    assert copy_all(pieces[:1024])
    assert target.sum() == 1024
    assert not copy_all(pieces[:1025])
    assert not copy_all([(target.ctypes.data, source.ctypes.data, 1 << 31)])
