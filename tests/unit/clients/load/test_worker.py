from __future__ import annotations

import pytest

from paceline.clients.load.arrivals import Arrivals, Constant, Poisson, Recorded
from paceline.clients.load.worker import Load


@pytest.mark.parametrize(
    ("arrivals", "count", "is_endless"),
    [
        (None, None, True),
        (None, 1000, False),
        (Poisson(10.0), None, True),
        (Constant(10.0), 1000, False),
        (Recorded((0, 1), (0, 0)), None, False),
    ],
)
def test_loads_end_by_count_or_recording(arrivals: Arrivals | None, count: int | None, is_endless: bool) -> None:
    assert Load("", (b"",), 1.0, clients=1, arrivals=arrivals, count=count).is_endless == is_endless
