"""The models being served, by name and version.

Lives here: states and look-ups, and what joins a loaded model with its batcher. Must not: know RPCs, or read files (the
loader does). Everything runs on the event loop but the loads themselves.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

from backends.base import Backend, Tensors
from backends.errors import BackendError, SessionError
from scheduler.batcher import Batcher
from scheduler.runner import ThreadRunner
from server.adapting_codec import codec_for
from server.errors import InvalidRequest, ModelNotFound, ModelNotReady, ServerError
from server.layout import ModelFolder
from server.loader import LoadDefaults, LoadedVersion, load_model
from server.metrics import Metrics, VersionMetrics
from server.model_statistics import VersionStatistics

__all__ = ["ModelState", "Repository", "ServedModel"]

_log = logging.getLogger("paceline.server.repository")


_MAX_PARTS = 1024
"""Parts of a request that is executed in parts: rows without elements cost no bytes, so something has to bound them."""


class ModelState(Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


class ServedModel:
    """One version of a model with its codec, batcher and instance threads."""

    def __init__(self, loaded: LoadedVersion, metrics: Metrics) -> None:
        self.name = loaded.name
        self.version = str(loaded.version)
        self.spec = loaded.plan.spec
        self.config = loaded.config
        self.platform = loaded.opened.platform
        self.max_batch_rows = loaded.plan.max_batch_rows
        self.counts_bytes = loaded.plan.policy.limits.max_bytes > 0
        # Apart from its number, which begins anew with every load, what a caller gets to see as the id of a batch.
        self.batch_id_prefix = secrets.token_hex(4)
        limit = _MAX_PARTS * self.max_batch_rows if loaded.plan.splits else self.max_batch_rows
        self.codec = codec_for(self.name, self.version, self.spec, limit, loaded.labels)
        self.statistics = VersionStatistics()
        self._loaded = loaded
        self.batcher: Batcher[Tensors, Tensors] = Batcher(
            loaded.plan.policy,
            [
                ThreadRunner(f"{self.name}_{self.version}_{number}", instance.execute)
                for number, instance in enumerate(loaded.instances)
            ],
            observer=self.statistics,
            isolates=_may_be_a_requests_fault,
        )
        self._metrics = metrics
        self._shown = VersionMetrics(
            self.name,
            self.version,
            self.statistics,
            self.batcher,
            priority_levels=loaded.plan.policy.priority_levels,
            load_ns=loaded.load_ns,
            tags=loaded.plan.metric_tags,
        )

    def start(self) -> None:
        """Take requests, on the running event loop, and show in the metrics."""
        self.batcher.start()
        self._metrics.add(self._shown)

    async def stop(self) -> None:
        """Execute what is queued, then give the instances back. Cancelled while waiting: use `abandon`."""
        await self.batcher.drain()
        self.batcher.close()
        self._metrics.remove(self._shown)
        self._loaded.close()

    def abandon(self) -> None:
        """Answer whoever waits with BatcherClosed. Instances that execute keep their memory until the process ends."""
        self.batcher.close()
        self._metrics.remove(self._shown)


def _may_be_a_requests_fault(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, (SessionError, MemoryError))


@dataclass(slots=True)
class _Entry:
    state: ModelState = ModelState.LOADING
    reason: str = ""
    versions: dict[str, ServedModel] = field(default_factory=dict)


class Repository:
    """Loads models and finds them. `backend_of` gives the backend for a name; LoadError if there is none. `defaults`
    are what flags say of models that don't say it themselves."""

    def __init__(
        self,
        metrics: Metrics,
        backend_of: Callable[[str], Backend],
        load_threads: int = 4,
        defaults: LoadDefaults | None = None,
    ) -> None:
        self._metrics = metrics
        self._backend_of = backend_of
        self._load_threads = load_threads
        self._defaults = defaults
        self._entries: dict[str, _Entry] = {}
        # What a request names, to what serves it; the version "" is the latest.
        self._served: dict[tuple[str, str], ServedModel] = {}

    @property
    def ready(self) -> bool:
        """Whether every known model is loaded and warm."""
        return all(entry.state is ModelState.READY for entry in self._entries.values())

    @property
    def failures(self) -> dict[str, str]:
        """Why models are unavailable, by name."""
        return {name: entry.reason for name, entry in self._entries.items() if entry.state is ModelState.UNAVAILABLE}

    @property
    def models(self) -> list[ServedModel]:
        """All versions being served."""
        return [model for entry in self._entries.values() for model in entry.versions.values()]

    async def load(self, folders: Sequence[ModelFolder]) -> None:
        """Load models, several at a time. One that fails becomes unavailable, with the reason; the others serve."""
        for folder in folders:
            self._entries[folder.name] = _Entry()
        pool = ThreadPoolExecutor(self._load_threads, thread_name_prefix="load")
        try:
            await asyncio.gather(*(self._load_one(folder, pool) for folder in folders))
        finally:
            # Waiting would hold up the event loop when the load is cancelled.
            pool.shutdown(wait=False, cancel_futures=True)

    async def _load_one(self, folder: ModelFolder, pool: ThreadPoolExecutor) -> None:
        entry = self._entries[folder.name]
        loop = asyncio.get_running_loop()
        try:
            loaded = await loop.run_in_executor(pool, load_model, folder, self._backend_of, self._defaults)
        except (BackendError, ServerError) as error:
            entry.state, entry.reason = ModelState.UNAVAILABLE, str(error)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this model's and not the others'
            _log.exception("model '%s' failed to load on something unforeseen", folder.name)
            entry.state, entry.reason = ModelState.UNAVAILABLE, f"{type(error).__name__}: {error}"
            return
        for one in loaded:
            model = ServedModel(one, self._metrics)
            model.start()
            entry.versions[model.version] = self._served[model.name, model.version] = model
            # Versions come in ascending order: the last one stays.
            self._served[model.name, ""] = self._served[model.name, "-1"] = model
        entry.state = ModelState.READY

    # hot path
    def get(self, name: str, version: str) -> ServedModel:
        """What serves `version` of model `name`; the latest for "" or "-1".

        Raises ModelNotFound, ModelNotReady, or InvalidRequest for a version that is no number.
        """
        model = self._served.get((name, version))
        if model is None:
            raise self._why_not(name, version)
        return model

    def find(self, name: str, version: str) -> ServedModel | None:
        """What `get` would give, or None."""
        return self._served.get((name, version))

    def is_ready(self, name: str, version: str) -> bool:
        """Whether `get` would find it. Raises ModelNotFound or InvalidRequest."""
        try:
            self.get(name, version)
        except ModelNotReady:
            return False
        return True

    def versions(self, name: str) -> list[str]:
        """The versions of a model being served, oldest first."""
        return list(self._entries[name].versions)

    async def stop(self) -> None:
        """Stop every model, each once its queue is executed."""
        await asyncio.gather(*(model.stop() for model in self.models))

    def abandon(self) -> None:
        """Stop every model now."""
        for model in self.models:
            model.abandon()

    def _why_not(self, name: str, version: str) -> ServerError:
        entry = self._entries.get(name)
        if entry is None:
            known = sorted(self._entries)
            return ModelNotFound(f"unknown model '{name}' is not found; this server has {_some(known)}")
        if entry.state is not ModelState.READY:
            return ModelNotReady(f"model '{name}' is not ready: {entry.reason or entry.state.value}")
        if not (version.isascii() and version.isdecimal()):
            return InvalidRequest(f"model '{name}': expected a version number, got '{version}'")
        return ModelNotFound(f"model '{name}' version {version} is not found; versions served: {list(entry.versions)}")


def _some(names: list[str]) -> str:
    return str(names) if len(names) <= 5 else f"{names[:5]} and {len(names) - 5} more"
