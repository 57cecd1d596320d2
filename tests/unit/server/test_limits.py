"""Limits as gRPC is told about them, where a test that reaches them would take long or much."""

from __future__ import annotations

import pytest

from paceline.server.limits import Connections, Limits


@pytest.mark.parametrize(
    ("idle_ms", "handshake_ms"), [(0, None), (1, 1_000), (1_000, 1_000), (5_000, 5_000), (600_000, 120_000)]
)
def test_tls_handshake_may_take_the_idle_time_but_a_second_to_two_minutes(
    idle_ms: int, handshake_ms: int | None
) -> None:
    options = dict(Connections(max_idle_ms=idle_ms).grpc_options())
    assert options.get("grpc.server_handshake_timeout_ms") == handshake_ms


def test_calls_that_nobody_has_looked_at_are_limited_to_16384() -> None:
    options = dict(Limits().grpc_options())
    assert options["grpc.server.max_pending_requests"] == 16_384
    assert options["grpc.server.max_pending_requests_hard_limit"] == 16_384
