"""The arithmetic of waiting for a server, without a clock."""

from __future__ import annotations

import math

import grpc
import pytest

from paceline.clients import DeadlineExceeded
from paceline.clients.base import ReadyWait


def test_ready_wait_pauses_double_up_to_a_second() -> None:
    wait = ReadyWait("t", timeout_s=100.0, now_s=5.0)
    assert [wait.pause_s(5.0) for _ in range(7)] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_ready_wait_last_pause_ends_when_the_time_is_up() -> None:
    wait = ReadyWait("t", timeout_s=1.0, now_s=5.0)
    assert wait.left_s(5.75) == 0.25
    wait.pause_s(5.0), wait.pause_s(5.0), wait.pause_s(5.0)
    assert wait.pause_s(5.75) == 0.25


@pytest.mark.parametrize("now_s", [6.0, 7.0])
def test_ready_wait_no_time_left_raises_deadline_exceeded(now_s: float) -> None:
    wait = ReadyWait("host:1", timeout_s=1.0, now_s=5.0)
    assert wait.left_s(now_s) == 0.0
    with pytest.raises(DeadlineExceeded, match="host:1 was not ready within 1 s") as caught:
        wait.pause_s(now_s)
    assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("timeout_s", [math.inf, 1e10, 1e300, 10**400])
def test_ready_wait_without_bound_never_runs_out(timeout_s: float) -> None:
    wait = ReadyWait("t", timeout_s, now_s=5.0)
    assert [wait.pause_s(1e8) for _ in range(7)][-1] == 1.0
    assert wait.left_s(1e8) == math.inf


def test_ready_wait_of_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s: expected a number of seconds, got nan"):
        ReadyWait("t", math.nan, now_s=5.0)
