"""Loads of models, on threads.

Lives here: which loads are in progress, and retries. Must not: know what serves, or what a model consists of; that is
`loader`. The rule: a load can't be interrupted. One that nothing waits for any more is closed when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from paceline.backends.base import Backend
from paceline.protos import model_config_pb2 as pb
from paceline.server import descriptors
from paceline.server.errors import Ending, LoadHangs, ServerError, TooFewDescriptors
from paceline.server.models.layout import ModelFolder
from paceline.server.models.loader import LoadDefaults, LoadedVersion, load_model

__all__ = ["Find", "LoadQueue", "always"]

_log = logging.getLogger("paceline.server.loading")

Find = Callable[[], AbstractContextManager[ModelFolder]]
"""Gives a model's folder as it is when the load's turn comes, for as long as the load lasts. Blocks. Raises ServerError
if there is none."""


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
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="load")
        self._under_way: set[object] = set()

    @property
    def under_way(self) -> bool:
        """Whether a thread is loading something, or hangs doing so."""
        return bool(self._under_way)

    def check_descriptors(self) -> None:
        """Raise TooFewDescriptors unless enough are left for connections and probes when a model has taken some: both
        loading and starting to serve may take them. On any thread."""
        left, kept = descriptors.free(), 2 * descriptors.reserve()
        if left < kept and (left := left + self._give_way()) < kept:
            raise TooFewDescriptors(descriptors.allowed(), left, kept)

    def stop(self) -> None:
        """Start no more loads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def load(
        self, name: str, find: Find, override: pb.ModelConfig | None, on_versions: Callable[[list[str]], None]
    ) -> list[LoadedVersion]:
        """Load what `find` gives, with `override` instead of its configuration if there is one. `on_versions` is
        called, on the event loop, with the versions that will be loaded. Raises whatever the load does."""
        loop = asyncio.get_running_loop()

        def tell_versions(versions: list[int]) -> None:
            loop.call_soon_threadsafe(on_versions, list(map(str, versions)))

        began_s: list[float] = []

        def load() -> list[LoadedVersion]:
            began_s.append(time.monotonic())
            self.check_descriptors()
            try:
                with find() as folder:
                    return load_model(
                        folder, self._backend_of, self._defaults, override=override, tell_versions=tell_versions
                    )
            except LoadHangs as error:
                self._note(error.ended)  # here, as whoever waits may have been cancelled
                raise
            except StopIteration as error:
                raise RuntimeError(f"StopIteration: {error}") from error  # which asyncio's futures can't carry

        for left in range(self._retries, -1, -1):
            began_s.clear()
            future: Future[list[LoadedVersion]] = Future()
            # Before a thread has it: so its end reaches the loop the way its versions do, and after them.
            waited = asyncio.wrap_future(future)
            self._submit(load, future)
            self._note(future)
            slow = loop.create_task(self._tell_if_slow(name, began_s))
            try:
                return await waited
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
                del future, waited  # they have the error, whose traceback refers to this frame
        raise AssertionError("the last try returned or raised")

    def _submit(self, load: Callable[[], list[LoadedVersion]], future: Future[list[LoadedVersion]]) -> None:
        """Have a thread run `load` for `future`. Raises RuntimeError if no thread can be started for it."""
        try:
            self._pool.submit(_run, load, [future])
        except RuntimeError:
            # The pool keeps it all the same, for the next thread. If none has begun it by now, it is cancelled.
            if future.cancel():
                raise

    def _note(self, future: Ending) -> None:
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)

    async def _tell_if_slow(self, name: str, began_s: Sequence[float]) -> None:
        """Log it if a load is slow. Nothing else tells: until all models are loaded, a server has no port to be asked
        on. A load that waits for others hasn't begun."""
        took_s = 0.0
        while not began_s or took_s < self._slow_after_s:
            await asyncio.sleep(self._slow_after_s - took_s)
            took_s = time.monotonic() - began_s[0] if began_s else 0.0
        _log.info("model '%s' is still loading after %.0f s", name, took_s)


def always(folder: ModelFolder) -> Find:
    """Gives the folder as it was found, whenever the turn comes."""
    return lambda: nullcontext(folder)


def _run(load: Callable[[], list[LoadedVersion]], futures: list[Future[list[LoadedVersion]]]) -> None:
    """Run `load` unless its future was cancelled. The future is taken out of `futures`: the frames in an error's
    traceback refer to that list, which mustn't refer back to the error."""
    future = futures.pop()
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(load())
    except BaseException as error:  # noqa: BLE001 - passed to whoever waits for the result
        future.set_exception(error)
        del future


def _close_loaded(future: Future[list[LoadedVersion]]) -> None:
    """Close what a load gave that nobody waits for any more."""
    if not future.cancelled() and future.exception() is None:
        for one in future.result():
            one.close()
