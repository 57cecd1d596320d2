"""A bulk job on a Ray cluster: actors do its units, each with an engine of its own, on whatever node Ray places it.

Lives here: the driver's side: connecting, how many actors there are and of which size, who does which unit, and what
follows when an actor ends. Must not: read, compute or write. Actors do that (`ray_actor.py`), as jobs without Ray do.

Ray starts an actor that ends again, maybe on another node. Its units go back, and others do them meanwhile: a unit that
wasn't finished is done again as a whole, and of one that was, the same bytes are written once more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, ParamSpec, Protocol, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError

from paceline.server.bulk.computing import Blocking
from paceline.server.bulk.fingerprint import Plain
from paceline.server.bulk.folder import JobFolder, Mark
from paceline.server.bulk.memory import units_at_once
from paceline.server.bulk.ray_actor import Actor, Chosen, Done, Errand
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.tally import Judge, Tally
from paceline.server.bulk.values import BulkError, Fixed, Source, Unit

__all__ = ["Handle", "OnRay", "RayUnits", "Room", "room"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")

_AGAIN_S = 1.0
_MOST_ENDS = 5
"""So often may an actor end while it does the same unit, before that is taken for the reason."""
_CONNECT_S = 10.0


class _Method(Protocol[P, T_co]):
    def remote(self, *args: P.args, **named: P.kwargs) -> Awaitable[T_co]: ...


class Handle(Protocol):
    """Ray's, of an `Actor`."""

    @property
    def ready(self) -> _Method[[], None]: ...

    @property
    def choose(self) -> _Method[[], Chosen]: ...

    @property
    def do(self) -> _Method[[Fixed, str, Unit], Done]: ...


class OnRay:
    """As `Computing`, on the cluster at `settings.ray`, to which it connects when it is first asked for something."""

    def __init__(self, settings: BulkSettings, facts: Mapping[str, Plain], tally: Tally) -> None:
        self._settings, self._facts, self._tally = settings, facts, tally
        self._blocking = Blocking(1)
        self._actors: list[Handle] = []
        self._room: Room | None = None
        self._new: Callable[[], Handle]

    async def choose(self, source: Source) -> Fixed:
        """By the first actor, as its node is what will compute. Raises BulkError."""
        await self._connect(source)
        self._more(1)
        actor = self._actors[0]
        await _ready(actor, _AGAIN_S)
        try:
            chosen = await _answer(actor.choose.remote())
        except RayActorError as error:
            raise BulkError(f"the actor that was to find the best batch size has ended: {error}") from error
        _log(chosen.warnings)
        return chosen.fixed

    @asynccontextmanager
    async def units(self, source: Source, folder: JobFolder, fixed: Fixed, judge: Judge) -> AsyncIterator[RayUnits]:
        """Begins when the first actor is there. Raises BulkError."""
        actors = await self._connect(source)
        self._more(actors)
        self._tally.doing = f"waiting for {actors} actors"
        each = units_at_once(fixed, self._settings.memory_bytes)  # an actor does fewer of large pages
        sign = await self._blocking(folder.sign)
        units = RayUnits(self._actors, each, fixed, sign, judge)
        try:
            await units.first()
            yield units
        finally:
            units.stop()
            with suppress(FileNotFoundError):
                os.unlink(sign)

    async def close(self) -> None:
        """Ends the actors at once, whatever they do."""
        if self._room is not None:
            for actor in self._actors:
                ray.kill(actor)  # type: ignore[arg-type]
            await self._blocking(ray.shutdown)

    async def _connect(self, source: Source) -> int:
        """Returns how many actors there shall be."""
        if self._room is None:
            settings = self._settings
            self._tally.doing = "connecting to Ray"
            await _reach(settings.ray)
            await self._blocking(_init, settings.ray)
            # Ray has taken the signal that asks for a job's end.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            signal.siginterrupt(signal.SIGTERM, False)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
            self._room = found = room(nodes, settings.ray_actors, settings.ray_actor_cpus, settings.ray_actor_gpus)
            errand = Errand(settings, os.getcwd(), self._facts, source.files, found.cpus)
            options = {"num_cpus": found.cpus, "num_gpus": found.gpus, "max_restarts": -1}
            actor = ray.remote(Actor).options(**options, scheduling_strategy="SPREAD")
            self._new = lambda: cast("Handle", actor.remote(errand))
        return self._room.actors

    def _more(self, actors: int) -> None:
        self._actors += [self._new() for _ in range(actors - len(self._actors))]


