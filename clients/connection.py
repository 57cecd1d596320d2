"""What a connection to a server takes: its address, TLS, a token, metadata; checked before anything is sent.

Lives here: what users may give, and the forms in which gRPC and HTTP take it. Must not: connect, or put a token or the
value of a header into the text of an error.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

Metadata = Sequence[tuple[str, str | bytes]]
"""Pairs of lower-case key and value; values of keys ending in `-bin` are bytes."""

_Path = str | os.PathLike[str]

_GRPC_PORT: Final = 8001
_LARGEST_PORT: Final = 65_535
# RFC 6750, section 2.1. For characters that a header can't have, gRPC's own error would contain the token.
_TOKEN: Final = re.compile(r"[\w.~+/-]+=*", re.ASCII)
_KEY: Final = re.compile(r"[a-z0-9_.-]+")
_TEXT: Final = re.compile(r"[ -~]*")


def checked_target(argument: str, target: str, tls: str) -> str:
    """The name that gRPC takes for `target`, with port 8001 if it is only a host. Raises ValueError for what can't be
    one, naming the argument; `tls` is how the caller would ask for TLS."""
    refusal = f"{argument}: expected a gRPC name such as '127.0.0.1:8001', got {target!r}"
    if not target:
        raise ValueError(refusal)
    if target.startswith(("http://", "https://", "grpc://", "grpcs://")):
        raise ValueError(f"{refusal}: leave out the scheme; {tls} selects TLS")
    # gRPC would use the port modulo 65536.
    port = "" if target.startswith(("unix:", "vsock:")) else target.rpartition(":")[2]
    if port.isdecimal() and int(port) > _LARGEST_PORT:
        raise ValueError(f"{refusal}, whose port is above {_LARGEST_PORT}")
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


def authorization(token: str) -> tuple[str, str]:
    """The header that carries a token, as key and value. Raises TypeError and ValueError for what isn't a token."""
    if not isinstance(token, str):
        raise TypeError(f"token: expected a str, got {type(token).__name__}")
    if not _TOKEN.fullmatch(token):
        raise ValueError("token: expected letters, digits, '-', '.', '_', '~', '+', '/', and '=' at the end")
    return "authorization", f"Bearer {token}"


def read_token(path: Path) -> str:
    """The token that a file holds, without white space around it. Raises OSError, and ValueError if it isn't a
    token."""
    token = path.read_bytes().decode("utf-8-sig", errors="replace").strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{path}: expected a token and nothing else")
    return token


def checked_metadata(metadata: Metadata) -> tuple[tuple[str, str | bytes], ...]:
    """The pairs. Raises ValueError or TypeError, naming the key, for what gRPC's mapping to HTTP/2 can't carry: grpc
    and grpc.aio would each fail in a way of its own, and on a stream everybody who shares it would fail."""
    if isinstance(metadata, Mapping | str | bytes) or not isinstance(metadata, Iterable):
        raise TypeError(f"metadata: expected pairs of key and value, got {type(metadata).__name__}")
    pairs = []
    for pair in metadata:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError("metadata: expected pairs of key and value, got something else among them")
        key, value = pair
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(f"metadata: expected keys of lower case letters, digits, '_', '.' and '-', got {key!r}")
        is_binary = key.endswith("-bin")
        if not isinstance(value, bytes if is_binary else (str, bytes)):
            wanted = "bytes" if is_binary else "str or bytes"
            raise TypeError(f"metadata {key!r}: expected {wanted}, got {type(value).__name__}")
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        if not is_binary and not _TEXT.fullmatch(text):
            raise ValueError(f"metadata {key!r}: expected printable ASCII; a key that ends in '-bin' takes any bytes")
        pairs.append((key, value))
    return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS settings of a client; all files are PEM.

    `ca` holds the authorities that sign servers' certificates, by default those that come with gRPC (for HTTP, the
    system's). `certificate`, with any between it and the root, and `key`, without a password, are presented to
    servers that ask for them. `server_name` is the name that the server's certificate has to be for, if that isn't the
    name in the target; for a Unix socket, that is localhost.

    Raises ValueError for a certificate without a key, or a key without a certificate, and TypeError for what isn't a
    path or a name.
    """

    ca: _Path | None = None
    certificate: _Path | None = None
    key: _Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("TLS: expected a certificate and its key, got only one of them")
        for name in ("ca", "certificate", "key"):
            path = getattr(self, name)
            if not isinstance(path, str | os.PathLike | None):
                raise TypeError(f"TLS: {name}: expected the path of a file, got {path!r}")
        if not isinstance(self.server_name, str | None):
            raise TypeError(f"TLS: server_name: expected a str, got {self.server_name!r}")

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials for gRPC's channels. Reads the files; raises ValueError if they can't be used."""
        # gRPC itself would only notice at the first call, and not say what is wrong.
        self.context()
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))

    def channel_options(self, target: str) -> Sequence[tuple[str, Any]]:
        """Options for gRPC's channels to `target`."""
        name = self.server_name
        if name is None and target.startswith(("unix:", "unix-abstract:")):
            # gRPC would look for the path in the certificate, which can't have it.
            name = "localhost"
        return [] if name is None else [("grpc.ssl_target_name_override", name)]

    def context(self) -> ssl.SSLContext:
        """A context for HTTPS connections. Reads the files; raises ValueError if they can't be used."""
        for path in (self.ca, self.certificate, self.key):
            _read(path)  # since ssl wouldn't say which of them can't be read
        context = _Context(ssl.PROTOCOL_TLS_CLIENT)
        context.server_name = self.server_name
        what = f"certificates as PEM in {self.ca}"
        try:
            if self.ca is None:
                context.load_default_certs()
            else:
                context.load_verify_locations(self.ca)
            what = f"a certificate in {self.certificate} and its key, without a password, in {self.key}, both as PEM"
            if self.certificate is not None:
                # Without a password given, OpenSSL would ask for one on the terminal.
                context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except ssl.SSLError as error:
            raise ValueError(f"TLS: expected {what}: {error.reason or error}") from None
        return context


class _Context(ssl.SSLContext):
    """Expects the certificate to be for `server_name`, whatever host is connected to."""

    server_name: str | None = None

    def wrap_socket(self, *args: Any, **more: Any) -> ssl.SSLSocket:
        if self.server_name is not None:
            more["server_hostname"] = self.server_name
        return super().wrap_socket(*args, **more)


def _read(path: _Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"TLS: {path}: {error.strerror}") from None
