"""When a client asks again whether the server is ready, and when it gives up."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from paceline.clients import DeadlineExceeded, InferenceClient, Unavailable
from paceline.clients.methods import wait_ready


class Refused(InferenceClient):
    """A client whose calls are refused, which notes its pauses instead of making them, up to `most` of them."""

    def __init__(self, most: int) -> None:
        super().__init__("host:1")
        self.pauses_s: list[float] = []
        self._most = most

    async def _call(self, *given: Any, **more: Any) -> Any:
        raise Unavailable(grpc.StatusCode.UNAVAILABLE, "no connection")

    async def _sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        if len(self.pauses_s) == self._most:
            raise InterruptedError


@pytest.mark.parametrize("timeout_s", [1000.0, float("inf")])
def test_wait_ready_pauses_double_up_to_a_second(timeout_s: float) -> None:
    client = Refused(most=7)
    with pytest.raises(InterruptedError):
        client.wait_ready(timeout_s)
    assert client.pauses_s == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


async def test_wait_ready_pauses_no_longer_than_its_timeout() -> None:
    client = Refused(most=1)
    with pytest.raises(InterruptedError):
        await wait_ready(client, 0.04)
    assert 0 < client.pauses_s[0] <= 0.04


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_wait_ready_without_time_left_is_deadline_exceeded(timeout_s: float) -> None:
    client = Refused(most=1)
    with pytest.raises(DeadlineExceeded, match=f"host:1 was not ready within {timeout_s:g} s") as caught:
        client.wait_ready(timeout_s)
    assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert client.pauses_s == []
