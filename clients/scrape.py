"""A server's metrics, scraped once, for `paceline top`.

Lives here: the metrics' names and reading them. Must not: rates, which take two of these, or printing.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.clients.errors import ClientError
from paceline.clients.printable import printable
from paceline.clients.tls import Tls
from paceline.clients.tokens import authorization

__all__ = ["Histogram", "Model", "ScrapeError", "Scraper", "Snapshot", "parse"]

_MAX_BYTES = 64 * 2**20

Histogram = dict[float, float]
"""Cumulative counts by upper bound."""


class ScrapeError(ClientError):
    """No metrics could be read; the message says why."""


@dataclass(slots=True)
class Model:
    """What a version of a model has done since it was loaded, and how many requests wait now. Times are in
    microseconds."""

    succeeded: float = 0
    failed: float = 0
    rows: float = 0
    batches: float = 0
    waiting: float = 0
    compute_us: float = 0
    queue: Histogram = field(default_factory=dict)
    duration: Histogram = field(default_factory=dict)


@dataclass(slots=True)
class Snapshot:
    """What a server's metrics said at `taken_s`, in seconds on the monotonic clock.

    `models` is by name and version; `began_s` is when its process started, in seconds since the epoch. What the metrics
    don't say is None.
    """

    taken_s: float
    models: dict[tuple[str, str], Model] = field(default_factory=dict)
    ready: bool | None = None
    began_s: float | None = None
    cpu_s: float | None = None
    memory_bytes: float | None = None


_NUMBERS = {
    "nv_inference_request_success": "succeeded",
    "nv_inference_count": "rows",
    "nv_inference_exec_count": "batches",
    "nv_inference_pending_request_count": "waiting",
}
_HISTOGRAMS = {"paceline_queue_wait_us_bucket": "queue", "paceline_request_duration_us_bucket": "duration"}
_OF_PROCESS = {
    "process_start_time_seconds": "began_s",
    "process_cpu_seconds": "cpu_s",
    "process_resident_memory_bytes": "memory_bytes",
}


class Scraper:
    """Asks for the metrics at `url`, an HTTP or HTTPS one.

    It waits no longer than `timeout_s` seconds for any part of the answer. Raises ValueError for `tls` files that can't
    be used, and ValueError or TypeError for what isn't a token.
    """

    def __init__(self, url: str, timeout_s: float, tls: Tls | None = None, token: str | None = None) -> None:
        self.url = url
        self._timeout_s = timeout_s
        handlers = [] if tls is None else [urllib.request.HTTPSHandler(context=tls.context())]
        self._opener = urllib.request.build_opener(*handlers)
        self._headers = [] if token is None else [authorization(token)]

    def scrape(self) -> Snapshot:
        """The server's metrics now. Raises ScrapeError."""
        url = self.url
        request = urllib.request.Request(url)
        for key, value in self._headers:
            # If the server redirects elsewhere, the token must not go there.
            request.add_unredirected_header(key, value)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                text = response.read(_MAX_BYTES).decode()
            return parse(text, time.monotonic())
        except urllib.error.HTTPError as error:
            with error:
                raise ScrapeError(f"no metrics at {url}: HTTP status {error.code}") from None
        except urllib.error.URLError as error:
            raise ScrapeError(f"no answer from {url}: {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            what = printable(str(error)) or type(error).__name__
            if isinstance(error, http.client.BadStatusLine) and str(error).startswith("\0"):  # as HTTP/2 does
                what = "this looks like a gRPC port; metrics are usually on 8002"
            raise ScrapeError(f"no answer from {url}: {what}") from None
        except ValueError as error:
            raise ScrapeError(f"no metrics at {url}: {printable(str(error))}") from None


def parse(text: str, taken_s: float) -> Snapshot:
    """Read Prometheus' text format. Raises ValueError if `text` isn't in it, or doesn't come from a paceline server."""
    from prometheus_client.parser import text_string_to_metric_families  # which no other command needs

    snapshot = Snapshot(taken_s)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The library gives every counter this suffix, whether it has it or not.
            _add(snapshot, sample.name.removesuffix("_total"), sample.labels, sample.value)
    if snapshot.ready is None and not snapshot.models:
        raise ValueError("expected metrics of a paceline server")
    return snapshot


def _add(snapshot: Snapshot, name: str, labels: Mapping[str, str], value: float) -> None:
    if name in _OF_PROCESS:
        setattr(snapshot, _OF_PROCESS[name], value)
    elif name == "paceline_ready":
        snapshot.ready = bool(value)
    elif "model" in labels and "version" in labels:
        _add_of_model(snapshot, name, labels, value)


def _add_of_model(snapshot: Snapshot, name: str, labels: Mapping[str, str], value: float) -> None:
    model = snapshot.models.setdefault((labels["model"], labels["version"]), Model())
    if name in _NUMBERS:
        setattr(model, _NUMBERS[name], value)
    elif name == "nv_inference_request_failure":
        model.failed += value
    elif name in _HISTOGRAMS and "le" in labels:
        getattr(model, _HISTOGRAMS[name])[float(labels["le"])] = value
    elif name.startswith("nv_inference_compute_"):
        model.compute_us += value
