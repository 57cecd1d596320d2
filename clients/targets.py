"""Where a server is, as users write it.

Lives here: what a target may be, and the port of one that has none. Must not: connect.
"""

from __future__ import annotations

import ipaddress
from typing import Final

__all__ = ["checked_target", "with_port"]

_GRPC_PORT: Final = 8001
_LARGEST_PORT: Final = 65_535


def checked_target(target: str, tls: str) -> str:
    """The name that gRPC takes for `target`, with port 8001 if it is only a host. Raises ValueError for what can't be
    one; `tls` is how the caller would ask for TLS."""
    expected = "expected a gRPC name such as '127.0.0.1:8001'"
    if not target:
        raise ValueError(f"{expected}, got ''")
    if target.startswith(("http://", "https://", "grpc://", "grpcs://")):
        raise ValueError(f"{expected}, got {target!r}: leave out the scheme; {tls} selects TLS")
    # gRPC would use the port modulo 65536.
    port = "" if target.startswith(("unix:", "vsock:")) else target.rpartition(":")[2]
    if port.isdecimal() and int(port) > _LARGEST_PORT:
        raise ValueError(f"{expected}, got {target!r}, whose port is above {_LARGEST_PORT}")
    return with_port(target, _GRPC_PORT)


def with_port(address: str, port: int) -> str:
    """`address` with `port`, if it is only a host: a name, or an IP address in brackets or without. gRPC would use 443,
    and HTTP 80."""
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    if ":" not in bare and "/" not in bare:
        return f"{bare}:{port}"
    try:
        ipaddress.IPv6Address(bare)
    except ValueError:
        return address
    return f"[{bare}]:{port}"
