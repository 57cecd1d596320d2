"""Where to listen: names and addresses as users write them, IPv6 with brackets or without.

Lives here: checking, writing and resolving them. Must not: open sockets, or know flags.
"""

from __future__ import annotations

import socket

__all__ = ["host_and_port", "is_address", "resolve"]


def is_address(text: str) -> bool:
    """Whether `text` may be a host name, or is an IP address; IPv6 may have brackets and a zone."""
    if ":" not in text:
        return bool(text) and not any(character in "/[]" or character.isspace() for character in text)
    try:
        socket.inet_pton(socket.AF_INET6, _bare(text).partition("%")[0])
    except (OSError, ValueError):
        return False
    return True


def host_and_port(address: str, port: int) -> str:
    """`address:port`, with an IPv6 address in brackets."""
    host = _bare(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Family and address to bind a TCP socket to. May ask the name service, if `address` is a name. Raises OSError."""
    try:
        found = socket.getaddrinfo(_bare(address), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:  # Python refuses impossible names before it asks anybody
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None
    family, _, _, _, where = found[0]
    return family, (str(where[0]), port)


def _bare(address: str) -> str:
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address
