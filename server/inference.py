"""One inference request, from message to message, whichever RPC brought it.

Lives here: the order of the steps. Must not: checks (codec), look-ups (repository), waiting policy (batcher) or what
belongs to one RPC alone.
"""

from __future__ import annotations

import asyncio
import time

from backends.base import Tensors
from protos import inference_pb2 as pb
from scheduler.batcher import BatchFacts, Pending
from scheduler.observer import Drop
from server.codec import DecodedRequest, tensor_bytes
from server.errors import ModelNotReady
from server.region_tensors import Inputs
from server.repository import Repository, ServedModel
from server.splitting import submit_parts
from server.tracing import Tracer

__all__ = ["Inference"]

_QUIET_S = 0.05
_QUIET_TRIES = 20


class Inference:
    """Answers inference requests while `serving`; `tracer` may want to know when."""

    def __init__(self, repository: Repository, tracer: Tracer | None = None) -> None:
        self._repository = repository
        self._tracer = tracer or Tracer()
        self.serving = False
        self._refused = 0

    # hot path: see bench/
    async def infer(self, request: pb.ModelInferRequest, rpc_deadline_ns: int) -> pb.ModelInferResponse:
        """The answer to `request`, whose caller gives up at `rpc_deadline_ns` on the monotonic clock.

        Cancelling it takes the request out of the queue. Raises what `server.errors` has a status for.
        """
        if not self.serving:
            raise self._refusal(request)
        model = self._repository.get(request.model_name, request.model_version)
        began_ns = time.monotonic_ns()
        try:
            response, facts = await _answer(model, request, rpc_deadline_ns)
        except BaseException as error:
            model.statistics.on_failure(error, time.monotonic_ns() - began_ns)
            raise
        model.statistics.on_success(time.monotonic_ns() - began_ns)
        if self._tracer.active and facts is not None:
            self._tracer.record(model.name, model.version, request.id, began_ns, facts)
        return response

    async def refuse_until_quiet(self) -> None:
        """Refuse requests until none has come for a moment, or for a second. gRPC takes up one call at a time; those
        that have arrived and wait for their turn when its server stops would be told CANCELLED, for no doing of their
        own, and their clients wouldn't try elsewhere."""
        self.serving = False
        for _ in range(_QUIET_TRIES):
            seen = self._refused
            await asyncio.sleep(_QUIET_S)
            if self._refused == seen:
                return

    def _refusal(self, request: pb.ModelInferRequest) -> ModelNotReady:
        """What a request gets once the server stops, counted as its model's if there is one."""
        self._refused += 1
        error = ModelNotReady("the server is stopping")
        if (model := self._repository.find(request.model_name, request.model_version)) is not None:
            model.statistics.on_drop(Drop.CLOSED)
            model.statistics.on_failure(error, 0)
        return error


async def _answer(
    model: ServedModel, request: pb.ModelInferRequest, rpc_deadline_ns: int
) -> tuple[pb.ModelInferResponse, BatchFacts | None]:
    decoded = model.codec.decode(request)
    results, pending = await _execute(model, decoded, rpc_deadline_ns)
    response = model.codec.encode(request, decoded, results)
    if decoded.parameters.batch_info and pending.facts is not None:
        _tell_facts(response, model.batch_id_prefix, pending.facts)
    return response, pending.facts


async def _execute(
    model: ServedModel, decoded: DecodedRequest, rpc_deadline_ns: int
) -> tuple[Tensors, Pending[Inputs, Tensors]]:
    """Have the batcher run the request; the results, and what was waited for (of a split request, the last part)."""
    how = {
        "size_bytes": sum(map(tensor_bytes, decoded.inputs)) if model.counts_bytes else 0,
        "priority": decoded.parameters.priority,
        "timeout_ns": decoded.parameters.timeout_ns,
        "rpc_deadline_ns": rpc_deadline_ns,
    }
    if model.max_batch_rows and decoded.rows > model.max_batch_rows:
        with model.in_parts():
            return await submit_parts(model.batcher, decoded.inputs, decoded.rows, decoded.key, **how)
    pending = model.batcher.submit(decoded.inputs, decoded.rows, decoded.key, **how)
    try:
        return await pending, pending
    finally:
        # An error has a traceback, that this frame, and this frame would have the error: shared memory that a request
        # used would stay open until the garbage collector comes by.
        del pending


def _tell_facts(response: pb.ModelInferResponse, batch_id_prefix: str, facts: BatchFacts) -> None:
    told = response.parameters
    told["paceline_batch_id"].string_param = f"{batch_id_prefix}-{facts.number}"
    told["paceline_batch_rows"].int64_param = facts.rows
    told["paceline_batch_padded_rows"].int64_param = facts.padded_rows
    told["paceline_queue_us"].int64_param = facts.queue_ns // 1_000
    told["paceline_compute_us"].int64_param = facts.compute_ns // 1_000
