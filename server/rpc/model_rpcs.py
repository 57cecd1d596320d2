"""The RPCs about models: their configuration and statistics, their index, loading and unloading.

Lives here: the RPCs of Triton's extensions "statistics", "model configuration" and "model repository"; each converts,
calls and converts back. Must not: load, count, or keep state. What the statistics mean: Triton's extension_statistics;
`memory_usage` is for what backends measure, so it stays empty.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractContextManager

from paceline.protos import inference_pb2 as pb
from paceline.server.config import ControlMode
from paceline.server.errors import LoadFailed, NotSupported
from paceline.server.files import in_utf8
from paceline.server.models.layout import Layout, ModelFolder
from paceline.server.models.load_request import (
    Override,
    checked_name,
    parse_load_parameters,
    parse_unload_parameters,
    scratch_folder,
)
from paceline.server.models.model_record import ModelState, version_order
from paceline.server.models.repository import Repository
from paceline.server.rpc.calls import Context, answering
from paceline.server.telemetry.model_statistics import Total, VersionStatistics

_log = logging.getLogger("paceline.server.control")


class ModelRpcs:
    """RPCs over a repository of models and the folders that they come from."""

    def __init__(self, repository: Repository, layout: Layout, mode: ControlMode) -> None:
        self._repository = repository
        self._layout = layout
        self._mode = mode
        explicit = mode is ControlMode.EXPLICIT
        control = ("model_repository", "model_repository(unload_dependents)") if explicit else ()
        self.extensions = ("statistics", "model_configuration", *control)

    @answering
    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """The configuration, with everything filled in that it leaves open; the latest version's if `version` is ""."""
        return pb.ModelConfigResponse(config=self._repository.get(request.name, request.version).config)

    @answering
    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """What was done since a version was loaded: by one version, by all served versions of a model, or, without a
        name, by all models."""
        name, find = request.name, self._repository.get
        if not name:
            models = sorted(self._repository.models, key=lambda model: (model.name, version_order(model.version)))
        elif request.version:
            models = [find(name, request.version)]
        else:
            find(name, "")
            models = [find(name, version) for version in self._repository.versions(name)]
        return pb.ModelStatisticsResponse(
            model_stats=[statistics_message(model.name, model.version, model.statistics) for model in models]
        )

    @answering
    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        _refuse_repository(request.repository_name)
        if self._mode is ControlMode.EXPLICIT:
            try:
                self._repository.take_note(await asyncio.to_thread(self._layout.models))
            except OSError as error:
                _log.warning("the repositories can't be read, so RepositoryIndex lists only known models: %s", error)
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=in_utf8(line.name),
                    version=line.version,
                    state=line.state.value if line.state else "",
                    reason=in_utf8(line.reason),
                )
                for line in self._repository.index()
                if line.state is ModelState.READY or not request.ready
            ]
        )

    @answering
    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        self._refuse_unless_explicit()
        _refuse_repository(request.repository_name)
        name = checked_name(request.model_name)
        override = parse_load_parameters(name, request.parameters)
        try:
            await self._repository.load(
                name, lambda: self._folder(name, override), override.config if override else None
            )
        except LoadFailed as error:
            _log.error("%s", str(error))  # a handler that keeps the record mustn't keep what the traceback leads to
            raise
        return pb.RepositoryModelLoadResponse()

    @answering
    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        self._refuse_unless_explicit()
        _refuse_repository(request.repository_name)
        dependents = parse_unload_parameters(request.parameters)
        await self._repository.unload(checked_name(request.model_name), dependents=dependents)
        return pb.RepositoryModelUnloadResponse()

    def _refuse_unless_explicit(self) -> None:
        if self._mode is not ControlMode.EXPLICIT:
            raise NotSupported(
                "explicit model load / unload is not allowed: expected a server with --model-control-mode explicit, "
                f"got one with {self._mode.value}"
            )

    def _folder(self, name: str, override: Override | None) -> AbstractContextManager[ModelFolder]:
        """The folder to load. Runs on a thread."""
        return scratch_folder(name, override.files) if override and override.files else self._layout.find(name)


def _refuse_repository(name: str) -> None:
    if name:
        raise NotSupported(f"'repository_name' specification is not supported: expected none, got '{name}'")


def statistics_message(name: str, version: str, statistics: VersionStatistics) -> pb.ModelStatistics:
    """`statistics` in Triton's terms: times in nanoseconds; each request counts with the whole batch's time."""
    executed = statistics.queue.count
    return pb.ModelStatistics(
        name=name,
        version=version,
        last_inference=statistics.last_inference_ms,
        inference_count=statistics.rows,
        execution_count=statistics.execution_count,
        inference_stats=pb.InferStatistics(
            success=_duration(statistics.requests.count, statistics.requests.total_ns),
            fail=_duration(statistics.failed, statistics.failure_ns),
            # As in Triton, hits are among those that have left the queue: they waited for no time.
            queue=_duration(executed + statistics.cache_hit.count, statistics.queue.total_ns),
            compute_input=_duration(executed, statistics.input_ns),
            compute_infer=_duration(executed, statistics.infer_ns),
            compute_output=_duration(executed, statistics.output_ns),
            cache_hit=_total(statistics.cache_hit),
            cache_miss=_total(statistics.cache_miss),
        ),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=rows,
                compute_input=_duration(totals.count, totals.input_ns),
                compute_infer=_duration(totals.count, totals.infer_ns),
                compute_output=_duration(totals.count, totals.output_ns),
            )
            for rows, totals in statistics.by_rows().items()
        ],
        response_stats={
            str(number): pb.InferResponseStatistics(
                compute_infer=_total(totals.all),
                success=_total(totals.succeeded),
                fail=_total(totals.failed),
                empty_response=_total(totals.empty),
                cancel=_total(totals.cancelled),
            )
            for number, totals in statistics.by_answer().items()
        },
    )


def _total(total: Total) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=total.count, ns=total.ns)


def _duration(count: int, ns: int) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=ns)
