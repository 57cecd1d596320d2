"""Following changes on disk.

Lives here: when a model counts as changed, and what is done then. Must not: load (the repository does), or look at
files on the event loop.

A change counts once two scans in a row have seen the same: somebody who copies files into a repository isn't done after
the first file. What was tried once is tried again only after another change, so a model that doesn't load costs nothing
until somebody repairs it. Each model is followed on its own: scans continue while some load, however long that takes,
and the first scan after a load or unload sees what has changed meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from paceline.server.errors import LoadFailed, ModelNotReady, TooManyModels
from paceline.server.models.layout import Layout, Sight, look_at
from paceline.server.models.load_queue import always
from paceline.server.models.repository import Repository

_log = logging.getLogger("paceline.server.poller")

_SETTLE_S = 1.0
"""How soon to scan again while something is changing, unless scans are that frequent anyway."""


class Poller:
    """Keeps `repository` in step with the models of `layout`, scanning every `interval_s`."""

    def __init__(self, layout: Layout, repository: Repository, interval_s: float) -> None:
        self._layout = layout
        self._repository = repository
        self._interval_s = interval_s
        self._seen: Mapping[str, Sight] = {}
        self._done: dict[str, Sight] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._without_place: set[str] = set()
        self._complaint = ""

    async def start(self) -> None:
        """Load what is there now. Raises OSError if a repository can't be listed."""
        self._seen = await asyncio.to_thread(self._look)
        self._done = dict(self._seen)
        failures = await self._repository.load_all([sight.folder for sight in self._seen.values()])
        self._without_place = {name for name, error in failures.items() if isinstance(error, TooManyModels)}
        if len(failures) > len(self._without_place):
            self._try_again()  # the other failures had places, and have left them

    async def run(self) -> None:
        """Follow until cancelled."""
        unsettled = False
        try:
            while True:
                await asyncio.sleep(min(_SETTLE_S, self._interval_s) if unsettled else self._interval_s)
                try:
                    unsettled = await self.poll_once()
                except Exception:  # noqa: BLE001 - any error; the next scan may succeed
                    _log.exception("scanning the repositories failed; trying again")
        finally:
            for task in self._under_way.values():
                task.cancel()
            await self.ended()

    async def poll_once(self) -> bool:
        """Scan once, and start to load what has changed and to unload what is gone; doesn't wait for that. True if
        something is still changing, so that another scan is due soon."""
        try:
            found = await asyncio.to_thread(self._look)
        except OSError as error:
            if self._complaint != (complaint := str(error)):
                _log.warning("the repositories can't be read, so models stay as they are: %s", complaint)
            self._complaint = complaint
            return False
        self._complaint = ""
        changed = {name for name in {*found, *self._done} if found.get(name) != self._done.get(name)}
        changed -= self._under_way.keys()
        settled = {name for name in changed if found.get(name) == self._seen.get(name)}
        self._seen = found
        for name in sorted(settled):
            self._done.pop(name, None)
            if name in found:
                self._done[name] = found[name]
            task = self._under_way[name] = asyncio.create_task(self._follow(name, found.get(name)), name=name)
            task.add_done_callback(lambda task: self._under_way.pop(task.get_name()))
        self._repository.take_note([sight.folder for sight in found.values()])
        return bool(changed - settled)

    async def ended(self) -> None:
        """Return when no load and no unload is in progress any more."""
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    async def _follow(self, name: str, sight: Sight | None) -> None:
        try:
            if sight is None:
                await self._repository.unload(name)
                self._try_again()
            else:
                await self._repository.load(name, always(sight.folder))
        except TooManyModels as error:
            self._without_place.add(name)
            _log.error("%s; it is tried again once another model is gone", error)
        except LoadFailed as error:
            _log.error("%s; it is not tried again until its files change", error)
            self._try_again()  # if no version of it serves, it has left its place
        except ModelNotReady:
            pass  # the server is stopping
        except Exception:  # noqa: BLE001 - any error; other models must not be affected
            _log.exception("model '%s' could not be updated; it is not tried again until its files change", name)

    def _try_again(self) -> None:
        """Have the next scan retry the models that had no place."""
        for name in self._without_place:
            self._done.pop(name, None)
        self._without_place.clear()

    def _look(self) -> dict[str, Sight]:
        return {folder.name: look_at(folder) for folder in self._layout.models()}
