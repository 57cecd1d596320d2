"""The server that this one stands in front of: which models it has, how they are served, and whether it is there.

Lives here: polling it, telling the repository, and the decisions from what it says about a model to what this server
needs to serve that: what clients see, whether and how it batches. Must not: carry requests (`backends.remote`). The
rule: what the upstream doesn't serve isn't served here, and returns by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from paceline.backends.errors import UpstreamFailed, UpstreamRefused
from paceline.backends.remote import RemoteModel, RemoteServer
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.clients.connection import authorization, read_token
from paceline.protos import inference_pb2 as pb
from paceline.protos import model_config_pb2 as config_pb
from paceline.protos.datatypes import UnknownDatatypeError, by_name
from paceline.server.errors import ConfigError, LoadFailed, StartError, TooManyModels
from paceline.server.models.batch_policy import batch_policy
from paceline.server.models.defaults import BatchDefaults
from paceline.server.models.effective_config import effective_config
from paceline.server.models.loader import LoadedVersion
from paceline.server.models.model_config import ServingPlan
from paceline.server.models.model_record import version_order
from paceline.server.models.repository import Repository
from paceline.server.models.tensor_config import can_batch
from paceline.server.models.upstream_settings import UpstreamSettings

__all__ = ["Upstream", "UpstreamVersion", "bring"]

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


_SPLITS = "paceline.split_oversized"


@dataclass(frozen=True, slots=True)
class UpstreamVersion:
    """One version of a model: its name there ("": it has none), its ModelMetadata, and its ModelConfig, None where the
    server has no such RPC. Equal ones are served alike."""

    version: str
    metadata: pb.ModelMetadataResponse
    config: config_pb.ModelConfig | None


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


def bring(
    name: str, listed: UpstreamVersion, server: RemoteServer, settings: UpstreamSettings, batching: BatchDefaults
) -> LoadedVersion:
    """A version of model `name`, ready to be served: clients see the tensors that they would see there. Raises
    ConfigError for what can't be."""
    metadata, config = listed.metadata, listed.config
    own = ModelSpec(_tensors("input", metadata.inputs), _tensors("output", metadata.outputs))
    if not (own.inputs and own.outputs):
        own = ModelSpec((), ())  # each request says
    if config is not None:
        _check(config)
        optional = {one.name for one in config.input if one.optional}
        own = replace(own, inputs=tuple(replace(one, optional=one.name in optional) for one in own.inputs))
    rows = 0 if name in settings.unbatched else _max_batch_rows(own, config, batching)
    # A limit on rows that the upstream doesn't know, or doesn't keep to, must not refuse what it would accept.
    splits = config is None or _says_it_splits(config)
    queueing = _queueing(config) if config else config_pb.ModelConfig()
    plan = _plan(own, rows, batching, queueing, splits=splits)
    served = config_pb.ModelConfig(name=name, platform=metadata.platform, backend=config.backend if config else "")
    served.MergeFrom(queueing)
    if plan.splits:  # for a server that batches in front of this one
        served.parameters[_SPLITS].string_value = "true"
    made = effective_config(served, plan, platform=metadata.platform, file="", groups=())
    model = RemoteModel(server, name, listed.version, plan.spec, metadata.platform)
    instances = tuple(model.instance(number) for number in range(settings.batches if rows else settings.calls))
    return LoadedVersion(name, listed.version, made, plan, {}, model, instances)


def _tensors(kind: str, tensors: Sequence[pb.ModelMetadataResponse.TensorMetadata]) -> tuple[TensorSpec, ...]:
    names = set()
    for one in tensors:
        if one.name in names:
            raise ConfigError(f"{kind} '{one.name}' of the upstream: expected each name once, got it again")
        names.add(one.name)
        try:
            by_name(one.datatype)
        except UnknownDatatypeError as error:
            raise ConfigError(f"{kind} '{one.name}' of the upstream: {error}") from None
        if min(one.shape, default=0) < -1:
            raise ConfigError(f"{kind} '{one.name}' of the upstream: expected sizes >= -1, got {list(one.shape)}")
    assumed = kind == "output"
    return tuple(TensorSpec(one.name, one.datatype, tuple(one.shape), assumed=assumed) for one in tensors)


def _check(config: config_pb.ModelConfig) -> None:
    """Raise ConfigError for models whose requests belong together, or get several answers."""
    if config.HasField("sequence_batching"):
        raise ConfigError("sequence_batching of the upstream's model: requests of a sequence can't be passed on")
    if config.model_transaction_policy.decoupled:
        raise ConfigError("model_transaction_policy.decoupled of the upstream's model: expected one answer per request")


def _max_batch_rows(own: ModelSpec, config: config_pb.ModelConfig | None, batching: BatchDefaults) -> int:
    """The rows of a batch: what ModelConfig says, else the flag; 0 for models that can't batch."""
    if config is not None:
        # With ragged or batch inputs, the upstream tells requests apart: joined here, they would be one request to it.
        ragged = config.batch_input or config.batch_output or any(one.allow_ragged_batch for one in config.input)
        whole = any(one.is_shape_tensor for tensors in (config.input, config.output) for one in tensors)
        if config.max_batch_size <= 0 or ragged or whole:
            return 0
    if not own.inputs:
        return config.max_batch_size if config else batching.max_batch_rows
    if config is not None:
        if all(one.optional for one in own.inputs):
            return 0  # what a request brings need not show how many rows it has
        leads_with_free = all(one.dims[:1] == (-1,) for one in (*own.inputs, *own.outputs))
        return config.max_batch_size if leads_with_free else 0
    return batching.max_batch_rows if can_batch(config_pb.ModelConfig(), own) else 0


def _says_it_splits(config: config_pb.ModelConfig) -> bool:
    return _SPLITS in config.parameters and config.parameters[_SPLITS].string_value.strip().lower() in ("true", "1")


def _queueing(config: config_pb.ModelConfig) -> config_pb.ModelConfig:
    """The upstream's priorities and timeouts, which hold for the queue here: there, only batches arrive, without the
    priorities and timeouts of their requests. Not how many may wait."""
    held = config_pb.ModelConfig()
    if not config.HasField("dynamic_batching"):
        return held
    given, batching = config.dynamic_batching, held.dynamic_batching
    batching.CopyFrom(given)
    for setting in ("preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"):
        batching.ClearField(setting)
    if not batching.priority_levels:  # without levels, these mean nothing there, and are refused here
        batching.ClearField("default_priority_level")
        batching.ClearField("priority_queue_policy")
    for policy in (batching.default_queue_policy, *batching.priority_queue_policy.values()):
        policy.ClearField("max_queue_size")
    return held


def _plan(
    own: ModelSpec, rows: int, batching: BatchDefaults, queueing: config_pb.ModelConfig, *, splits: bool
) -> ServingPlan:
    def served(tensor: TensorSpec) -> TensorSpec:
        """In metadata, no dims may also mean that the rank isn't known; checking it is left to the upstream."""
        dims = tensor.dims[1 if rows else 0 :]
        return replace(tensor, dims=dims, any_rank=not dims, assumed=tensor.assumed and bool(dims))

    spec = ModelSpec(tuple(map(served, own.inputs)), tuple(map(served, own.outputs)), batched=rows > 0)
    # What rows cost there isn't for this server to try out.
    policy = replace(batch_policy(queueing, rows, merges=rows > 0, defaults=batching), grows_always=True)
    return ServingPlan(spec, rows, policy, splits=rows > 0 and splits and spec.by_rows)
