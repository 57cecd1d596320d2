"""HTTP requests to a server's metrics port."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

from tests.integration.serving import Served

__all__ = ["get", "probe"]


def get(port: int | None, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def probe(served: Served, path: str) -> tuple[int, str]:
    return await asyncio.to_thread(get, served.server.metrics_port, path)
