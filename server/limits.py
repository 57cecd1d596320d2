"""Bounds of the server as a whole, and how gRPC keeps connections.

Lives here: the values, and the options of gRPC's server made of them. Must not: count anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LARGEST_MESSAGE_BYTES = 2**31 - 1
"""gRPC's own maximum."""
LARGEST_RESPONSE_BYTES = LARGEST_MESSAGE_BYTES - 2**10
"""The rest is for the message around the outputs, and for what a response says about its batch."""
_MAX_PENDING = 16_384
"""Each may take some 10 KB, at no cost to a client that begins calls and resets them: so no more than the calls that
may be in progress by default."""

_SHORTEST_HANDSHAKE_MS, _LONGEST_HANDSHAKE_MS = 1_000, 120_000
"""Less is too short for distant clients; the longest is what gRPC waits by itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a request and of the server. `request_elements` bounds the elements of a request that become Python
    objects: all of BYTES, and values of typed contents that aren't packed. `connections`, `rpcs`, `streams` (of each
    streaming RPC), `queued_requests` and `models` bound how many there may be at a time; `connection_calls` bounds the
    calls on each connection, whether or not they have sent anything, and `queued_bytes` the bytes of the queued
    requests' tensors."""

    message_bytes: int = LARGEST_MESSAGE_BYTES
    metadata_bytes: int = 16_384
    request_elements: int = 2**20
    connections: int = 8_192
    connection_calls: int = 16_384
    rpcs: int = 16_384
    streams: int = 1_024
    queued_requests: int = 65_536
    queued_bytes: int = 4 * 2**30
    models: int = 1_024

    def grpc_options(self) -> Sequence[tuple[str, int]]:
        """gRPC's options, except for the bound on connections, which depends on the process."""
        return (
            ("grpc.max_concurrent_streams", self.connection_calls),
            # It would count finished calls until Python has released them, and reset calls that a client sends in
            # their place. It guards against calls that are begun and reset at once, on few connections; their memory
            # is bounded below.
            ("grpc.http.overload_protection", 0),
            # Calls that have arrived and aren't handled yet. By default, gRPC starts at 1000 to end some of them with
            # CANCELLED, and at 3000 all, whoever sent them: a burst is enough. Here, excess callers are told so.
            ("grpc.server.max_pending_requests", _MAX_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_send_message_length", LARGEST_MESSAGE_BYTES),
            # gRPC would refuse some calls from the first bound on, and all from the second.
            ("grpc.max_metadata_size", self.metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.metadata_bytes),
        )


@dataclass(frozen=True, slots=True)
class Connections:
    """How long connections live, under Triton's names and with its defaults. An age or idle time of 0: no limit."""

    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    max_pings_without_data: int = 2
    min_recv_ping_interval_without_data_ms: int = 300_000
    max_ping_strikes: int = 2
    max_idle_ms: int = 0
    max_age_ms: int = 0
    max_age_grace_ms: int = 0

    def grpc_options(self) -> Sequence[tuple[str, int]]:
        options = [
            ("grpc.keepalive_time_ms", self.keepalive_time_ms),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout_ms),
            # Without this option, gRPC 1.85 waits a minute, whatever the one above says.
            ("grpc.http2.ping_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.keepalive_permit_without_calls", int(self.keepalive_permit_without_calls)),
            ("grpc.http2.max_pings_without_data", self.max_pings_without_data),
            ("grpc.http2.min_ping_interval_without_data_ms", self.min_recv_ping_interval_without_data_ms),
            ("grpc.http2.max_ping_strikes", self.max_ping_strikes),
        ]
        if self.max_idle_ms:
            options.append(("grpc.max_connection_idle_ms", self.max_idle_ms))
            # gRPC doesn't count it as a connection before the TLS handshake is over, and waits two minutes for that.
            patience_ms = min(max(self.max_idle_ms, _SHORTEST_HANDSHAKE_MS), _LONGEST_HANDSHAKE_MS)
            options.append(("grpc.server_handshake_timeout_ms", patience_ms))
        if self.max_age_ms:
            options.append(("grpc.max_connection_age_ms", self.max_age_ms))
        if self.max_age_grace_ms:
            options.append(("grpc.max_connection_age_grace_ms", self.max_age_grace_ms))
        return options
