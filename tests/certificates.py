"""Certificates for tests, made by the machine's `openssl`.

Lives here: authorities, and the certificates that they sign. Must not: assertions about behaviour.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path

__all__ = ["Authority", "Pair"]

_REQUEST = ("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_NEW = (*_REQUEST, "-x509", "-days", "2")
_REGISTER = """
[ca]
default_ca = it
[it]
new_certs_dir = {folder}
database = {folder}/register
default_md = sha256
policy = who
rand_serial = yes
copy_extensions = copy
[who]
commonName = supplied
"""
_NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path

    def replace(self, other: Pair) -> None:
        """Overwrite the two files with those of `other`, one after the other."""
        self.certificate.write_bytes(other.certificate.read_bytes())
        self.key.write_bytes(other.key.read_bytes())


class Authority:
    """Signs certificates, which are stored in `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
        _run(*_NEW, "-subj", f"/CN={name}", "-keyout", self.pair.key, "-out", self.pair.certificate)

    @property
    def roots(self) -> Path:
        return self.pair.certificate

    def sign(self, name: str) -> Pair:
        """A certificate for a server at 127.0.0.1 and localhost, or for a client that calls from there."""
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        signer = ("-CA", self.pair.certificate, "-CAkey", self.pair.key)
        names = ("-addext", _NAMES, "-addext", "basicConstraints=CA:FALSE")
        _run(*_NEW, *signer, "-subj", f"/CN={name}", *names, "-keyout", pair.key, "-out", pair.certificate)
        return pair

    def sign_expired(self, name: str) -> Pair:
        """The same, expired since yesterday."""
        return self._sign_between(name, -2, -1)

    def sign_for_tomorrow(self, name: str) -> Pair:
        """The same, valid from tomorrow."""
        return self._sign_between(name, 1, 4)

    def _sign_between(self, name: str, first_day: int, last_day: int) -> Pair:
        """The same, valid between two days, counted from now."""
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        request, settings = self._folder / f"{name}.csr", self._folder / f"{name}.cnf"
        _run(*_REQUEST, "-subj", f"/CN={name}", "-addext", _NAMES, "-keyout", pair.key, "-out", request)
        settings.write_text(_REGISTER.format(folder=self._folder))
        (self._folder / "register").touch()
        days = ((datetime.now(UTC) + timedelta(days=day)).strftime("%Y%m%d%H%M%SZ") for day in (first_day, last_day))
        dates = zip(("-startdate", "-enddate"), days, strict=True)
        signer = ("-config", settings, "-cert", self.pair.certificate, "-keyfile", self.pair.key)
        _run("openssl", "ca", "-batch", *signer, *chain(*dates), "-in", request, "-out", pair.certificate)
        return pair

    def lock(self, pair: Pair) -> None:
        """Put a password on its key."""
        locked = self._folder / "locked.key"
        _run("openssl", "pkey", "-in", pair.key, "-aes256", "-passout", "pass:secret", "-out", locked)
        locked.replace(pair.key)

    def spoil(self, path: Path, how: str, pair: Pair) -> None:
        """Make a file unusable: "missing" deletes it, "piped" makes it a pipe, "bad" isn't PEM, "other" holds another
        certificate's key, and "locked" puts a password on the key of `pair`."""
        if how == "missing":
            path.unlink()
        elif how == "piped":
            path.unlink()
            os.mkfifo(path)
        elif how == "bad":
            path.write_text("-----BEGIN NOTHING-----")
        elif how == "other":
            path.write_bytes(self.sign("other").key.read_bytes())
        else:
            self.lock(pair)


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
