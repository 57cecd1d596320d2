"""Addresses to listen on, as users write them."""

from __future__ import annotations

import socket

import pytest

from server.addresses import host_and_port, is_address, resolve


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
    ],
)
def test_host_and_port_puts_brackets_around_ipv6_only(address: str, text: str) -> None:
    assert host_and_port(address, 81) == text


@pytest.mark.parametrize(
    ("address", "family", "host"),
    [
        ("127.0.0.1", socket.AF_INET, "127.0.0.1"),
        ("0.0.0.0", socket.AF_INET, "0.0.0.0"),
        ("::1", socket.AF_INET6, "::1"),
        ("[::1]", socket.AF_INET6, "::1"),
        ("[::]", socket.AF_INET6, "::"),
    ],
)
def test_resolve_gives_family_host_and_port(address: str, family: int, host: str) -> None:
    assert resolve(address, 81) == (family, (host, 81))


@pytest.mark.parametrize("address", ["256.1.1.1", "[::1", "1.2.3.4.5.", ":::", "a..b", "a" * 64, "a\udcff", "a\0b"])
def test_resolve_raises_oserror_for_an_invalid_address(address: str) -> None:
    with pytest.raises(OSError, match=r"."):
        resolve(address, 81)
