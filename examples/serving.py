"""What the demos share: a server of their own, many clients, and which batches formed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from paceline.clients import AsyncInferenceClient

CLIENTS = 64


@contextlib.contextmanager
def serving(repository: Path, *more: str) -> Iterator[tuple[int, int]]:
    """A server process on free ports of this machine; yields the ports, (gRPC, metrics)."""
    grpc_port, metrics_port = free_port(), free_port()
    command = [sys.executable, "-m", "paceline", "serve", str(repository), "--log-level", "warning", *more]
    address = ["--grpc-address", "127.0.0.1", "--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)]
    process = subprocess.Popen([*command, *address])
    try:
        yield grpc_port, metrics_port
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.asynccontextmanager
async def clients(grpc_port: int) -> AsyncIterator[list[AsyncInferenceClient]]:
    """`CLIENTS` clients with a connection each, once the server is ready."""
    async with contextlib.AsyncExitStack() as stack:
        many = [await stack.enter_async_context(AsyncInferenceClient(f"127.0.0.1:{grpc_port}")) for _ in range(CLIENTS)]
        await many[0].wait_ready(60)
        yield many


def batch_sizes(metrics_port: int, model: str) -> tuple[list[tuple[str, int]], float]:
    """How many batches had up to how many rows, from the server's own metrics, and the mean number of rows per
    batch."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as response:
        families = {family.name: family for family in text_string_to_metric_families(response.read().decode())}
    samples = [one for one in families["paceline_batch_rows"].samples if one.labels["model"] == model]
    below = [(sample.labels["le"], int(sample.value)) for sample in samples if sample.name.endswith("_bucket")]
    counts = [(edge, count - before) for (edge, count), (_, before) in zip(below, [("", 0), *below], strict=False)]
    values = {sample.name.rpartition("_")[2]: sample.value for sample in samples}
    return [(edge, count) for edge, count in counts if count], values["sum"] / values["count"]


def show_batches(sizes: list[tuple[str, int]], mean: float) -> None:
    print(f"batches that formed, {mean:.1f} rows in the mean:")
    for edge, count in sizes:
        print(f"  up to {float(edge):4.0f} rows: {count:4d}  {'#' * min(count, 60)}")
