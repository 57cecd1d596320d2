"""What is asked of the server beside the load: its own figures of a model, and memory for tensors.

Lives here: these calls, and the difference between two looks at a model's statistics. Must not: the generator's own
figures. All of it are extensions of the protocol; a server without statistics has no figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from paceline.clients.base import blocking
from paceline.clients.errors import InferenceError, ResponseError
from paceline.clients.sync import InferenceClient
from paceline.protos import inference_pb2 as pb

_STATISTICS_S: Final = 5.0
_PHASES = ("queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a server has counted of a model since it was loaded. `phases` are nanoseconds in all by phase, and
    `executions` the number of batches by rows, where the server tells them."""

    succeeded: int
    failed: int
    rows: int
    batches: int
    phases: Mapping[str, int]
    executions: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Served:
    """What a server did between two looks: requests, rows, batches, means of a request by phase, in milliseconds, and
    batches by rows."""

    succeeded: int
    failed: int
    rows: int
    batches: int
    means_ms: Mapping[str, float]
    executions: Mapping[int, int]

    @property
    def rows_per_batch(self) -> float | None:
        """None without a batch."""
        return self.rows / self.batches if self.batches else None

    @property
    def compute_ms(self) -> float | None:
        """The mean time for which a request's batch was in the model, inputs and outputs included."""
        found = [mean for name, mean in self.means_ms.items() if name.startswith("compute_")]
        return sum(found) if found else None

    @classmethod
    def between(cls, before: Statistics | None, after: Statistics | None) -> Served | None:
        """None without both looks, or if the model was loaded anew in between, so that it counts from zero."""
        if before is None or after is None or after.succeeded < before.succeeded or after.batches < before.batches:
            return None
        succeeded = after.succeeded - before.succeeded
        phases = {name: after.phases[name] - before.phases[name] for name in _PHASES}
        return cls(
            succeeded,
            after.failed - before.failed,
            after.rows - before.rows,
            after.batches - before.batches,
            {name: spent_ns / succeeded / 1e6 for name, spent_ns in phases.items()} if succeeded else {},
            {
                rows: count - before.executions.get(rows, 0)
                for rows, count in sorted(after.executions.items())
                if count > before.executions.get(rows, 0)
            },
        )


class ControlClient(InferenceClient):
    """A client with the calls that a load needs and that others don't."""

    _tells = True

    @blocking
    async def statistics(self, model: str, version: str) -> Statistics | None:
        """None if the server doesn't tell, or not within five seconds; it isn't asked again then."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        try:
            return _statistics(await self._call("ModelStatistics", request, _STATISTICS_S, ())) if self._tells else None
        except InferenceError:
            self._tells = False
            return None

    @blocking
    async def output_sizes(self, request: pb.ModelInferRequest, is_stream: bool) -> dict[str, int]:
        """The bytes of each output of the answer to `request`, by name; the most, if there are several answers."""
        if not is_stream:
            return _output_sizes(await self._call("ModelInfer", request, ..., ()))
        sizes: dict[str, int] = {}
        async for response in self._answers(request, ..., ()):
            for name, size in _output_sizes(response).items():
                sizes[name] = max(size, sizes.get(name, 0))
        return sizes

    @blocking
    async def register(self, name: str, key: str, size_bytes: int) -> None:
        """Make the object `key` of the operating system's shared memory known to the server as `name`."""
        request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=size_bytes)
        await self._call("SystemSharedMemoryRegister", request, ..., ())

    @blocking
    async def unregister(self, name: str) -> None:
        request = pb.SystemSharedMemoryUnregisterRequest(name=name)
        await self._call("SystemSharedMemoryUnregister", request, ..., ())


def _output_sizes(response: pb.ModelInferResponse) -> dict[str, int]:
    raw = response.raw_output_contents
    if len(raw) != len(response.outputs):
        raise ResponseError(f"model {response.model_name!r}: expected raw outputs, which shared memory is for")
    return {output.name: len(data) for output, data in zip(response.outputs, raw, strict=True)}


def _statistics(response: pb.ModelStatisticsResponse) -> Statistics:
    """The sum over the versions that were asked for."""
    models = response.model_stats
    executions: Counter[int] = Counter()
    for model in models:
        executions.update({batch.batch_size: batch.compute_infer.count for batch in model.batch_stats})
    return Statistics(
        sum(model.inference_stats.success.count for model in models),
        sum(model.inference_stats.fail.count for model in models),
        sum(model.inference_count for model in models),
        sum(model.execution_count for model in models),
        {name: sum(getattr(model.inference_stats, name).ns for model in models) for name in _PHASES},
        executions,
    )
