"""Triton's statistics extension: `ModelStatistics`.

Lives here: the message, made of what `VersionStatistics` holds. Must not: count. Source of the meanings: Triton's
extension_statistics; `response_stats` is for decoupled models, `memory_usage` for what backends measure, so both stay
empty.
"""

from __future__ import annotations

from paceline.protos import inference_pb2 as pb
from paceline.server.models.model_record import version_order
from paceline.server.models.repository import Repository, ServedModel
from paceline.server.rpc.calls import Context, answering
from paceline.server.telemetry.model_statistics import BatchTotals, VersionStatistics

__all__ = ["StatisticsService", "statistics_message"]


class StatisticsService:
    """Reports what models have done since they were loaded."""

    extensions = ("statistics",)

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    @answering
    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """The statistics of one version, of all served versions of a model, or, without a name, of all models."""
        models = self._models(request.name, request.version)
        return pb.ModelStatisticsResponse(
            model_stats=[statistics_message(model.name, model.version, model.statistics) for model in models]
        )

    def _models(self, name: str, version: str) -> list[ServedModel]:
        if not name:
            return sorted(self._repository.models, key=lambda model: (model.name, version_order(model.version)))
        one = self._repository.get(name, version)
        return [one] if version else [self._repository.get(name, each) for each in self._repository.versions(name)]


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
            queue=_duration(executed, statistics.queue.total_ns),
            compute_input=_duration(executed, statistics.input_ns),
            compute_infer=_duration(executed, statistics.infer_ns),
            compute_output=_duration(executed, statistics.output_ns),
            cache_hit=_duration(0, 0),
            cache_miss=_duration(0, 0),
        ),
        batch_stats=[_batch(rows, totals) for rows, totals in statistics.by_rows().items()],
    )


def _batch(rows: int, totals: BatchTotals) -> pb.InferBatchStatistics:
    return pb.InferBatchStatistics(
        batch_size=rows,
        compute_input=_duration(totals.count, totals.input_ns),
        compute_infer=_duration(totals.count, totals.infer_ns),
        compute_output=_duration(totals.count, totals.output_ns),
    )


def _duration(count: int, ns: int) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=ns)
