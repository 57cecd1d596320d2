"""Servers started and stopped in the test's process, on the addresses that users give."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from pathlib import Path

import pytest

from paceline.clients import AsyncInferenceClient
from paceline.server.app import Server
from paceline.server.config import Settings
from paceline.server.errors import StartError
from tests.harness import has_ipv6, write_identity
from tests.polling import eventually
from tests.ports import free_port


def settings(path: Path, **more: object) -> Settings:
    return Settings(paths=(path,), **{"grpc_address": "127.0.0.1", "grpc_port": 0, "metrics_port": 0, **more})  # type: ignore[arg-type]


def own_threads() -> set[str]:
    """Names of all threads except those that an event loop keeps for reuse."""
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


def scrape(url: str) -> int:
    with urllib.request.urlopen(url, timeout=60) as response:
        status: int = response.status
    return status


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["::1", "[::1]"])
async def test_server_on_ipv6_answers_calls_and_scrapes(tmp_path: Path, address: str) -> None:
    write_identity(tmp_path)
    server = Server(settings(tmp_path, grpc_address=address))
    await server.start()
    try:
        async with AsyncInferenceClient(f"[::1]:{server.grpc_port}") as client:
            assert await client.server_ready()
        assert await asyncio.to_thread(scrape, f"http://[::1]:{server.metrics_port}/metrics") == 200
    finally:
        await server.stop(1)


@pytest.mark.parametrize("frontends", [1, 2])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_default_address_means_the_same_for_both_ports(tmp_path: Path, host: str, frontends: int) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    write_identity(tmp_path)
    server = Server(settings(tmp_path, grpc_address=Settings(()).grpc_address, frontends=frontends))
    await server.start()
    try:
        for port in (server.grpc_port, server.metrics_port):
            socket.create_connection((host, port or 0), timeout=20).close()
    finally:
        await server.stop(1)


async def test_server_without_metrics_opens_no_port_for_them(tmp_path: Path) -> None:
    write_identity(tmp_path)
    server = Server(settings(tmp_path, metrics_port=None))
    await server.start()
    assert server.metrics_port is None
    assert await server.stop(1)


async def test_server_with_a_separate_address_for_metrics(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with socket.socket() as silent:  # has the port on the other address, so that nobody listens there
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        server = Server(settings(tmp_path, metrics_address="127.0.0.2", metrics_port=port))
        await server.start()
        try:
            assert await asyncio.to_thread(scrape, f"http://127.0.0.2:{port}/metrics") == 200
            with pytest.raises(OSError, match="refused"):
                await asyncio.to_thread(scrape, f"http://127.0.0.1:{port}/metrics")
        finally:
            await server.stop(1)


async def test_failed_start_leaves_no_thread_and_no_port(tmp_path: Path) -> None:
    write_identity(tmp_path, "good")
    (tmp_path / "bad").mkdir()
    before = own_threads()
    port = free_port()
    server = Server(settings(tmp_path, exit_on_error=True, metrics_port=port))
    with pytest.raises(StartError):
        await server.start()
    socket.create_server(("127.0.0.1", port)).close()
    eventually(lambda: own_threads() <= before, "no threads left")


async def test_start_stop_and_start_again_on_the_same_ports(tmp_path: Path) -> None:
    write_identity(tmp_path)
    port = free_port(2)
    for _ in range(2):
        server = Server(settings(tmp_path, grpc_port=port, metrics_port=port + 1))
        await server.start()
        assert (server.grpc_port, server.metrics_port) == (port, port + 1)
        assert await server.stop(1)


async def test_stop_without_start_does_nothing(tmp_path: Path) -> None:
    assert await Server(settings(tmp_path)).stop(1)


async def test_stop_twice_is_harmless(tmp_path: Path) -> None:
    write_identity(tmp_path)
    server = Server(settings(tmp_path))
    await server.start()
    assert await server.stop(1)
    assert await server.stop(1)


async def test_servers_in_one_process_share_nothing(tmp_path: Path) -> None:
    write_identity(tmp_path / "one", "a")
    write_identity(tmp_path / "two", "b")
    servers = [Server(settings(tmp_path / name, server_id=name)) for name in ("one", "two")]
    for server in servers:
        await server.start()
    try:
        for server, name, model in zip(servers, ("one", "two"), ("a", "b"), strict=True):
            async with AsyncInferenceClient(f"127.0.0.1:{server.grpc_port}") as client:
                assert (await client.server_metadata()).name == name
                assert await client.model_ready(model)
    finally:
        for server in servers:
            await server.stop(1)
