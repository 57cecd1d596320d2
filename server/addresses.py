"""Where to listen: names and addresses as users write them, IPv6 with brackets or without, and Unix sockets.

Lives here: checking, writing, resolving and opening them, the same for every port of the server and as gRPC does it.
Must not: know flags, or accept connections.
"""

from __future__ import annotations

import errno
import socket
from urllib.parse import unquote

__all__ = ["host_and_port", "is_address", "listen", "resolve", "socket_path"]

SocketAddress = tuple[str | int | bytes, ...]
"""Host and port; for IPv6 perhaps flow and zone, too. Bytes only from a Python that was built without IPv6."""

_ALL = ("0.0.0.0", "::")
_BACKLOG = 128
"""Python's default may be less: in a larger burst, the rest would wait for a second before they try again."""


def is_address(text: str) -> bool:
    """Whether `text` may be a host name, or is an IP address; IPv6 may have brackets and a zone."""
    if ":" not in text:
        return bool(text) and not any(character in "/[]" or character.isspace() for character in text)
    try:
        socket.inet_pton(socket.AF_INET6, _bare(text).partition("%")[0])
    except (OSError, ValueError):
        return False
    return True


def socket_path(address: str) -> str | None:
    """The path of the Unix socket that `address` names; None if it names none. Read as gRPC's clients read it, so that
    both ends can be given the same text: `unix:relative`, `unix:/path` or `unix:///path`, with %XX for any byte."""
    if not address.startswith("unix:"):
        return None
    return unquote(address.removeprefix("unix:").removeprefix("//"))


def host_and_port(address: str, port: int) -> str:
    """`address:port`, with an IPv6 address in brackets; the address alone if it is a Unix socket's."""
    if socket_path(address) is not None:
        return address
    host = _bare(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(address: str, port: int) -> list[tuple[socket.AddressFamily, SocketAddress]]:
    """Families and addresses to bind TCP sockets to: each one that `address` has. `0.0.0.0` and `::` both stand for all
    addresses of both families, which `::` does where the system has IPv6. May ask the name service, if `address` is a
    name. Raises OSError."""
    host = _bare(address)
    if host in _ALL:
        return [(socket.AF_INET6, ("::", port)) if socket.has_dualstack_ipv6() else (socket.AF_INET, ("0.0.0.0", port))]
    if host.lower() == "localhost":  # whatever /etc/hosts says: RFC 6761
        return [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET6, ("::1", port))]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:  # Python refuses impossible names before it asks anybody
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None
    return [(family, where) for family, _, _, _, where in found]


def listen(address: str, port: int) -> list[socket.socket]:
    """Sockets that listen on all of `address` that this machine has, all on one port; port 0 takes a free one. Raises
    OSError if there is none, or if another program has the port on one of them."""
    opened: list[socket.socket] = []
    missing: OSError | None = None
    for family, (host, _, *zone) in resolve(address, port):
        try:
            both = host == "::"
            one = socket.create_server((host, port, *zone), family=family, dualstack_ipv6=both, backlog=_BACKLOG)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                missing = missing or error  # a name may have an IPv6 address on a machine that has none
                continue
            for other in opened:
                other.close()
            raise
        opened.append(one)
        port = one.getsockname()[1]
    if missing is not None and not opened:
        raise missing
    return opened


def _bare(address: str) -> str:
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address
