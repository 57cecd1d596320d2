"""Handing checked requests to their model's batcher.

Lives here: what the batcher is told about requests, and those that are executed in parts. Must not: do what comes
before (checks: `codec`) or after (`inference`), or wait for anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from paceline.backends.remote_messages import RemoteRequest
from paceline.backends.spec import Tensors
from paceline.scheduler.errors import SchedulerError
from paceline.scheduler.request import OnAnswers
from paceline.server.codec.codec import memory_bytes
from paceline.server.codec.decoded import DecodedRequest, RequestOptions
from paceline.server.codec.open_codec import OpenCodec
from paceline.server.codec.passing import PassedOn
from paceline.server.codec.short_way import Targets
from paceline.server.codec.splitting import Parts
from paceline.server.memory.region_tensors import Inputs, TargetedInputs
from paceline.server.models.repository import ServedModel
from paceline.server.requests.in_flight import InFlight

__all__ = ["ready", "ready_remote", "submit"]


# hot path: see bench/
def ready(
    flights: Iterable[InFlight], model: ServedModel, options: RequestOptions, group: Iterable[tuple[Inputs, Targets]]
) -> None:
    """Write into `flights`, which all ask for the same, what the batcher has to know. `group` has for each its inputs,
    and which outputs belong in shared memory; if that is a GPU's, the instance's thread has to know."""
    # The batcher has their inputs: these are in no decoded request.
    decoded = DecodedRequest((), options)
    parameters = options.parameters
    for flight, (inputs, targets) in zip(flights, group, strict=False):
        if decoded.targets is not targets:
            decoded = DecodedRequest((), options, targets)
        if targets and model.writes_outputs and any(one.region.kind == "cuda" for one in targets.values()):
            inputs = TargetedInputs.to(targets, inputs)
        flight.decoded = decoded
        flight.payload, flight.rows, flight.key = inputs, options.rows, options.key
        flight.size_bytes = options.size_bytes if options.size_bytes >= 0 else sum(map(memory_bytes, inputs))
        flight.priority, flight.timeout_ns = parameters.priority, parameters.timeout_ns
        flight.tag = flight.trail


def ready_remote(flight: InFlight, model: ServedModel, decoded: DecodedRequest, passed_on: PassedOn) -> None:
    """The same for a model that another server executes. `passed_on` goes along: what that server needs besides
    tensors."""
    ready((flight,), model, decoded.options, ((decoded.inputs, decoded.targets),))
    # Inputs are never in shared memory here: that and another server exclude each other.
    options, inputs = decoded.options, cast("Tensors", decoded.inputs)
    flight.payload = RemoteRequest(
        inputs, options.outputs, flight.deadline_ns, flight.message.id, *passed_on, spec=options.spec
    )
    flight.key = options.key, passed_on.key


# hot path: see bench/
def submit(flights: Sequence[InFlight], model: ServedModel, on_answers: OnAnswers) -> Sequence[SchedulerError | None]:
    """Hand `flights` to the batcher, which calls `on_answers` when they have ended. They are `ready` and differ only in
    tensors and deadlines. Returns as `Batcher.submit`. A request of more rows than a batch may have is executed in
    parts."""
    first = flights[0]
    for flight in flights:
        flight.on_answers = on_answers
    if 0 < model.max_batch_rows < first.rows:
        for flight in flights:
            model.in_parts(_in_parts(flight, model).task)
        return ()
    return model.batcher.submit(flights)


def _in_parts(flight: InFlight, model: ServedModel) -> Parts:
    payload = flight.payload
    if not isinstance(payload, RemoteRequest):
        return Parts(flight, model.batcher, payload)
    join = model.codec.join if isinstance(model.codec, OpenCodec) else None
    return Parts(
        flight, model.batcher, payload.inputs, lambda part: payload._replace(inputs=cast("Tensors", part), id=""), join
    )
