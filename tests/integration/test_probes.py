"""`/livez` and `/readyz` on the metrics port, and the gauges beside them, through a server's life."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from pathlib import Path
from threading import Event, Thread

import pytest

from paceline.backends.base import Device, ModelSource
from paceline.server.app import Server
from paceline.server.config import Settings
from paceline.server.health import LoopProbe
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.metrics_endpoint import MetricsEndpoint
from tests.integration.controlling import explicit, load, unload
from tests.integration.probing import get, probe
from tests.integration.serving import echo_model, failure_of, serving, write_model
from tests.memory_models import MemoryBackend, MemoryModel
from tests.polling import eventually_async
from tests.ports import free_port
from tests.wire import infer, rows_of_floats


async def test_serving_server_is_live_and_ready(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}) as served:
        assert await probe(served, "/livez") == await probe(served, "/readyz") == (200, "ok\n")
        assert await asyncio.to_thread(get, served.server.metrics_port, "/readyz", "HEAD") == (200, "")
        assert (await served.metrics())["paceline_ready"] == 1
        assert (await served.metrics())["paceline_failed_models"] == 0


async def test_server_with_a_failed_model_is_live_but_not_ready_and_names_it(tmp_path: Path) -> None:
    write_model(tmp_path, "bad", "no_such_field: 1")
    async with serving(tmp_path, {"m": echo_model()}) as served:
        assert await probe(served, "/livez") == (200, "ok\n")
        assert await probe(served, "/readyz") == (503, "models failed to load: 'bad'\n")
        metrics = await served.metrics()
        assert (metrics["paceline_ready"], metrics["paceline_failed_models"]) == (0, 1)


async def test_log_states_the_ports_and_whether_the_server_is_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "bad", "no_such_field: 1")

    def said() -> list[str]:
        return [line.partition(":")[0] for line in caplog.messages if "gRPC on" in line]

    with caplog.at_level(logging.INFO, "paceline.server"):
        async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path, load=("*",))) as served:
            ports = f"gRPC on {served.target}, metrics on port {served.server.metrics_port}"
            assert f"serving, not ready: models failed to load: 'bad': {ports}" in caplog.messages
            assert said() == ["serving, not ready"]
            await unload(served, "bad")
            assert f"ready: {ports}" in caplog.messages
            await failure_of(load(served, "bad"))
            await unload(served, "bad")
    assert said() == ["serving, not ready", "ready"]
    caplog.clear()
    with caplog.at_level(logging.INFO, "paceline.server"):
        async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path, load=("m",))):
            assert said() == ["ready"]


async def test_page_has_links_and_models_with_states(tmp_path: Path) -> None:
    write_model(tmp_path, "bad", "no_such_field: 1")
    async with serving(tmp_path, {"m": echo_model()}) as served:
        status, text = await probe(served, "/")
        links = re.findall(r'href="(.*?)"', text)
        assert (status, links) == (200, ["/metrics", "/livez", "/readyz"])
        assert "<td>m</td><td>1</td><td>READY</td>" in text
        assert "<td>bad</td><td></td><td>UNAVAILABLE</td>" in text
        assert await asyncio.to_thread(get, served.server.metrics_port, "/", "HEAD") == (200, "")


async def test_readiness_probe_names_a_failed_model_whose_name_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xe9") / "1").mkdir(parents=True)
    async with serving(tmp_path, {"m": echo_model()}) as served:
        assert await probe(served, "/readyz") == (503, "models failed to load: '\\udce9'\n")


async def test_failed_load_makes_the_server_unready_until_the_model_is_unloaded(tmp_path: Path) -> None:
    write_model(tmp_path, "m", "no_such_field: 1")
    async with serving(tmp_path, settings=explicit(tmp_path)) as served:
        assert await probe(served, "/readyz") == (200, "ok\n")
        await failure_of(load(served, "m"))
        assert await probe(served, "/readyz") == (503, "models failed to load: 'm'\n")
        assert (await served.metrics())["paceline_ready"] == 0
        await unload(served, "m")
        assert await probe(served, "/readyz") == (200, "ok\n")
        assert (await served.metrics())["paceline_ready"] == 1


async def test_stopping_server_is_live_but_not_ready_while_it_answers_accepted_requests(tmp_path: Path) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}) as served:
        model.gate.close()
        call = asyncio.create_task(served.infer(infer("m", {"a": rows_of_floats(1)})))
        await eventually_async(lambda: model.batches, "an execution")
        stopping = asyncio.create_task(served.server.stop(20))
        await asyncio.sleep(0)  # the stop begins
        assert await probe(served, "/livez") == (200, "ok\n")
        assert await probe(served, "/readyz") == (503, "stopping\n")
        assert (await served.metrics())["paceline_ready"] == 0
        model.gate.open()
        await call
        assert await stopping


class Slow(MemoryBackend):
    """A backend that opens no model before `go_on` is set."""

    asked, go_on = Event(), Event()

    def open(self, source: ModelSource, device: Device) -> MemoryModel:
        self.asked.set()
        assert self.go_on.wait(20)
        return super().open(source, device)


async def test_server_is_live_but_not_ready_and_its_port_closed_while_loading(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    backend = Slow({"m": echo_model()})
    address = ("127.0.0.1", free_port())
    settings = Settings(paths=(tmp_path,), grpc_address=address[0], grpc_port=address[1], metrics_port=0)
    server = Server(settings, lambda name: backend)
    starting = asyncio.create_task(server.start())
    try:
        await eventually_async(lambda: server.metrics_port, "the metrics port")
        assert await asyncio.to_thread(get, server.metrics_port, "/livez") == (200, "ok\n")
        assert await asyncio.to_thread(get, server.metrics_port, "/readyz") == (503, "starting\n")
        assert await asyncio.to_thread(backend.asked.wait, 20)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=20)
    finally:
        backend.go_on.set()
        await starting
    assert await asyncio.to_thread(get, server.metrics_port, "/readyz") == (200, "ok\n")
    socket.create_connection(address, timeout=20).close()
    await server.stop(5)


def test_hanging_loop_is_not_live() -> None:
    loop, hangs, go_on = asyncio.new_event_loop(), Event(), Event()
    thread = Thread(target=loop.run_forever)
    thread.start()
    probes = {"/livez": LoopProbe(loop), "/hasty": LoopProbe(loop, patience_s=0.05)}
    endpoint = MetricsEndpoint(Metrics(), "127.0.0.1", 0, probes)
    try:
        assert get(endpoint.port, "/livez") == (200, "ok\n")
        loop.call_soon_threadsafe(lambda: (hangs.set(), go_on.wait()))
        assert hangs.wait(10)
        assert get(endpoint.port, "/hasty") == (503, "the server's event loop has not answered for 0.05 s\n")
        go_on.set()
        assert LoopProbe(loop)() == ""
    finally:
        go_on.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert get(endpoint.port, "/livez") == (503, "the server has ended\n")
    endpoint.close()


def test_unknown_probe_path_is_404() -> None:
    endpoint = MetricsEndpoint(Metrics(), "127.0.0.1", 0)
    assert get(endpoint.port, "/livez")[0] == 404
    endpoint.close()
