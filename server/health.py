"""Whether the server is live and ready, and who is told; and what people read at `/`.

Lives here: what the start and end of the server, its models and its ports add up to; asking for it from other threads,
as HTTP does; the page. Must not: decide what any of them is (`models.repository`, `memory.cuda_region`), serve HTTP, or
start or stop anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from html import escape

from paceline.server.fronts.pool import FrontPool
from paceline.server.memory.cuda_region import CudaRegions
from paceline.server.models.load_queue import call_soon
from paceline.server.models.model_lookup import ModelLookup
from paceline.server.models.model_record import IndexLine
from paceline.server.rpc.listener import Listener
from paceline.server.telemetry.metrics import Metrics

_log = logging.getLogger("paceline.server")


class Health:
    """Tells gRPC's health service, the metrics, probes and the log. From `open` to `close` the models decide; before
    and after that the server isn't ready. gRPC's service is told from `admit` on: of several processes that open the
    port, one may have a caller before the last has opened it."""

    def __init__(
        self, repository: ModelLookup, cuda: CudaRegions, metrics: Metrics, service: FrontPool | Listener
    ) -> None:
        self._repository = repository
        self._cuda = cuda
        self._metrics = metrics
        self._service = service
        self._why_closed = "starting"
        self._admits = self._was_ready = False
        self._where = ""

    def admit(self) -> None:
        """Whoever finds the port open may send requests: to be called before it is. On the event loop's thread."""
        self._admits = True
        self._repository.on_change = self._tell
        self._cuda.on_loss = partial(call_soon, asyncio.get_running_loop(), self._tell)
        self._tell()

    def open(self, where: str) -> None:
        """The port is open. `where` is for the log."""
        self._why_closed, self._where = "", where
        self._tell()
        if why_not := self.why_not_ready():
            _log.info("serving, not ready: %s: %s", why_not, where)

    def close(self) -> None:
        """The server is about to stop, or couldn't start."""
        self._why_closed, self._admits = "stopping", False
        self._metrics.set_health(False, 0)
        self._service.set_serving(False)

    def why_not_live(self) -> str:
        """What only a new process can mend; "" if there is nothing."""
        lost = self._cuda.lost and f"CUDA shared memory: {self._cuda.lost}"
        return "; ".join(filter(None, (self._repository.why_not_live, lost)))

    def why_not_ready(self) -> str:
        """Why clients should send nothing for now; "" if they may."""
        nobody = "" if self._service.is_open else "no frontend is listening; another is being started"
        return self._why_closed or self._repository.why_not_ready or nobody

    def probes(self) -> dict[str, LoopProbe]:
        """What answers HTTP probes, by path."""
        loop = asyncio.get_running_loop()
        return {"/livez": LoopProbe(loop, self.why_not_live), "/readyz": LoopProbe(loop, self.why_not_ready)}

    def _tell(self) -> None:
        if not self._admits:
            return
        ready = self._repository.ready
        self._service.set_serving(ready, not self.why_not_live())
        if self._why_closed:
            return
        self._metrics.set_health(ready, len(self._repository.failures))
        if ready and not self._was_ready:
            self._was_ready = True
            _log.info("ready: %s", self._where)


class LoopProbe:
    """Asks `question` on `loop`, from any other thread. If the loop doesn't answer within `patience_s`, the answer is a
    text that says so: the loop is what has to be alive. A probe's `question` returns "" if all is well, else the reason
    why not."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, question: Callable[[], str] = lambda: "", patience_s: float = 5.0
    ) -> None:
        self._loop = loop
        self._question = question
        self._patience_s = patience_s

    def __call__(self) -> str:
        answer: Future[str] = Future()
        try:
            self._loop.call_soon_threadsafe(lambda: answer.set_result(self._question()))
        except RuntimeError:
            return "the server has ended"
        try:
            return answer.result(self._patience_s)
        except TimeoutError:
            return f"the server's event loop has not answered for {self._patience_s:g} s"


_LINKS = {
    "/metrics": "metrics, for Prometheus",
    "/livez": "whether the process should be restarted",
    "/readyz": "whether requests may be sent, or why not",
}


def index_page(title: str, models: Iterable[IndexLine], more: Mapping[str, str]) -> str:
    """The page at `/` of the metrics port, for people who open it: HTML with links, also those of `more`, and a row for
    each line of the repository's index. No scripts or styles from elsewhere, and only what /metrics and RepositoryIndex
    tell."""
    links = "".join(f'<li><a href="{path}">{path}</a>: {what}</li>\n' for path, what in {**_LINKS, **more}.items())
    rows = "".join(
        f"<tr><td>{escape(line.name)}</td><td>{escape(line.version)}</td>"
        f"<td>{line.state.name if line.state else 'not loaded'}</td></tr>\n"
        for line in models
    )
    title = escape(title)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head><body>
<h1>{title}</h1>
<ul>
{links}</ul>
<table>
<tr><th>model</th><th>version</th><th>state</th></tr>
{rows}</table>
<p>Requests go to the gRPC port, not to this one.</p>
</body></html>
"""
