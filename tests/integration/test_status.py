"""`/status` on the metrics port: off unless asked for, and what a real browser makes of it."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path

import pytest

from paceline.backends.errors import ExecutionError
from paceline.server.config import Settings
from tests.browser import browser, look
from tests.integration.probing import get, probe
from tests.integration.serving import Served, echo_model, failure_of, serving, write_model
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats


async def test_status_is_off_by_default_and_says_how_to_get_it(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}) as served:
        assert await probe(served, "/status") == (404, "this page is off: --status-page true switches it on\n")
        assert "/status" not in (await probe(served, "/"))[1]


async def test_status_can_be_read_only_and_is_never_kept(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=Settings((tmp_path,), status_page=True)) as served:
        port = served.server.metrics_port
        for method, code in {"HEAD": 200, "POST": 501, "PUT": 501, "DELETE": 501, "OPTIONS": 501}.items():
            assert (await asyncio.to_thread(get, port, "/status", method))[0] == code
        response = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/status", timeout=60)
        with response:
            assert response.headers["Content-Type"] == "text/html; charset=utf-8"
            assert response.headers["Cache-Control"] == "no-store"
            policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
        assert policy.pop("style-src") == "'unsafe-inline'"
        assert set(policy) == {"default-src", "base-uri", "form-action", "frame-ancestors"}
        assert set(policy.values()) == {"'none'"}
        assert 'href="/status"' in (await probe(served, "/"))[1]


@pytest.mark.skipif(browser() is None, reason="Chromium isn't installed: make witness-browser")
async def test_browser_shows_what_a_loaded_server_does(tmp_path: Path) -> None:
    model, name = echo_model(), "<script>document.title='x'<script>"
    write_model(tmp_path, name)
    settings = Settings((tmp_path,), status_page=True, status_interval_s=0.2, frontends=2)
    async with serving(tmp_path, {"m": model, name: echo_model()}, settings=settings) as served:
        model.faults.raise_next(ExecutionError("no"))
        await failure_of(served.infer(infer("m", {"a": rows_of_floats(2)})))
        loading = asyncio.create_task(_load(served))
        host = f"127.0.0.1:{served.server.metrics_port}"
        await eventually_async(lambda: len(model.batches) > 100, "some batches")
        seen = await asyncio.to_thread(look, f"http://{host}/status")
        loading.cancel()
    assert (seen.console, seen.hosts) == ([], {host})
    assert "<title>paceline " in seen.document
    assert "&lt;script&gt;document.title='x'&lt;script&gt;" in seen.document
    (rates,) = re.findall(r'<th scope="row"><a href="#m1">m</a></th><td>1</td><td>([\d.]+)</td>', seen.document)
    assert float(rates) > 0
    assert "<small>BACKEND</small> 0.0" in seen.document
    assert re.search(r"<figcaption>Rows/batch <span>max 2.0</span>", seen.document)


async def _load(served: Served) -> None:
    while True:
        await served.infer(infer("m", {"a": rows_of_floats(2)}))
