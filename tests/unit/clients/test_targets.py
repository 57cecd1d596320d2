"""Targets of clients, as users write them."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from paceline.clients import AsyncInferenceClient, InferenceClient
from paceline.clients.connection import checked_target, with_port
from paceline.server.cli import main


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("127.0.0.1", "127.0.0.1:8001"),
        ("localhost", "localhost:8001"),
        ("models.example", "models.example:8001"),
        ("::1", "[::1]:8001"),
        ("[::1]", "[::1]:8001"),
        ("fe80::1%eth0", "[fe80::1%eth0]:8001"),
        ("127.0.0.1:443", "127.0.0.1:443"),
        ("[::1]:9000", "[::1]:9000"),
        ("dns:///models.example", "dns:///models.example"),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", "ipv4:127.0.0.1:1,127.0.0.1:2"),
        ("unix:/run/p.sock", "unix:/run/p.sock"),
        ("unix:p.sock", "unix:p.sock"),
        ("unix-abstract:p", "unix-abstract:p"),
    ],
)
def test_target_without_a_port_gets_grpcs(given: str, target: str) -> None:
    assert checked_target("target", given, "tls=True") == target


def test_address_without_a_port_gets_the_one_that_is_usual() -> None:
    assert [with_port(given, 8002) for given in ("h", "::1", "h:1")] == ["h:8002", "[::1]:8002", "h:1"]


@pytest.mark.parametrize("client", [InferenceClient, AsyncInferenceClient])
def test_clients_for_a_mere_host_use_grpcs_port(client: Any) -> None:
    assert repr(client("localhost")) == f"{client.__name__}('localhost:8001')"


@pytest.mark.parametrize("command", [["health"], ["infer", "m"]])
@pytest.mark.parametrize(
    ("server", "text"),
    [
        ("https://h:1", "'https://h:1': leave out the scheme; --tls selects TLS"),
        ("h:99999", "'h:99999', whose port is above 65535"),
        ("", "''"),
    ],
)
def test_command_with_an_unusable_server_speaks_of_its_flags(command: list[str], server: str, text: str) -> None:
    result = CliRunner().invoke(main, [*command, "--server", server])
    assert result.exit_code == 2
    assert result.stderr == f"Error: --server: expected a gRPC name such as '127.0.0.1:8001', got {text}\n"
