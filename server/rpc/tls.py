"""TLS: the server's certificate, the root for clients' certificates, and replacing them while the server runs.

Lives here: reading the files, and rereading them when they have changed. Must not: know who uses a connection.

gRPC asks for certificates before each handshake, on its own thread. Existing connections stay: a certificate matters
only when a connection begins.
"""

from __future__ import annotations

import logging
import ssl
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from paceline.server.errors import StartError
from paceline.server.files import WatchedFiles, check_file, why

_log = logging.getLogger("paceline.server.tls")

_OUT_OF_DATE = frozenset({9, 10})
"""OpenSSL's codes for a certificate that isn't valid yet, and for one that has expired (x509_vfy.h)."""
_FLIGHTS = 4
"""A handshake takes fewer; bounds the loop."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's certificate, with its intermediates, and its key, without a password. `mutual`: clients
    need a certificate too, signed by one of `roots`."""

    certificate: Path
    key: Path
    roots: Path | None = None
    mutual: bool = False

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.certificate, self.key, *([self.roots] if self.roots is not None else []))


class Certificates:
    """The certificates in `files`, as they are when a client connects. Files that don't fit together are not used:
    whoever replaces one and then the other isn't refused connections in between."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._watched = WatchedFiles(*files.paths)

    def credentials(self) -> grpc.ServerCredentials:
        """What gRPC's server needs. Raises StartError for files that can't be used."""
        try:
            self._watched.have_changed()
            first = self._read()
        except (OSError, ValueError) as error:
            raise StartError(f"TLS: {why(error)}") from None
        # The stubs don't allow None, which gRPC documents as "no change".
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._if_changed)
        return grpc.dynamic_ssl_server_credentials(first, fetch, self._files.mutual)

    def warn(self) -> None:
        """Log warnings about what is no error but not good either: a key that every user can read, and a certificate
        out of date. The clock may be what is wrong, and a server that doesn't start would be no better."""
        key = self._files.key
        if key.stat().st_mode & stat.S_IROTH:
            _log.warning("TLS: every user of this machine can read the key %s; prevent that with chmod o-r", key)
        self._warn_of_dates()

    def _warn_of_dates(self) -> None:
        """Log a warning if the certificate is out of date. Raises OSError and ValueError for files that can't be used
        (any more)."""
        if why := _why_out_of_date(_context(self._files), self._files.certificate):
            _log.warning("TLS: %s: %s; clients will refuse to connect", self._files.certificate, why)

    def _if_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates, if they aren't those that gRPC has, else None. Called on any thread, before each
        handshake."""
        with self._lock:
            try:
                if not self._watched.have_changed():
                    return None
                changed = self._read()
                if self._watched.have_changed():
                    # The files are being written, and what was read may not belong together.
                    self._watched = WatchedFiles(*self._files.paths)
                    return None
                self._warn_of_dates()
            except (OSError, ValueError) as error:
                self._watched.look_again(error)
                _log.error("TLS: the new certificates can't be used, the old ones stay in use: %s", why(error))
                return None
            _log.info("TLS: new certificates are in use, from %s", self._files.certificate)
            return changed

    def _read(self) -> grpc.ServerCertificateConfiguration:
        """The certificates, read and checked. Raises OSError, which includes ssl.SSLError, and ValueError. gRPC itself
        would notice only during handshakes, and tell nobody what is wrong."""
        files = self._files
        for path in files.paths:
            check_file(path)
        # Read them first, as ssl wouldn't say which of them can't be read.
        pair = files.key.read_bytes(), files.certificate.read_bytes()
        roots = None if files.roots is None else files.roots.read_bytes()
        context = _context(files)
        if files.roots is not None:
            try:
                context.load_verify_locations(files.roots)
            except ssl.SSLError as error:
                raise ValueError(f"expected certificates as PEM in {files.roots}: {error.reason or error}") from None
        return grpc.ssl_server_certificate_configuration([pair], roots)


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password given, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")
    except ssl.SSLError as error:
        raise ValueError(
            f"expected a certificate in {files.certificate} and its key, without a password, in {files.key}, "
            f"both as PEM: {error.reason or error}"
        ) from None
    return context


def _why_out_of_date(server: ssl.SSLContext, certificate: Path) -> str:
    """Why a client that trusts `certificate` rejects its dates; empty if it doesn't. Clients decide, so one is asked:
    Python's ssl doesn't reveal the dates of a certificate except through a handshake."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certificate)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # who has signed it doesn't matter
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for end in ends * _FLIGHTS:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue  # it is the other end's turn
        except ssl.SSLCertVerificationError as error:
            return error.verify_message if error.verify_code in _OUT_OF_DATE else ""
        except ssl.SSLError:
            return ""  # for instance a key that OpenSSL finds too weak: not about dates
    return ""
