"""The server that this one stands in front of: which models it has, and whether it is there.

Lives here: polling it, and telling the repository. Must not: carry requests (`backends.remote`), or decide how a model
is served (`upstream_model`). The rule: what the upstream doesn't serve isn't served here, and returns by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from paceline.backends.errors import UpstreamFailed, UpstreamRefused
from paceline.backends.remote import RemoteServer
from paceline.clients.connection import authorization, read_token
from paceline.protos import inference_pb2 as pb
from paceline.server.errors import LoadFailed, StartError, TooManyModels
from paceline.server.models.defaults import BatchDefaults
from paceline.server.models.loader import LoadedVersion
from paceline.server.models.model_record import version_order
from paceline.server.models.repository import Repository
from paceline.server.models.upstream_model import UpstreamVersion, bring
from paceline.server.models.upstream_settings import UpstreamSettings

_log = logging.getLogger("paceline.server.upstream")

_ASK_S = 5.0
_BETWEEN_S = 0.25
"""Shortest time between polls, however many calls fail."""
_DESCRIBE_EVERY = 10
"""One in this many polls asks for metadata too, for models that are changed while they serve."""
_SILENT_LOOKS = 3
"""Many servers answer nothing while they compute: only one that answers neither this many polls in a row nor any
request counts as gone."""

_AT_A_TIME = 16
"""Models that are polled at the same time."""
_MAX_REASONS = 5
"""Models whose reasons the log and the probe give; there may be thousands, and another line each second."""


class Upstream:
    """Keeps `repository` in step with the upstream. `batching` is for models whose ModelConfig says nothing."""

    def __init__(self, settings: UpstreamSettings, repository: Repository, batching: BatchDefaults) -> None:
        self._settings = settings
        self._repository = repository
        self._batching = batching
        self._server = RemoteServer(settings.target)  # until `start` has read what calls need
        self._served: dict[str, tuple[UpstreamVersion, ...]] = {}
        self._waits_for = "the upstream hasn't been asked yet"
        self._looks = 0
        self._silent = 0
        self._answered = 0
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Poll once, and then regularly until `stop`. Models that aren't there yet are served once they are. Raises
        StartError for files that can't be used."""
        settings, tls = self._settings, self._settings.tls
        try:
            headers = () if settings.token_file is None else (authorization(read_token(settings.token_file)),)
            credentials = None if tls is None else tls.credentials()
        except OSError as error:
            raise StartError(f"--upstream-token-file: {error.filename}: {error.strerror}") from None
        except ValueError as error:
            raise StartError(f"upstream: {error}") from None
        options = () if tls is None else tls.channel_options(settings.target)
        self._server = RemoteServer(
            settings.target, settings.connections, settings.timeout_secs, credentials, options, headers
        )
        self._server.open()
        self._repository.waits_for = self._waits_for
        self._repository.names_known = bool(self._settings.models)
        await self._look_safely()
        self._watching = asyncio.create_task(self._watch())

    def stop(self) -> None:
        """Poll no more; requests go on."""
        if self._watching is not None:
            self._watching.cancel()

    async def close(self) -> None:
        """Close the connections."""
        self.stop()
        await self._server.close()

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._server.suspected.wait(), self._settings.health_secs)
                self._looks = 0  # it may be back already, as a different server
                await asyncio.sleep(min(_BETWEEN_S, self._settings.health_secs))
            self._server.suspected.clear()
            await self._look_safely()

    async def _look_safely(self) -> None:
        try:
            await self._look()
        except Exception:  # noqa: BLE001 - any error; polling must go on
            _log.exception("polling upstream %s failed; trying again", self._settings.target)

    async def _look(self) -> None:
        """Poll once, and bring the repository in step."""
        try:
            ready = await self._is_ready()
            names = await self._names()
            gone = {*self._served, *self._repository.failures} - names.keys()
            if gone and ready:  # meanwhile it may have become not ready, and list nothing because of that
                ready = await self._is_ready()
        except (UpstreamFailed, UpstreamRefused) as error:
            if self._is_only_busy(error):
                return
            if error.status == "DEADLINE_EXCEEDED":
                self._server.renew()
            self._looks = 0  # what comes back may be a different server
            for name in dict.fromkeys((*self._served, *self._settings.models)):
                await self._withdraw(name, str(error))
            self._report(str(error))
            return
        self._silent = 0
        full = self._looks % _DESCRIBE_EVERY == 0
        self._looks += 1
        # Including those that weren't ready when they were listed: nobody would look at them again.
        for name in gone if ready else ():
            self._served.pop(name, None)
            await self._repository.unload(name)
        missing = await self._look_at_all(names, full=full)
        if not ready:  # it may still be loading models that it doesn't list yet, including some that it had
            for name in gone & self._served.keys():
                await self._withdraw(name, f"upstream {self._settings.target} is not ready")
            self._report(f"upstream {self._settings.target} is not ready")
            return
        self._repository.names_known = True
        reasons = [f"model '{name}': {why}" for name, why in missing.items() if why]
        more = [f"and {len(reasons) - _MAX_REASONS} more"] if len(reasons) > _MAX_REASONS else []
        self._report("; ".join((*reasons[:_MAX_REASONS], *more)))

    async def _is_ready(self) -> bool:
        answer = await self._server.ask("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse, _ASK_S)
        return answer.ready

    def _is_only_busy(self, error: UpstreamFailed | UpstreamRefused) -> bool:
        if error.status != "DEADLINE_EXCEEDED":
            return False
        answered, self._answered = self._answered, self._server.answered
        self._silent = self._silent + 1 if self._server.answered == answered else 0
        return bool(self._served) and self._silent < _SILENT_LOOKS

    def _report(self, waits_for: str) -> None:
        """Set and log why this server isn't ready on account of the upstream; "" if nothing is in the way."""
        if waits_for != self._waits_for:
            if waits_for:
                _log.warning("not ready: %s", waits_for)
            else:
                _log.info("upstream %s is ready: %s", self._settings.target, sorted(self._served))
        self._waits_for = waits_for
        if waits_for != self._repository.waits_for:
            self._repository.waits_for = waits_for
            self._repository.on_change()

    async def _names(self) -> dict[str, list[str]]:
        """The models to serve, each with the versions that the index lists, if it was asked."""
        if self._settings.models:
            return {name: [] for name in self._settings.models}
        try:
            index = await self._server.ask(
                "RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse, _ASK_S
            )
        except UpstreamFailed as error:
            if error.status == "UNIMPLEMENTED":
                what = f"upstream {self._settings.target} has no RepositoryIndex: name its models with --upstream-model"
            else:
                # Triton answers UNAVAILABLE where it is restricted, as it is by default under PyTriton.
                what = f"{error} (when asked for its RepositoryIndex; naming models with --upstream-model avoids that)"
            raise UpstreamFailed(error.status, what) from None
        names: dict[str, list[str]] = {}
        for line in index.models:
            # MLServer says "State.READY" where Python is 3.11 or newer.
            if line.state.rpartition(".")[2] == "READY":
                names.setdefault(line.name, []).extend(filter(None, [line.version]))
        return names

    async def _look_at_all(self, names: Mapping[str, Sequence[str]], *, full: bool) -> dict[str, str]:
        """Poll all models, some at a time: one that doesn't answer mustn't hold up the others. Returns why each was
        withdrawn, or ""."""
        some = asyncio.Semaphore(_AT_A_TIME)

        async def look_at(name: str, versions: Sequence[str]) -> str:
            async with some:
                return await self._look_at(name, versions, full=full)

        # All of them, whatever goes wrong with one.
        looks = [look_at(name, versions) for name, versions in names.items()]
        results = await asyncio.gather(*looks, return_exceptions=True)
        for one in results:
            if isinstance(one, BaseException):
                raise one
        return {name: why for name, why in zip(names, results, strict=True) if isinstance(why, str)}

    async def _look_at(self, name: str, versions: Sequence[str], *, full: bool) -> str:
        """Poll one model: serve it, again if it has changed, or withdraw it. Returns why it was withdrawn, or ""."""
        try:
            answer = await self._server.ask(
                "ModelReady", pb.ModelReadyRequest(name=name), pb.ModelReadyResponse, _ASK_S
            )
            if answer.ready:
                if full or name not in self._served:
                    await self._serve(name, await self._versions(name, versions))
                self._repository.set_unreachable(name, "")
                return ""
            why = f"upstream {self._settings.target}: the model is not ready"
        except (UpstreamFailed, UpstreamRefused) as error:
            if error.status == "DEADLINE_EXCEEDED" and self._repository.find(name, ""):
                return ""
            why = str(error)
        await self._withdraw(name, why)
        return why

    async def _withdraw(self, name: str, why: str) -> None:
        self._looks = 0
        if name in self._served:
            self._repository.set_unreachable(name, why)
            return

        async def refuse() -> list[LoadedVersion]:
            raise UpstreamFailed("UNAVAILABLE", why)

        with suppress(LoadFailed):
            await self._repository.install(name, refuse)

    async def _serve(self, name: str, versions: tuple[UpstreamVersion, ...]) -> None:
        if self._served.get(name) == versions:
            return

        async def serve() -> list[LoadedVersion]:
            return [bring(name, one, self._server, self._settings, self._batching) for one in versions]

        try:
            await self._repository.install(name, serve)
        except TooManyModels as error:
            if self._served.get(name) != ():
                _log.error("%s", error)
            versions = ()  # unlike any real ones, so that it is tried again: others may have gone
        except LoadFailed as error:
            _log.error("%s", error)
        else:
            _log.info("model '%s' of upstream %s is served", name, self._settings.target)
        self._served[name] = versions

    async def _versions(self, name: str, indexed: Sequence[str]) -> tuple[UpstreamVersion, ...]:
        """What the upstream says about each version; the one that is meant without a number comes last."""
        latest = await self._metadata(name, "")
        versions = sorted({*latest.versions, *indexed}, key=version_order) or [""]
        return tuple([await self._describe(name, version) for version in versions])

    async def _describe(self, name: str, version: str) -> UpstreamVersion:
        metadata = await self._metadata(name, version)
        try:
            request = pb.ModelConfigRequest(name=name, version=version)
            config = (await self._server.ask("ModelConfig", request, pb.ModelConfigResponse, _ASK_S)).config
        except (UpstreamFailed, UpstreamRefused) as error:
            if error.status != "UNIMPLEMENTED":
                raise
            config = None
        return UpstreamVersion(version, metadata, config)

    async def _metadata(self, name: str, version: str) -> pb.ModelMetadataResponse:
        request = pb.ModelMetadataRequest(name=name, version=version)
        return await self._server.ask("ModelMetadata", request, pb.ModelMetadataResponse, _ASK_S)
