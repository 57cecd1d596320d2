"""TLS for clients: the files, checked before they are used.

Lives here: which authorities are trusted, which certificate is presented, and what gRPC and HTTP need for both. Must
not: open connections.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

__all__ = ["Tls"]

_Path = str | os.PathLike[str]


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
        try:
            if self.ca is None:
                context.load_default_certs()
            else:
                context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise ValueError(f"TLS: expected certificates as PEM in {self.ca}: {error.reason or error}") from None
        if self.certificate is not None:
            self._load_own(context)
        return context

    def _load_own(self, context: ssl.SSLContext) -> None:
        assert self.certificate is not None
        try:
            # Without a password given, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except ssl.SSLError as error:
            raise ValueError(
                f"TLS: expected a certificate in {self.certificate} and its key, without a password, in {self.key}, "
                f"both as PEM: {error.reason or error}"
            ) from None


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
