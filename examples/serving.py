"""What the demos share: a server of their own, many clients, and which batches formed."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from paceline.clients import AsyncInferenceClient

CLIENTS = 64
_SERVES = re.compile(r":(\d+), metrics on port (\d+)$")


@contextlib.contextmanager
def serving(repository: Path, *more: str) -> Iterator[tuple[int, int]]:
    """A server process on free ports of this machine; yields the ports, (gRPC, metrics), which its log tells: a port
    that is picked before it starts may be somebody else's by then."""
    command = [sys.executable, "-m", "paceline", "serve", str(repository), "--log-format", "json", *more]
    address = ["--grpc-address", "127.0.0.1", "--grpc-port", "0", "--metrics-port", "0"]
    with subprocess.Popen([*command, *address], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = None
        for line in process.stderr:
            if found := _SERVES.search(_told(line)):
                break
        if found is None:
            raise SystemExit("the server ended before it served")
        rest = threading.Thread(target=_tell, args=(process.stderr,))
        rest.start()
        try:
            yield int(found[1]), int(found[2])
        finally:
            process.terminate()
            rest.join()


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        _told(line)


def _told(line: str) -> str:
    """The message of a line that the server printed. Warnings and errors, and what isn't its log, are printed."""
    entry = json.loads(line) if line.startswith("{") else {"level": "error", "message": line.rstrip()}
    if entry["level"] in ("warning", "error"):
        print(entry["message"], file=sys.stderr)
    return str(entry["message"])


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
