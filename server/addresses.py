"""Where to listen: names and addresses as users write them, IPv6 with brackets or without, and Unix sockets.

Lives here: checking, writing, resolving and opening them, the same for every port of the server and as gRPC does it;
the file of a Unix socket: what may be replaced by it, who may connect, and its end. Must not: know flags or gRPC's
server, or accept connections.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from urllib.parse import quote, unquote

from paceline.server.errors import StartError

SocketAddress = tuple[str | int | bytes, ...]
"""Host and port; for IPv6 perhaps flow and zone, too. Bytes only from a Python that was built without IPv6."""

_ALL = ("0.0.0.0", "::")
_BACKLOG = 128
"""Python's default may be less: in a larger burst, the rest would wait for a second before they try again."""

SOCKET_PATH_BYTES = 107
"""The most that the kernel takes."""
SOCKET_FOLDER_BYTES = SOCKET_PATH_BYTES - len("/.abcdefgh/s")
"""The most that leaves room for where the socket is bound."""


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


def refuse_unless_free(address: str, port: int, mode: int) -> None:
    """Raise StartError unless gRPC can listen there, before minutes go into loading, with the system's own reason:
    gRPC doesn't pass it on. `mode` is for a Unix socket."""
    if (path := socket_path(address)) is not None:
        SocketFile(path, mode).check()
        return
    try:
        for opened in listen(address, port):
            opened.close()
    except OSError as error:
        raise StartError(f"gRPC can't listen on {host_and_port(address, port)}: {reason_of(error)}") from None


def reason_of(error: OSError) -> str | None:
    """The system's reason alone: Python adds the address. Errors of the name service have numbers of their own."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror


class SocketFile:
    """The socket at `path`, with permissions `mode`. gRPC, which binds it, would replace whatever socket it finds, in
    use or not, and leave its permissions to the process's umask. So it is given a place in a folder that no other user
    may enter, and the socket is linked to its path once it has its permissions and listens."""

    def __init__(self, path: str, mode: int) -> None:
        self._path = path
        self._mode = mode
        self._own: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise StartError if no socket could appear at the path now."""
        with self._explained(), self._new_folder():
            _is_stale(self._path)

    @contextmanager
    def appearing(self) -> Iterator[str]:
        """Yields where to listen, as gRPC writes it; after that, the socket is at its path. Raises StartError."""
        with self._explained(), self._new_folder() as folder:
            # Relative if the path is: where that matters, an absolute one may be too long.
            bound = os.path.join(os.path.dirname(self._path), os.path.basename(folder), "s")
            yield f"unix:{quote(bound)}"
            os.chmod(bound, self._mode)
            # Two servers that start at the same time may both find the same stale socket; the second one to take it
            # away would get the socket of the first. So what was taken away is looked at again.
            if _is_stale(self._path):
                aside = os.path.join(folder, "stale")
                os.rename(self._path, aside)
                try:
                    _is_stale(aside)
                except OSError:
                    os.rename(aside, self._path)
                    raise
            os.link(bound, self._path)
            self._own = _identity(bound)

    def remove(self) -> None:
        """Remove the socket, unless another server has replaced it. Has to be called while it is open: after that, the
        kernel may give its identity to another file."""
        own, self._own = self._own, None
        if own is not None:
            with suppress(FileNotFoundError):
                if _identity(self._path) == own:
                    os.unlink(self._path)

    def _new_folder(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(prefix=".", dir=os.path.dirname(self._path) or ".")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StartError(f"gRPC can't listen on unix:{self._path}: {error.strerror}") from None


def _is_stale(path: str) -> bool:
    """Whether there is a socket at `path` on which nobody listens; False if nothing is there. Raises OSError for
    everything else that is there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(status.st_mode):
        raise FileExistsError(errno.EEXIST, "a file is there that is no socket")
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(path)
        except ConnectionRefusedError:
            return True
        except BlockingIOError:
            pass  # so many wait to be accepted that there is no room for another one
    raise OSError(errno.EADDRINUSE, "another process listens there")


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
