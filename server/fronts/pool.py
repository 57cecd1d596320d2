"""The fronts as the engine sees them: processes that are started, informed, replaced when they die, and ended.

Lives here: processes, the port that they share, what all of them are told. Must not: requests (`session`). To
`server.app` a `FrontPool` is what a `Listener` is in a server of one process.

A front inherits its descriptors and nothing else: what it is to do comes over the link. It ends when the link does, so
that none outlives the engine, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import reduce
from typing import Protocol

from paceline.backends.python.process import how_ended
from paceline.backends.transport.link import Link
from paceline.backends.transport.parcel import Message
from paceline.server.addresses import host_and_port, resolve
from paceline.server.codec.wire_request import RequestReader
from paceline.server.config import Settings
from paceline.server.errors import StartError
from paceline.server.fronts.process import Greeting
from paceline.server.fronts.protocol import Kind
from paceline.server.fronts.session import FrontSession, Handlers
from paceline.server.models.model_lookup import ModelLookup
from paceline.server.requests.inference import Inference
from paceline.server.rpc.gate import Usage
from paceline.server.telemetry import log
from paceline.server.telemetry.metrics import Family

_log = logging.getLogger("paceline.server.fronts")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
"""Between the death of a front and the next start; twice as long each time that it dies young."""
_EARLY_S = 10.0
_MIN_END_GRACE_S = 0.2
"""At least, for answers that the engine has given to reach their callers."""
_KILL_AFTER_S = 2.0
"""A front that hasn't ended this long after its grace is killed."""
_LOOK_EVERY_S = 1.0
"""How often to check that each front still reports."""


class FrontProcess(Protocol):
    """A process that was started here, with the interface of `asyncio.subprocess.Process`."""

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


StartFront = Callable[[tuple[int, int, int]], Awaitable[FrontProcess]]
"""Starts a process that calls `server.fronts.process.main` with these descriptors. Raises OSError."""


