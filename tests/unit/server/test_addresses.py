"""Addresses to listen on, as users write them."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest

from paceline.server.addresses import host_and_port, is_address, listen, resolve, socket_path


@pytest.mark.parametrize("text", ["0.0.0.0", "localhost", "a-b.example", "::1", "[::1]", "::", "fe80::1%eth0"])
def test_names_and_ip_addresses_are_addresses(text: str) -> None:
    assert is_address(text)


@pytest.mark.parametrize(
    "text", ["", " ", "unix:/run/p.sock", "dns:///a", "a:80", "127.0.0.1:80", "[::1]:80", "[a]", "http://a", "::1\0"]
)
def test_malformed_text_or_one_with_a_scheme_or_a_port_is_no_address(text: str) -> None:
    assert not is_address(text)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("0.0.0.0", "0.0.0.0:81"),
        ("localhost", "localhost:81"),
        ("::1", "[::1]:81"),
        ("[::1]", "[::1]:81"),
        ("::", "[::]:81"),
        ("fe80::1%eth0", "[fe80::1%eth0]:81"),
        ("unix:/run/p.sock", "unix:/run/p.sock"),
    ],
)
def test_host_and_port_puts_brackets_around_ipv6_only(address: str, text: str) -> None:
    assert host_and_port(address, 81) == text


@pytest.mark.parametrize(
    ("address", "family", "host"),
    [
        ("127.0.0.1", socket.AF_INET, "127.0.0.1"),
        ("::1", socket.AF_INET6, "::1"),
        ("[::1]", socket.AF_INET6, "::1"),
    ],
)
def test_resolve_gives_family_host_and_port(address: str, family: int, host: str) -> None:
    ((found, where),) = resolve(address, 81)
    assert (found, where[:2]) == (family, (host, 81))


@pytest.mark.parametrize("address", ["256.1.1.1", "[::1", "1.2.3.4.5.", ":::", "a..b", "a" * 64, "a\udcff", "a\0b"])
def test_resolve_raises_oserror_for_an_invalid_address(address: str) -> None:
    with pytest.raises(OSError, match=r"."):
        resolve(address, 81)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "[::]", "localhost"])
def test_listen_takes_what_grpc_takes_for_the_same_address(address: str) -> None:
    grpcs = grpc.server(ThreadPoolExecutor(1))
    port = grpcs.add_insecure_port(host_and_port(address, 0))
    grpcs.start()
    ours = listen(address, 0)
    assert reachable(ours[0].getsockname()[1]) == reachable(port) != []
    grpcs.stop(None).wait()
    for one in ours:
        one.close()


def test_listen_again_on_all_addresses_refuses_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="Address already in use"):
        listen("::", taken.getsockname()[1])


def reachable(port: int) -> list[str]:
    """The loopback addresses on which somebody listens on `port`."""
    found = []
    for host in ("127.0.0.1", "::1"):
        with suppress(OSError):
            socket.create_connection((host, port), timeout=10).close()
            found.append(host)
    return found


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("unix:/run/p.sock", "/run/p.sock"),
        ("unix:///run/p.sock", "/run/p.sock"),
        ("unix:p.sock", "p.sock"),
        ("unix:/a%20b", "/a b"),
        ("unix", None),
        ("::1", None),
        ("unix.example", None),
    ],
)
def test_socket_path_is_read_as_grpc_reads_it(address: str, path: str | None) -> None:
    assert socket_path(address) == path
