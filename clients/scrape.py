"""A server's metrics, scraped once: what `paceline top` is made of.

Lives here: the metrics' names and reading them. Must not: rates, which take two of these, or printing.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from clients.errors import ClientError
from clients.printable import printable
from clients.tls import Tls
from clients.tokens import authorization

__all__ = ["Histogram", "Model", "ScrapeError", "Scraper", "Snapshot", "parse"]

_MOST_BYTES = 64 * 2**20

Histogram = dict[float, float]
"""Counts by upper bound, each with all below it."""


class ScrapeError(ClientError):
    """There are no metrics to be had from there; the message says why."""


@dataclass(slots=True)
class Model:
    """What a version of a model has done since it was loaded. Times are microseconds."""

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
    """All that a server said at `taken_s` on the monotonic clock. `models` by name and version; `began_s` is when its
    process started, since the epoch. What it doesn't say is None."""

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
    """Asks for the metrics at `url`, an HTTP or HTTPS one, and waits no longer than `timeout_s` for any part of the
    answer. Raises ValueError for files of `tls` that are no good, and for a `token` that is none."""

    def __init__(self, url: str, timeout_s: float, tls: Tls | None = None, token: str | None = None) -> None:
        self.url = url
        self._timeout_s = timeout_s
        handlers = [] if tls is None else [urllib.request.HTTPSHandler(context=tls.context())]
        self._opener = urllib.request.build_opener(*handlers)
        self._headers = [] if token is None else [authorization(token)]

    def scrape(self) -> Snapshot:
        """What the server says now. Raises ScrapeError."""
        url = self.url
        request = urllib.request.Request(url)
        for key, value in self._headers:
            # A server that sends us elsewhere must not have our token go there.
            request.add_unredirected_header(key, value)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                text = response.read(_MOST_BYTES).decode()
            return parse(text, time.monotonic())
        except urllib.error.HTTPError as error:
            with error:
                raise ScrapeError(f"no metrics at {url}: HTTP status {error.code}") from None
        except urllib.error.URLError as error:
            raise ScrapeError(f"no answer from {url}: {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ScrapeError(f"no answer from {url}: {printable(str(error)) or type(error).__name__}") from None
        except ValueError as error:
            raise ScrapeError(f"no metrics at {url}: {printable(str(error))}") from None


def parse(text: str, taken_s: float) -> Snapshot:
    """Read Prometheus' text format. Raises ValueError if it isn't that, or another program's."""
    from prometheus_client.parser import text_string_to_metric_families  # which no other command needs

    snapshot = Snapshot(taken_s)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The library gives every counter this ending, whether it has it or not.
            _add(snapshot, sample.name.removesuffix("_total"), sample.labels, sample.value)
    if snapshot.ready is None and not snapshot.models:
        raise ValueError("expected those of a paceline server")
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
