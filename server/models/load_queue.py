"""Loads of models, on threads.

Lives here: which loads are in progress, retries, and the threads of what can't be interrupted. Must not: know what
serves, or what a model consists of; that is `loader`. The rule: a load that nothing waits for any more is closed when
it ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from paceline.backends.base import Backend
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import Ending, LoadHangs, ServerError, TooFewDescriptors
from paceline.server.models.defaults import LoadDefaults
from paceline.server.models.layout import ModelFolder, Sight, look_at
from paceline.server.models.loader import LoadedVersion, load_model
from paceline.server.tuning import allowed_descriptors, free_descriptors, reserved_descriptors

_log = logging.getLogger("paceline.server.loading")

T = TypeVar("T")

Find = Callable[[], AbstractContextManager[ModelFolder]]
"""Gives a model's folder as it is when the load's turn comes, for as long as the load lasts. Blocks. Raises ServerError
if there is none."""


Provide = Callable[[Sequence[str]], Awaitable[None]]
"""Has models loaded that another one needs, unless they are there."""


class LoadQueue:
    """Loads models, `threads` at a time.

    `backend_of` gives the backend for a name; LoadError if there is none. `defaults` are what flags set for models that
    don't set it themselves. `retries`: how often to retry a load, unless it fails with a ServerError, such as one about
    its model's configuration. `slow_after_s`: when to log that a load is still in progress. `give_way` has
    clients' connections give way to models, and returns how many descriptors they have; it is called on any thread.
    """

    def __init__(
        self,
        backend_of: Callable[[str], Backend],
        defaults: LoadDefaults | None = None,
        *,
        threads: int = 4,
        retries: int = 0,
        slow_after_s: float = 10.0,
        give_way: Callable[[], int] = lambda: 0,
    ) -> None:
        self._give_way = give_way
        self._backend_of = backend_of
        self._defaults = defaults
        self._retries = retries
        self._slow_after_s = slow_after_s
        self._free = asyncio.Semaphore(threads)
        self._under_way: set[object] = set()

    @property
    def under_way(self) -> bool:
        """Whether a thread is loading something, or hangs doing so."""
        return bool(self._under_way)

    def check_descriptors(self) -> None:
        """Raise TooFewDescriptors unless enough are left for connections and probes when a model has taken some: both
        loading and starting to serve may take them. On any thread."""
        left, kept = free_descriptors(), 2 * reserved_descriptors()
        if left < kept and (left := left + self._give_way()) < kept:
            raise TooFewDescriptors(allowed_descriptors(), left, kept)

    async def load(
        self,
        name: str,
        find: Find,
        override: pb.ModelConfig | None,
        on_versions: Callable[[list[str]], None],
        provide: Provide,
        unless: Collection[Sight | None],
    ) -> list[LoadedVersion]:
        """Load what `find` gives, with `override` instead of its configuration if there is one. `on_versions` is
        called, on the event loop, with the versions that will be loaded, and `provide` awaited with the names of models
        that are to be there before, if it calls some. Gives nothing if what lies on disk is one of `unless`. Raises
        whatever the load does, or RuntimeError if no thread can be started."""
        loop = asyncio.get_running_loop()

        def tell_versions(versions: list[int]) -> None:
            loop.call_soon_threadsafe(on_versions, list(map(str, versions)))

        async def provide_called(names: Sequence[str]) -> None:
            self._free.release()  # those need the place of this load, which does nothing meanwhile
            try:
                await provide(names)
            finally:
                await self._free.acquire()

        def await_called(names: Sequence[str]) -> None:
            asyncio.run_coroutine_threadsafe(provide_called(names), loop).result()

        def load() -> list[LoadedVersion]:
            self.check_descriptors()
            try:
                with find() as folder:
                    # Before the files are read: if they change meanwhile, the next look differs. What lies beside a
                    # model that is a single file may be a part of it, or of others.
                    sight = look_at(folder) if override is None and folder.file is None else None
                    if sight is not None and sight in unless:
                        return []
                    loaded = load_model(
                        folder,
                        self._backend_of,
                        self._defaults,
                        override=override,
                        tell_versions=tell_versions,
                        await_called=await_called,
                    )
                    return [replace(one, sight=sight) for one in loaded]
            except LoadHangs as error:
                self._note(error.ended)  # here, as whoever waits may have been cancelled
                raise
            except StopIteration as error:
                raise RuntimeError(f"StopIteration: {error}") from error  # which asyncio's futures can't carry

        # Set behind all that the thread has had the loop call. From Python 3.14 on, `asyncio.wrap_future` doesn't wait
        # for that if the thread has ended already.
        ended = asyncio.Event()

        def end() -> None:
            self._free.release()
            ended.set()

        for left in range(self._retries, -1, -1):
            await self._free.acquire()
            try:
                future = submit(load)
            except RuntimeError:
                self._free.release()
                raise
            self._note(future)  # it counts until it ends, whoever waits for it
            ended.clear()
            future.add_done_callback(lambda _: call_soon(loop, end))
            # Nothing else tells: until all models are loaded, a server has no port to be asked on.
            text = "model '%s' is still loading after %.0f s"
            slow = loop.call_later(self._slow_after_s, _log.info, text, name, self._slow_after_s)
            try:
                await ended.wait()
                return future.result()
            except asyncio.CancelledError:
                future.add_done_callback(_close_loaded)
                raise
            except ServerError:
                raise
            except Exception as error:  # whatever it is, it is tried again
                if not left:
                    raise
                _log.warning("loading model '%s' failed, %d retries left: %s", name, left, error)
            finally:
                slow.cancel()
                del future  # it has the error, whose traceback refers to this frame
        raise AssertionError("the last try returned or raised")

    def _note(self, ending: Ending) -> None:
        self._under_way.add(ending)
        ending.add_done_callback(self._under_way.discard)


def always(folder: ModelFolder) -> Find:
    """Gives the folder as it was found, whenever the turn comes."""
    return lambda: nullcontext(folder)


def start_thread(function: Callable[[], object]) -> None:
    """Run `function` on a thread of its own, as it may never end: the event loop's threads are few, and others wait for
    them. Raises RuntimeError if no thread can be started."""
    threading.Thread(target=function, name="paceline model", daemon=True).start()


def submit(function: Callable[[], T], start: Callable[[Callable[[], None]], None] = start_thread) -> Future[T]:
    """The same; the future gets what `function` returns or raises, and can't be cancelled. Raises what `start` does."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    start(partial(_run, function, [future]))
    return future


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Have the loop call `function`, unless it has ended before the thread that asks for this."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _run(function: Callable[[], T], futures: list[Future[T]]) -> None:
    """The future is taken out of `futures`: the frames in an error's traceback refer to that list, which mustn't refer
    back to the error."""
    future = futures.pop()
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - passed to whoever waits for the result
        future.set_exception(error)
        del future


def _close_loaded(future: Future[list[LoadedVersion]]) -> None:
    """Close what a load gave that nobody waits for any more."""
    if future.exception() is None:
        for one in future.result():
            one.close()