class RayUnits:
    """As `UnitWork`, by `actors`, each of which does `each` units at a time. One that Ray starts again is asked every
    `again_s` whether it is there."""

    def __init__(
        self, actors: Sequence[Handle], each: int, fixed: Fixed, sign: str, judge: Judge, *, again_s: float = _AGAIN_S
    ) -> None:
        self.at_once = each * len(actors)
        self._fixed, self._sign, self._judge, self._again_s = fixed, sign, judge, again_s
        self._places: asyncio.Queue[Handle | BaseException] = asyncio.Queue()
        self._waiting: set[asyncio.Task[None]] = set()
        for actor in actors:
            self._when_ready(actor, each)

    async def first(self) -> None:
        """Returns when an actor is there."""
        self._places.put_nowait(await self._place())

    def stop(self) -> None:
        for task in self._waiting:
            task.cancel()

    async def do(self, unit: Unit, tally: Tally) -> Mark:
        """As `UnitWork.do`, by whichever actor has a place first."""
        for _ in range(_MOST_ENDS):
            actor = await self._place()
            try:
                done = await _answer(actor.do.remote(self._fixed, self._sign, unit))
            except (RayActorError, ObjectLostError):  # its process or node has ended
                self._when_ready(actor, 1)
                continue
            self._places.put_nowait(actor)
            _log(done.warnings)
            tally.add(done.tally)
            self._judge(unit, [done.bad] if done.bad is not None else [])
            return done.mark
        raise BulkError(
            f"{_MOST_ENDS} times, an actor has ended while it did part {unit.number}, which is {unit.file.path}, rows "
            f"{unit.begin} to {unit.end - 1}: is there memory for it, and can its rows end the model's process?"
        )

    async def _place(self) -> Handle:
        """An actor that can take a unit. Raises what has ended one for good."""
        actor = await self._places.get()
        if isinstance(actor, BaseException):
            self._places.put_nowait(actor)  # for the next
            raise actor
        return actor

    def _when_ready(self, actor: Handle, places: int) -> None:
        """So many places are there once the actor is."""

        async def wait() -> None:
            await _ready(actor, self._again_s)
            for _ in range(places):
                self._places.put_nowait(actor)

        def on_done(task: asyncio.Task[None]) -> None:
            self._waiting.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._places.put_nowait(error)

        task = asyncio.create_task(wait())
        self._waiting.add(task)
        task.add_done_callback(on_done)


class Room(NamedTuple):
    """How many actors a cluster has, or shall have, room for, and what each of them takes."""

    actors: int
    cpus: int
    gpus: float


def room(nodes: Sequence[Mapping[str, float]], actors: int, cpus: int, gpus: float) -> Room:
    """What is given, and where `actors` or `cpus` is 0, what suits the nodes with these resources: an actor takes all
    CPUs of the smallest node, or those that go with its GPUs, and there are as many as fit. Raises BulkError if none
    does."""
    fitting = [node for node in nodes if node.get("CPU", 0) >= max(1, cpus) and node.get("GPU", 0) >= gpus]
    if not fitting and not actors:
        raise BulkError(
            f"no node of the Ray cluster has {max(1, cpus)} CPUs and {gpus:g} GPUs: say less by --ray-actor-cpus and "
            "--ray-actor-gpus, or say by --ray-actors how many actors Ray has to find nodes for"
        )
    shares = [int(node["CPU"] * gpus / node["GPU"]) if gpus else int(node["CPU"]) for node in fitting]
    cpus = cpus or max(1, min(shares, default=1))
    fit = (min(node["CPU"] // cpus, node["GPU"] // gpus if gpus else node["CPU"]) for node in fitting)
    return Room(actors or int(sum(fit)), cpus, gpus)


async def _ready(actor: Handle, again_s: float) -> None:
    """Returns when it is there."""
    while True:
        try:
            return await _answer(actor.ready.remote())
        except ActorUnavailableError:  # until Ray has started it again
            await asyncio.sleep(again_s)
        except RayActorError as error:
            raise BulkError(f"an actor has ended for good: {error}") from error


def _log(warnings: Sequence[logging.LogRecord]) -> None:
    for record in warnings:
        logging.getLogger(record.name).handle(record)


async def _answer(answer: Awaitable[T]) -> T:
    """What an actor returns, or its BulkError as it was there."""
    try:
        return await answer
    except RayTaskError as error:
        if isinstance(error.cause, BulkError):
            raise error.cause from None
        raise


async def _reach(address: str) -> None:
    """Raises BulkError where nobody listens: Ray would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()) or "://" in address:
        return
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError) as error:
        raise BulkError(f"--ray {address}: nobody answers there ({error or 'timeout'})") from error
    writer.close()


def _init(address: str) -> None:
    # On a thread, so that Ray leaves alone how Python handles signals.
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise BulkError(f"--ray {address}: {error}") from error