class FrontPool:
    """`settings.frontends` fronts, each started by `start`, which hand requests to `inference` and other RPCs to
    `handlers`."""

    def __init__(
        self,
        settings: Settings,
        inference: Inference,
        repository: ModelLookup,
        handlers: Handlers,
        start: StartFront,
    ) -> None:
        self.start_front = start
        self.memory_bytes = settings.frontend_memory_mb * 2**20
        # How long a front may be silent; 0: for ever.
        self.timeout_s = settings.frontend_timeout_secs
        self._settings = settings
        self._inference = inference
        self._repository = repository
        self._handlers = handlers
        self._read = RequestReader(settings.limits.request_elements)
        self._fronts = [_Place(self, number) for number in range(1, settings.frontends + 1)]
        self._port_holder: socket.socket | None = None
        self.ending = asyncio.Event()
        self._ready, self._live = False, True
        self.restarts = 0
        self._usage_before = Usage()

    @property
    def running(self) -> int:
        """The number of fronts that listen."""
        return sum(front.is_open for front in self._fronts)

    @property
    def is_open(self) -> bool:
        """Whether any front listens."""
        return self.running > 0

    @property
    def usage(self) -> Usage:
        """What is in progress in all fronts, and what they and those before them have refused."""
        return reduce(Usage.plus, (session.usage for session in self.sessions), self._usage_before)

    def give_way(self) -> int:
        """No descriptor of this process is a connection: the fronts have them all."""
        return 0

    def keep_refused(self, session: FrontSession) -> None:
        """For a front that is gone: what it has refused still counts."""
        self._usage_before = self._usage_before.plus(Usage(refused=session.usage.refused))

    @property
    def sessions(self) -> list[FrontSession]:
        """Those of the fronts that run."""
        return [front.session for front in self._fronts if front.session is not None]

    async def open(self, port: int) -> int:
        """Start the fronts and have them listen on `port`, or on a free one if that is 0; returns the port. Raises
        StartError, and then none is left."""
        self._hold_port(port)
        for front in self._fronts:
            front.start()
        try:
            await asyncio.gather(*(front.listens for front in self._fronts))
        except BaseException:
            await self.stop(0)
            raise
        return self.port

    def set_serving(self, serving: bool, live: bool = True) -> None:
        """Set what health reports, in all fronts."""
        self._ready, self._live = serving, live
        self._send_to_all(self._state)

    def announce_end(self) -> None:
        """Have health report NOT_SERVING for good, in all fronts."""
        self.ending.set()
        self._send_to_all(self._state)

    def leave(self) -> None:
        """In all fronts, once hardly any call arrives: listen no more and have clients go; calls in progress go on."""
        self._send_to_all((Kind.LEAVE,))

    def tell_log_settings(self) -> None:
        """Have all fronts log as this process does now."""
        self._send_to_all((Kind.LOG, pickle.dumps(log.current())))

    async def stop(self, grace_s: float) -> None:
        """Let the fronts answer what they have, for `grace_s`, and end."""
        self.ending.set()
        until_s = time.monotonic() + grace_s
        for front in self._fronts:
            front.listens.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                asyncio.gather(*(session.until_quiet() for session in self.sessions)), max(grace_s, 0.05)
            )
        left_s = max(until_s - time.monotonic(), _MIN_END_GRACE_S)
        self._send_to_all((Kind.END, left_s))
        await asyncio.gather(*(front.stop(left_s + _KILL_AFTER_S) for front in self._fronts))
        if self._port_holder is not None:
            self._port_holder.close()

    @property
    def _state(self) -> Message:
        """What fronts are told about the server as a whole."""
        return Kind.STATE, self._inference.serving, self._ready and not self.stopping, self.stopping, self._live

    @property
    def port(self) -> int:
        assert self._port_holder is not None
        port: int = self._port_holder.getsockname()[1]
        return port

    @property
    def stopping(self) -> bool:
        return self.ending.is_set()

    def new_session(
        self, link: Link, on_listens: Callable[[int, str], None], on_end: Callable[[], None]
    ) -> FrontSession:
        """This process's side of a new front, which is told all it needs."""
        session = FrontSession(link, self._inference, self._repository, self._handlers, on_listens, on_end, self._read)
        session.start()
        greeting = Greeting(self._settings, self.port, log.current(), self._inference.reads_parents)
        for message in ((Kind.HELLO, pickle.dumps(greeting)), self._state):
            session.link.send(message)
        return session

    def _hold_port(self, port: int) -> None:
        """Keep the port for the fronts: a socket that doesn't listen gets no connections, but others can't take it."""
        address = self._settings.grpc_address
        try:
            family, where = resolve(address, port)[0]
            holder = socket.socket(family, socket.SOCK_STREAM)
            self._port_holder = holder
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if where[0] == "::":
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            holder.bind(where)
            # Not before: otherwise this server would share the port with another one that allows that.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError as error:
            raise StartError(f"gRPC can't listen on {host_and_port(address, port)}: {error.strerror}") from None

    def _send_to_all(self, message: Message) -> None:
        for session in self.sessions:
            session.link.send(message)


# Memory: that which requests here hold, and that taken by results that fronts haven't released.
FRONT_METRICS: Sequence[Family[FrontPool]] = (
    Family("paceline_frontends", "gauge", "Frontends: processes that handle gRPC and listen",
        lambda pool: pool.running),
    Family("paceline_frontend_restarts", "counter", "Frontends that died, or hung and were killed, and were replaced",
        lambda pool: pool.restarts),
    Family("paceline_frontend_requests", "gauge",
        "Calls that frontends have handed over to the process with the models and wait for",
        lambda pool: sum(session.requests for session in pool.sessions)),
    Family("paceline_frontend_memory_bytes", "gauge",
        "Shared memory, in bytes, that holds tensors in transit, by direction",
        lambda pool: [("", {"direction": "in"}, sum(session.link.seen_bytes for session in pool.sessions)),
                      ("", {"direction": "out"}, sum(session.link.used_bytes for session in pool.sessions))]),
)  # fmt: skip


class _Place:
    """The place of one front, whichever process has it."""

    def __init__(self, pool: FrontPool, number: int) -> None:
        self._pool = pool
        self._number = number
        self._process: FrontProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.session: FrontSession | None = None
        self.is_open = False
        self.listens: asyncio.Future[None] = asyncio.Future()

    def start(self) -> None:
        self._keeper = asyncio.get_running_loop().create_task(self._keep_running())

    async def stop(self, patience_s: float) -> None:
        """Wait for the front to end, but no longer than that; then kill it."""
        if self._keeper is None:
            return
        await asyncio.wait((self._keeper,), timeout=patience_s)
        if self._process is not None and self._process.returncode is None:
            _log.warning("frontend %d did not end in time and is killed", self._number)
            self._process.kill()
        else:
            self._keeper.cancel()
        await asyncio.wait((self._keeper,))

    async def _keep_running(self) -> None:
        """Start a front, and another one whenever it has died, until the server stops."""
        pause_s = _FIRST_PAUSE_S
        while not self._pool.stopping:
            born_s = time.monotonic()
            try:
                how = how_ended(await self._run_process())
            except OSError as error:
                how = f"could not be started: {error.strerror}"
            if self._pool.stopping:
                break
            if not self.listens.done():
                self.listens.set_exception(StartError(f"a frontend {how} before it was listening"))
                break
            pause_s = _FIRST_PAUSE_S if time.monotonic() - born_s > _EARLY_S else pause_s
            _log.error("frontend %d %s; starting another in %g s", self._number, how, pause_s)
            self._pool.restarts += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._pool.ending.wait(), pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _run_process(self) -> int:
        """One process, from its start to its end; returns its exit status."""
        link, remote = Link.pair(self._pool.memory_bytes)
        gone = asyncio.Event()
        watching: asyncio.Task[None] | None = None
        try:
            try:
                self._process = await self._pool.start_front(remote)
            finally:
                remote.close()
            self.session = self._pool.new_session(link, self._on_listens, gone.set)
            watching = asyncio.get_running_loop().create_task(self._watch(self._process, self.session))
            # What it sent before it ended is still in the link.
            status = await self._process.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gone.wait(), 1)
            return status
        finally:
            self.is_open = False
            if watching is not None:
                watching.cancel()
            session, self.session = self.session, None
            if session is not None:
                self._pool.keep_refused(session)
                session.close()
            else:
                link.close()
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    async def _watch(self, process: FrontProcess, session: FrontSession) -> None:
        """Kill the front if it has begun to report and then falls silent: connections to it would hang. Checks are
        counted rather than time, much of which passes at once if all processes were frozen together."""
        most, silent, reports = self._pool.timeout_s, 0, session.reports
        while most:
            await asyncio.sleep(_LOOK_EVERY_S)
            silent = silent + 1 if session.reports == reports and reports else 0
            reports = session.reports
            if silent >= most:
                _log.error("frontend %d has not responded for %d s and is killed", self._number, most)
                process.kill()
                return

    def _on_listens(self, port: int, problem: str) -> None:
        if port:
            self.is_open = True
            _log.debug("frontend %d is listening", self._number)
        else:
            _log.error("frontend %d: %s", self._number, problem)
        if not self.listens.done():
            if port:
                self.listens.set_result(None)
            else:
                self.listens.set_exception(StartError(problem))
        elif not port and self._process is not None:
            self._process.kill()


async def start_front(descriptors: tuple[int, int, int]) -> FrontProcess:
    """Start Python as it runs here, with the modules that are found here, wherever it was started. Signals come first:
    the imports take a while."""
    code = (
        f"import signal, sys; sys.path[:] = {sys.path!r}; "
        "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]; "
        "import gc; gc.disable(); "
        f"from paceline.server.fronts.process import main; gc.freeze(); gc.enable(); main{tuple(descriptors)!r}"
    )
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", code, "paceline-front"),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=descriptors,
        # Signals that a terminal sends to everything that runs in it are for the engine.
        start_new_session=True,
    )
